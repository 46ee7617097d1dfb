"""Heartbeats of a run's ranks: what each is doing, when it last made progress, and how to get its stacks.

A rank writes `ranks/rankR.heartbeat` from a thread of its own; the launcher and the other ranks read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil
from pydantic import TypeAdapter, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.reading import read_bytes
from toolkit.record.folder import MAX_PID

HANG_TIMEOUT_VARIABLE = "TOOLKIT_HANG_TIMEOUT_MINUTES"
# Shorter than transformers' `ddp_timeout` of 30 minutes, after which a collective fails without saying where.
DEFAULT_HANG_TIMEOUT_MINUTES = 20.0
# Names the attempt whose ranks write here: those of an earlier one, on a node that was cut off, stop when they see it.
ATTEMPT_ID = "attempt.id"
ATTEMPT_ID_CHARACTERS = 32
# Created by the rank that reports a hang, so that only one does.
HANG_CLAIM = "hang.claim"
# Make a rank write the stacks of all its threads, or of its main thread alone. faulthandler does so in C, even while
# the GIL is held.
STACKS_SIGNAL = signal.SIGUSR2
MAIN_STACK_SIGNAL = signal.SIGRTMIN + 1
STACKS_CHARACTERS = 8000
# The outermost frame of a main thread, or the mark of a stack that is too deep. faulthandler writes that thread last.
_LAST_LINE = re.compile(r" in (<module>|_run_module_as_main)$|^  \.\.\.$")
# A rank writes every second; one that has not for this long does not run.
UNRESPONSIVE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The state that one rank last wrote of itself."""

    rank: int
    host: str
    pid: int
    process_started_unix: float
    """Identifies the process together with the pid, which may have been reused."""
    step: int
    """Completed optimizer steps."""
    micro_steps: int
    """Batches started since the process started."""
    phase: str
    progress_unix: float
    """When step, batch or phase last changed."""
    written_unix: float
    peak_host_bytes: int | None = None
    """Peak resident memory of the process so far."""
    attempt_id: str | None = None
    """What the ranks of this attempt call it."""

    @property
    def process(self) -> psutil.Process | None:
        """The process on this node, or None where it is gone or on another node."""
        if self.host != os.uname().nodename:
            return None
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.process_started_unix) < 1 and found.status() != psutil.STATUS_ZOMBIE:
                return found
        return None

    @property
    def is_gone(self) -> bool:
        """True if the process ran on this node and is gone."""
        return self.host == os.uname().nodename and self.process is None


_HEARTBEAT = TypeAdapter(Heartbeat)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def heartbeat_path(ranks: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat; `ranks` is the folder of the ranks' files."""
    return ranks / f"rank{rank}.heartbeat"


def stacks_path(ranks: Path, rank: int) -> Path:
    """Return the path to which a rank writes its stacks on `STACKS_SIGNAL`."""
    return ranks / f"rank{rank}.stacks"


def write_attempt_id(ranks: Path, attempt_id: str) -> None:
    """Make an attempt the one whose ranks write into this folder."""
    write_text(ranks / ATTEMPT_ID, attempt_id)


def read_attempt_id(ranks: Path) -> str | None:
    """Return the attempt whose ranks write into this folder; None where none has said so.

    The folder is listed first: on NFS that asks the server, where a file alone may be answered from the cache.
    """
    with contextlib.suppress(OSError):
        list(ranks.iterdir())
        with (ranks / ATTEMPT_ID).open(encoding="ascii", errors="replace") as file:
            return file.read(ATTEMPT_ID_CHARACTERS)
    return None


def is_superseded(ranks: Path, attempt_id: str | None) -> bool:
    """Return True for an attempt in whose place another one writes into this folder."""
    return attempt_id is not None and read_attempt_id(ranks) not in (None, attempt_id)


def write_heartbeat(ranks: Path, heartbeat: Heartbeat) -> None:
    """Replace the rank's heartbeat; a reader sees the old or the new one."""
    path = heartbeat_path(ranks, heartbeat.rank)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(asdict(heartbeat)))
    temporary.replace(path)


def read_heartbeats(ranks: Path) -> list[Heartbeat]:
    """Return the last heartbeat of every rank of this attempt that has written one, in rank order."""
    found = [heartbeat for path in ranks.glob("rank*.heartbeat") if (heartbeat := _read_heartbeat(path)) is not None]
    current = read_attempt_id(ranks)
    own = [heartbeat for heartbeat in found if current is None or heartbeat.attempt_id in (None, current)]
    return sorted(own, key=lambda heartbeat: heartbeat.rank)


