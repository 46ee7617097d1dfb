"""What every program of ours does around its work: messages, and errors as two lines and an exit code.

Invalid input and a machine that refuses (a full disk, no permission) are two lines. An error that nobody expected is
two lines too, and a file with its traceback; `TOOLKIT_DEBUG=1` prints the traceback itself. A rank of a run reports in
its run folder instead (`toolkit.observe.rank_process`).
"""

import contextlib
import errno
import io
import json
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from toolkit.errors import EXIT_DONE, EXIT_RUN_FAILED, OutOfMemory, RunFailed, ToolkitError, visible
from toolkit.files.secrets import hide_secrets, hide_words
from toolkit.installation import documentation_address, missing_package
from toolkit.screen_text import shown_on

DEBUG_VARIABLE = "TOOLKIT_DEBUG"
FAILURES_PAGE = "how-to/my-run-failed.md"
MAX_CAUSE_CHARACTERS = 200
# What the machine refuses -> what to do about it. Other errors of the operating system are ours.
MACHINE_FAULTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space, or name a folder on another disk"),
    errno.EFBIG: "raise the limit on the size of files: `ulimit -f unlimited`",
    errno.EROFS: "name a folder on a disk that can be written to",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check who owns it and who may read and write it: `ls -ld`"),
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ELOOP: "a part of the path is a link to itself",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files: `ulimit -n 4096`"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk: `dmesg | tail`"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "free memory or end processes: `ulimit -a` shows the limits"),
}


def exit_code_of(work: Callable[[], int | None], *, as_json: bool = False) -> int:
    """Do a program's work and return its exit code; every error is printed, and none is raised.

    `work` returns an exit code, or None when it is done. With `as_json` an error is a document on stdout too.
    """
    prepare_streams()
    try:
        _check_working_directory()
        code = work()
        sys.stdout.flush()
        return EXIT_DONE if code is None else code
    except KeyboardInterrupt:
        error: ToolkitError = RunFailed("stopped")
        print_message(error.message)
    except BrokenPipeError:  # `| head` has seen enough
        _discard(sys.stdout)
        return EXIT_RUN_FAILED
    except Exception as raised:  # the last handler
        error = raised if isinstance(raised, ToolkitError) else _explained(raised)
        print_message(f"error: {error}")
    if as_json:
        print_failure_json(error.message, error.hint, error.exit_code)
    return error.exit_code


def _check_working_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        hint = "change to a folder that exists: `cd`"
        raise ToolkitError("the working directory no longer exists", hint=hint) from None


def print_message(text: str) -> None:
    """Print a line for the user to stderr, at once, without secrets and control characters.

    A terminal that is gone, or a full disk, does not end the work.
    """
    try:
        print(shown_on(sys.stderr, visible(hide_secrets(text), keep="\n\t")), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: closed
        _discard(sys.stderr)


def print_failure(status: str, failure: Mapping[str, object]) -> None:
    """Print why a run failed, with what to do about it: its log is relayed only up to the failure."""
    print_message(f"error: {status}: {failure['message']}")
    if failure.get("hint"):
        print_message(f"  hint: {failure['hint']}")
    if not failure.get("invalid_input"):
        print_message(f"  see {documentation_address(FAILURES_PAGE, status)}")


def print_failure_json(message: str, hint: str | None, exit_code: int) -> None:
    """Print why there is no answer, as the JSON document of a command with `--json`."""
    facts = {"message": hide_secrets(message), "hint": hint and hide_secrets(hint), "exit_code": exit_code}
    try:
        print(json.dumps({"failure": facts}, indent=2), flush=True)
    except (OSError, ValueError):  # ValueError: closed
        _discard(sys.stdout)


def prepare_streams() -> None:
    """Give this process the three standard streams, and let stdout print any text in any locale.

    Where one was closed (`>&-`), the next file to be opened would take its place, and be written to by `print`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def _discard(stream: TextIO) -> None:
    """Send what is left in a stream nowhere: Python would try to print it once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def _explained(error: Exception) -> ToolkitError:
    """Return what the machine refuses or lacks as an error that a user can read, and any other as a mistake of ours."""
    if isinstance(error, MemoryError):
        return OutOfMemory("the host has no memory left", hint="give the job more host memory")
    name = error.name if isinstance(error, ModuleNotFoundError) else None  # of an extra's package, or of ours
    if name is not None and (missing := missing_package(name.partition(".")[0])):
        return missing
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        print_message("".join(traceback.format_exception(error)))
    if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
        if error.filename is None:  # usually of stdout, which keeps what it could not write
            _discard(sys.stdout)
        what = f"{error.filename}: {error.strerror}" if error.filename else f"cannot write: {error.strerror}"
        return ToolkitError(what, hint=MACHINE_FAULTS[error.errno])
    what = f"unexpected {type(error).__name__}" + (f": {error}" if str(error) else "")
    what = what if len(what) <= MAX_CAUSE_CHARACTERS else f"{what[:MAX_CAUSE_CHARACTERS]}..."
    page = documentation_address(FAILURES_PAGE, "report-a-problem")
    try:
        how = f"report it with {_save_traceback(error)} ({page})"
    except OSError:  # no folder for temporary files can be written to
        how = f"run it again with {DEBUG_VARIABLE}=1 and report it ({page})"
    return RunFailed(what, hint=f"it is a mistake in the toolkit: {how}")


def _save_traceback(error: Exception) -> str:
    """Write the command and the traceback, without secrets, to a new file that only its owner can read."""
    from toolkit._version import __version__

    platforms = f"finetune-toolkit {__version__}, Python {platform.python_version()}, {platform.platform()}"
    lines = [platforms, f"command: {shlex.join(hide_words(sys.argv))}", "", "".join(traceback.format_exception(error))]
    descriptor, name = tempfile.mkstemp(prefix="toolkit-error-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(hide_secrets("\n".join(lines)))
    return name
