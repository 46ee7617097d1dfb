"""One attempt: a command on mutated files, in a folder of its own, and how it ended.

Every attempt must end as accepted or refused. It fails with any other exception, with a message of many lines, after
too long, or if it wrote anything outside of its named output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.cli import program
from toolkit.errors import ToolkitError

ROOT = Path(__file__).parents[2]
OUTPUT = "out"
"""The folder that a command may write, beside its inputs; `Case.writes` names another one."""
LIBRARIES_WRITE = (".cache", ".config")
# A command takes milliseconds. An attempt that takes more than this has failed as one that would never end.
CPU_SECONDS, WALL_SECONDS = 10.0, 60.0
MAX_MESSAGE_LINES, MAX_MESSAGE_CHARACTERS = 6, 1_500


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one attempt does: files in an empty folder, some of them mutated, and a command beside them."""

    format: str
    files: Mapping[str, bytes | Path]
    """Name to content, or to a file to link."""
    command: Command
    changed: str = ""
    """The name of the file that is mutated."""
    original: bytes = b""
    """The content of that file before."""
    writes: tuple[str, ...] = (OUTPUT,)

    def __repr__(self) -> str:
        content = self.files.get(self.changed)
        return f"Case({self.command}, {self.changed}: {str(content)[:3_000]})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    kind: str
    """`accepted`, `refused` or `failed`."""
    cpu_seconds: float
    message: str = ""
    family: str = ""
    """Of a failure: exception type and the deepest line of the toolkit."""
    report: str = ""
    """Of a failure: the traceback."""


class TakesTooLong(BaseException):
    """Raised in an attempt that would not end. No `except Exception` holds it."""


@dataclass(frozen=True)
class Command:
    """Words for the command line, run in this process."""

    words: tuple[str, ...]

    def __call__(self) -> int:
        program.main(list(self.words))
        raise AssertionError("`main` returned")

    def __str__(self) -> str:
        return f"toolkit {' '.join(self.words)}"


@dataclass(frozen=True)
class Call(Command):
    """A function for what no light command reaches; `words` describe it."""

    function: Callable[[], Any]

    def __call__(self) -> int:
        code = self.function()
        return code if isinstance(code, int) else 0

    def __str__(self) -> str:
        return " ".join(self.words)


def command(*words: object) -> Command:
    return Command(tuple(map(str, words)))


def call(function: Callable[[], Any]) -> Call:
    return Call((str(function.__doc__).split("\n")[0],), function)


def attempt(case: Case, folder: Path) -> Outcome:
    """Run a case in `folder`, which must not exist, and remove the folder."""
    work = folder / "work"
    work.mkdir(parents=True)
    (folder / "home").mkdir()
    for name, content in case.files.items():
        _place(work / name, content)
    own = [folder / "command.txt", *(folder / "home" / name for name in LIBRARIES_WRITE)]
    own += [work / name for name in case.writes]
    (folder / "command.txt").write_text(f"{case.command}\n")
    before = listing(folder, leave_out=own)
    try:
        with _inside(work, home=folder / "home"):
            outcome = run(case.command)
        after = listing(folder, leave_out=own)
        if outcome.kind != "failed" and before != after:
            changed = sorted(map(str, dict(before.items() ^ after.items())))
            outcome = _failed("wrote outside of its output", f"{case.command} changed {changed}", outcome.cpu_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def run(run_command: Command) -> Outcome:
    """Run a command here, and classify its end."""
    started = time.process_time()

    def seconds() -> float:
        return time.process_time() - started

    out, err = _captured(), _captured(errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited_time():
            code = run_command()
            out.flush()
    except ToolkitError as error:
        return _refused(error.exit_code, f"error: {error}", seconds())
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report = "".join(traceback.format_exception(error, limit=-25))
        return _failed(_family(type(error).__name__, report), report[-6_000:], seconds())
    message = _text(err)
    if "error: unexpected " in message:  # the last handler of the command line has caught it
        kind = message.rpartition("error: unexpected ")[2].split(":")[0].split("\n")[0]
        return _failed(_family(kind, message), message[-6_000:], seconds())
    if code in (0, 1):
        return Outcome(kind="accepted", cpu_seconds=seconds())
    return _refused(code, message, seconds())


def _refused(code: int, message: str, seconds: float) -> Outcome:
    message = message[max(0, message.rfind("error: ")) :]
    lines = message.strip().splitlines()
    if code != 2:
        return _failed(f"exit code {code}", message[-3_000:], seconds)
    if not lines or len(lines) > MAX_MESSAGE_LINES or len(message) > MAX_MESSAGE_CHARACTERS:
        what = f"message of {len(lines)} lines, {len(message)} characters"
        return _failed("message too long", f"{what}:\n{message[:3_000]}", seconds)
    return Outcome(kind="refused", cpu_seconds=seconds, message=message)


def _failed(family: str, report: str, seconds: float) -> Outcome:
    return Outcome(kind="failed", cpu_seconds=seconds, family=family, report=report)


def _family(kind: str, report: str) -> str:
    """Return the kind of an exception with the deepest line of the toolkit in its traceback."""
    frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', report)
    ours = [frame for frame in frames if frame[0].startswith(f"{ROOT}/toolkit/")]
    if not ours:
        return f"{kind} at no line of the toolkit"
    name, line, function = ours[-1]
    return f"{kind} at {Path(name).relative_to(ROOT)}:{line} in {function}"


def _place(path: Path, content: bytes | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        os.link(content, path)
    else:
        path.write_bytes(content)


def listing(folder: Path, *, leave_out: list[Path]) -> dict[str, tuple[int, int, int]]:
    """Return every file and folder below a folder, with mode, size and time of change."""
    found = {}
    for name, folders, files in os.walk(folder):
        here = Path(name)
        folders[:] = [each for each in folders if here / each not in leave_out]
        for each in (*folders, *files):
            path = here / each
            if path not in leave_out:
                facts = path.lstat()
                is_folder = path.is_dir()
                found[str(path.relative_to(folder))] = (
                    facts.st_mode, 0 if is_folder else facts.st_size, 0 if is_folder else facts.st_mtime_ns
                )  # fmt: skip
    return found


@contextlib.contextmanager
def _inside(work: Path, *, home: Path) -> Iterator[None]:
    environment, before, limit = dict(os.environ), Path.cwd(), sys.getrecursionlimit()
    cache = environment.get("TOOLKIT_CACHE") or str(Path("~/.cache/finetune-toolkit").expanduser())
    os.environ.update(HOME=str(home), TOOLKIT_CACHE=cache, TOOLKIT_DEBUG="1")
    os.chdir(work)
    try:
        yield
    finally:
        os.chdir(before)
        sys.setrecursionlimit(limit)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TakesTooLong in this thread, where a system call waits or Python code runs."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise TakesTooLong(f"{CPU_SECONDS} s of CPU time" if number == signal.SIGPROF else f"{WALL_SECONDS} s")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _captured(errors: str = "strict") -> io.TextIOWrapper:
    """A stream that encodes what is printed, as a terminal's does."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "replace")


def limit_memory(num_bytes: int) -> None:
    """Let this process and its children allocate at most this many bytes of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