def _read_heartbeat(path: Path) -> Heartbeat | None:
    """Return what a rank wrote, or None for a file that no rank has written: its pid is sent signals."""
    try:
        heartbeat = _HEARTBEAT.validate_json(read_bytes(path), strict=True)
    except (ToolkitError, ValidationError):
        return None
    return heartbeat if 0 < heartbeat.pid <= MAX_PID else None


def write_stacks_on_signal(file: IO[str]) -> None:
    """Make this process write its stacks to the file, for `collect_stacks` to read."""
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.register(MAIN_STACK_SIGNAL, file=file, all_threads=False)


def collect_stacks(ranks: Path, heartbeats: Sequence[Heartbeat], *, seconds: float = 3.0) -> dict[str, str]:
    """Signal every rank on this node to write the stacks of its threads, and return those written within `seconds`.

    A stopped process (SIGSTOP) cannot answer, so it is continued until it has answered. All of its threads then run,
    and to read the frames of a running thread from another one can crash the process: its main thread writes its own.
    This process holds the GIL meanwhile, and other ranks wait.
    """
    waiting = {heartbeat.rank: heartbeat for heartbeat in heartbeats if heartbeat.process is not None}
    stopped = {rank for rank, heartbeat in waiting.items() if _is_stopped(heartbeat)}
    for heartbeat in waiting.values():
        if heartbeat.pid == os.getpid():
            with stacks_path(ranks, heartbeat.rank).open("a") as file:
                faulthandler.dump_traceback(file)
            continue
        if heartbeat.rank in stopped:
            _signal_main_thread(heartbeat, MAIN_STACK_SIGNAL)
        else:
            _signal(heartbeat, STACKS_SIGNAL)
        _signal(heartbeat, signal.SIGCONT)
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in [rank for rank in waiting if _is_complete(_stacks(ranks, rank))]:
            heartbeat = waiting.pop(rank)
            if rank in stopped:
                _signal(heartbeat, signal.SIGSTOP)
    return {str(heartbeat.rank): _stacks(ranks, heartbeat.rank) or "no answer" for heartbeat in heartbeats}


def _is_stopped(heartbeat: Heartbeat) -> bool:
    with contextlib.suppress(psutil.Error):
        process = heartbeat.process
        return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _signal(heartbeat: Heartbeat, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(heartbeat.pid, number)


def _signal_main_thread(heartbeat: Heartbeat, number: int) -> None:
    ctypes.CDLL(None).tgkill(heartbeat.pid, heartbeat.pid, number)


def _stacks(ranks: Path, rank: int) -> str:
    try:
        return stacks_path(ranks, rank).read_text(errors="replace")[-STACKS_CHARACTERS:]
    except OSError:
        return ""


def _is_complete(stacks: str) -> bool:
    return bool(stacks) and _LAST_LINE.search(stacks.splitlines()[-1]) is not None


def main_thread(stacks: str) -> list[str]:
    """Return the frames of the main thread, innermost first: `backward (autograd/graph.py, line 7)`.

    faulthandler writes the main thread last.
    """
    last = re.split(r"(?:Current thread|Thread) 0x", stacks)[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, flags=re.MULTILINE)
    return [f"{function} ({'/'.join(Path(file).parts[-2:])}, line {line})" for file, line, function in found]


def unresponsive_reason(heartbeat: Heartbeat, *, now: float) -> str | None:
    """Return why a rank does not respond (gone, stopped, blocked), or None for one that still writes."""
    process = heartbeat.process
    if heartbeat.is_gone:
        return f"its process {heartbeat.pid} is gone"
    with contextlib.suppress(psutil.Error):
        if _is_stopped(heartbeat):
            return f"its process {heartbeat.pid} is stopped"
        if (
            process is not None
            and process.status() == psutil.STATUS_DISK_SLEEP
            and now - heartbeat.written_unix > UNRESPONSIVE_SECONDS
        ):
            return f"its process {heartbeat.pid} waits for a disk or a device"
    is_late = now - heartbeat.written_unix > UNRESPONSIVE_SECONDS
    return f"its process {heartbeat.pid} does not respond" if is_late else None
