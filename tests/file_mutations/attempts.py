"""One attempt: a command on mutated files, in a folder of its own, and how it ended.

Every attempt must end as accepted or refused. It fails with any other exception, with a message of many lines, after
too long, or if it wrote anything outside of its named output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from toolkit.cli import program
from toolkit.errors import ToolkitError

ROOT = Path(__file__).parents[2]
LIBRARIES_WRITE = (".cache", ".config")  # in the home folder
# A command takes milliseconds. An attempt that takes more than this has failed as one that would never end.
CPU_SECONDS, WALL_SECONDS = 10.0, 60.0
MAX_MESSAGE_LINES, MAX_MESSAGE_CHARACTERS = 6, 1_500


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one attempt does: files in an empty folder, some of them mutated, and a command beside them."""

    format: str
    files: Mapping[str, bytes | Path]  # name to content, or to a file to link
    command: Command
    changed: str = ""  # the name of the file that is mutated
    writes: tuple[str, ...] = ("out",)  # the folders that the command may write, beside its inputs

    def __repr__(self) -> str:
        return f"Case({self.command}, {self.changed}: {str(self.files.get(self.changed))[:3_000]})"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    kind: str  # `accepted`, `refused` or `failed`
    cpu_seconds: float
    message: str = ""  # of a failure: the traceback
    family: str = ""  # of a failure: exception type and the deepest line of the toolkit


class TakesTooLong(BaseException):
    """Raised in an attempt that would not end. No `except Exception` holds it."""


@dataclass(frozen=True)
class Command:
    """A command line, run in this process; or a function for what no light command reaches."""

    name: str
    run: Callable[[], Any]

    def __str__(self) -> str:
        return self.name


def command(*words: object) -> Command:
    argv = list(map(str, words))
    return Command(" ".join(["toolkit", *argv]), lambda: program.main(argv))


def call(function: Callable[[], Any]) -> Command:
    return Command(str(function.__doc__), function)


def attempt(case: Case, folder: Path) -> Outcome:
    work, home = folder / "work", folder / "home"
    home.mkdir(parents=True)
    for name, content in case.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            os.link(content, path)
        else:
            path.write_bytes(content)
    writable = {*(home / name for name in LIBRARIES_WRITE), *(work / name for name in case.writes)}
    before = _listing(folder, writable)
    cache = os.environ.get("TOOLKIT_CACHE") or str(Path("~/.cache/finetune-toolkit").expanduser())
    variables = {"HOME": str(home), "TOOLKIT_CACHE": cache, "TOOLKIT_DEBUG": "1"}
    try:
        with mock.patch.dict(os.environ, variables), contextlib.chdir(work):
            outcome = run(case.command)
        changed = sorted(str(path) for path, _ in before.items() ^ _listing(folder, writable).items())
        if changed and outcome.kind != "failed":
            report = f"{case.command} changed {changed}"
            return Outcome("failed", outcome.cpu_seconds, report, "wrote outside of its output")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _listing(folder: Path, leave_out: set[Path]) -> dict[Path, tuple[int, ...]]:
    found = {path: path.lstat() for path in folder.rglob("*") if leave_out.isdisjoint((path, *path.parents))}
    return {
        path: (facts.st_mode, *(() if path.is_dir() else (facts.st_size, facts.st_mtime_ns)))
        for path, facts in found.items()
    }


def run(run_command: Command) -> Outcome:
    started, code, message, kind = time.process_time(), 0, "", ""
    out, err = (  # they encode what is printed, as a terminal does
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited_time():
            code = run_command.run() or 0
    except ToolkitError as error:
        code, message = error.exit_code, f"error: {error}"
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind, message = type(error).__name__, "".join(traceback.format_exception(error, limit=-25))
    seconds, message = time.process_time() - started, message or err.buffer.getvalue().decode("utf-8", "replace")
    if not kind and "error: unexpected " in message:  # the last handler of the command line has caught it
        kind = re.split("[:\n]", message.rpartition("error: unexpected ")[2])[0]
    if kind:
        frames = re.findall(rf'File "{ROOT}/(toolkit/.*?)", line (\d+), in (\S+)', message)
        place = "{}:{} in {}".format(*frames[-1]) if frames else "no line of the toolkit"
        return Outcome("failed", seconds, message[-6_000:], f"{kind} at {place}")
    if code in (0, 1):
        return Outcome("accepted", seconds)
    message = message[max(0, message.rfind("error: ")) :]
    if code != 2:
        return Outcome("failed", seconds, message[-3_000:], f"exit code {code}")
    if not 0 < len(message.strip().splitlines()) <= MAX_MESSAGE_LINES or len(message) > MAX_MESSAGE_CHARACTERS:
        return Outcome("failed", seconds, message[:3_000], "message too long")
    return Outcome("refused", seconds, message)


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TakesTooLong in this thread, where a system call waits or Python code runs."""

    def stop(number: int, _frame: object) -> None:
        raise TakesTooLong(f"{CPU_SECONDS} s of CPU time" if number == signal.SIGPROF else f"{WALL_SECONDS} s")

    timers = (signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS)
    previous = {number: signal.signal(number, stop) for number, _, _ in timers}
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, previous[number])
