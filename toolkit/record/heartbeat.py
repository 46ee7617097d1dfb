"""Heartbeats of a run's ranks: what each is doing, when it last made progress, its stacks, and which rank hangs a run.

A rank writes `ranks/rankR.heartbeat` from a thread of its own; the launcher and the other ranks read it.
"""

import contextlib
import faulthandler
import os
import re
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import read_bytes
from toolkit.record import status

HANG_TIMEOUT_VARIABLE = "TOOLKIT_HANG_TIMEOUT_MINUTES"
# Shorter than transformers' `ddp_timeout` of 30 minutes, after which a collective fails without saying where.
DEFAULT_HANG_TIMEOUT_MINUTES = 20.0
# Names the attempt whose ranks write here: those of an earlier one, on a node that was cut off, stop when they see it.
ATTEMPT_ID = "attempt.id"
ATTEMPT_ID_CHARACTERS = 32
HANG_CLAIM = "hang.claim"  # created by the rank that reports a hang, so that only one does
# Makes a rank write the stacks of all its threads, for which it registers faulthandler: in C, even under the GIL.
STACKS_SIGNAL = signal.SIGUSR2
STACKS_CHARACTERS = 8000
# The outermost frame of a main thread, or the mark of a stack that is too deep. faulthandler writes that thread last.
_LAST_LINE = re.compile(r"(?: in (?:<module>|_run_module_as_main)|\n  \.\.\.)\s*\Z")
# Frames of a main thread that waits for other ranks in a collective.
_COLLECTIVE = re.compile(r"\((distributed/|comm/|autograd/graph\.py|utils/operations\.py)")
UNRESPONSIVE_SECONDS = 5.0  # a rank writes every second; one that has not for this long does not run
HINT = "failure.json has the stacks of all ranks; slow steps need a longer `--hang-timeout-minutes`"


class Heartbeat(BaseModel):
    """The state that one rank last wrote of itself."""

    model_config = ConfigDict(frozen=True, strict=True)

    rank: int
    host: str
    pid: Annotated[int, Field(gt=0, le=2**22)]  # Linux's PID_MAX_LIMIT; it is sent signals
    process_started_unix: float  # identifies the process together with the pid, which may have been reused
    step: int  # completed optimizer steps
    micro_steps: int  # batches started since the process started
    phase: str
    progress_unix: float  # when step, batch or phase last changed
    written_unix: float
    peak_host_bytes: int | None = None  # peak resident memory of the process so far
    attempt_id: str | None = None  # what the ranks of this attempt call it
    ended: bool = False  # True once the process ends by itself

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.micro_steps

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
        """True if the process ran on this node, and was ended from outside."""
        return not self.ended and self.host == os.uname().nodename and self.process is None


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def stacks_path(ranks: Path, rank: int) -> Path:
    """Return the path to which a rank writes its stacks on `STACKS_SIGNAL`; `ranks` is the folder of their files."""
    return ranks / f"rank{rank}.stacks"


def write_attempt_id(ranks: Path, attempt_id: str) -> None:
    """Make an attempt the one whose ranks write into this folder."""
    write_text(ranks / ATTEMPT_ID, attempt_id)


def read_attempt_id(ranks: Path) -> str | None:
    """Return the attempt that writes here, or None; listing the folder first keeps NFS from a cached answer."""
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
    path = ranks / f"rank{heartbeat.rank}.heartbeat"
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(heartbeat.model_dump_json())
    temporary.replace(path)


def read_heartbeats(ranks: Path) -> list[Heartbeat]:
    """Return the last heartbeat of every rank of this attempt that has written one, in rank order."""
    found, current = [], read_attempt_id(ranks)
    for path in ranks.glob("rank*.heartbeat"):
        with contextlib.suppress(ToolkitError, ValidationError):
            found.append(Heartbeat.model_validate_json(read_bytes(path)))
    of_attempt = [each for each in found if current is None or each.attempt_id in (None, current)]
    return sorted(of_attempt, key=lambda heartbeat: heartbeat.rank)


# -- stacks


def collect_stacks(ranks: Path, heartbeats: Sequence[Heartbeat], *, seconds: float = 3.0) -> dict[str, str]:
    """Signal every rank on this node to write the stacks of its threads, and return those written within `seconds`.

    A stopped process (SIGSTOP) cannot answer. This process holds the GIL meanwhile, and other ranks wait.
    """
    for heartbeat in heartbeats:
        if heartbeat.pid == os.getpid() and heartbeat.process is not None:
            with stacks_path(ranks, heartbeat.rank).open("a") as file:
                faulthandler.dump_traceback(file)
        elif heartbeat.process is not None:
            with contextlib.suppress(OSError):
                os.kill(heartbeat.pid, STACKS_SIGNAL)
    deadline, answers = time.monotonic() + seconds, {rank.rank: "" for rank in heartbeats}
    while time.monotonic() < deadline and not all(map(_LAST_LINE.search, answers.values())):
        time.sleep(0.01)
        for rank in answers:
            with contextlib.suppress(OSError):
                answers[rank] = stacks_path(ranks, rank).read_text(errors="replace")[-STACKS_CHARACTERS:]
    return {str(rank): stacks or "no answer" for rank, stacks in answers.items()}


def main_thread(stacks: str) -> list[str]:
    """Return the main thread's frames (the last that faulthandler writes): `backward (autograd/graph.py, line 7)`."""
    last = re.split(r"(?:Current thread|Thread) 0x", stacks)[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, flags=re.MULTILINE)
    return [f"{function} ({'/'.join(Path(file).parts[-2:])}, line {line})" for file, line, function in found]


# -- diagnosis of a hung run. Ranks wait for each other in collectives, so the cause is the rank that does not.


def stalled_seconds(heartbeats: Sequence[Heartbeat], *, now: float) -> float:
    """Return how long no rank has made progress; a run in which one rank does is not hung."""
    return now - max(heartbeat.progress_unix for heartbeat in heartbeats) if heartbeats else 0.0


def unresponsive_reason(heartbeat: Heartbeat, *, now: float) -> str | None:
    """Return why a rank does not respond (gone, stopped, blocked), or None for one that still writes."""
    if heartbeat.ended:
        return f"its process {heartbeat.pid} has ended by itself"
    process, late = heartbeat.process, now - heartbeat.written_unix > UNRESPONSIVE_SECONDS
    if heartbeat.is_gone:
        return f"its process {heartbeat.pid} is gone"
    with contextlib.suppress(psutil.Error):
        state = None if process is None else process.status()
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return f"its process {heartbeat.pid} is stopped"
        if state == psutil.STATUS_DISK_SLEEP and late:
            return f"its process {heartbeat.pid} waits for a disk or a device"
    return f"its process {heartbeat.pid} does not respond" if late else None


def hang_failure(ranks: Path, *, limit_seconds: float) -> dict[str, Any]:
    """Return the failure.json of a hung run. This takes a few seconds."""
    heartbeats, now = read_heartbeats(ranks), time.time()
    unresponsive = {heartbeat.rank: why for heartbeat in heartbeats if (why := unresponsive_reason(heartbeat, now=now))}
    stacks = collect_stacks(ranks, heartbeats)
    blocking = suspects(heartbeats, unresponsive=unresponsive, stacks=stacks)
    first = next((heartbeat for heartbeat in heartbeats if heartbeat.rank in blocking), None)

    def describe(heartbeat: Heartbeat) -> str:
        frames, why = main_thread(stacks[str(heartbeat.rank)]), unresponsive.get(heartbeat.rank)
        state = f" does not respond ({why})" if why and heartbeat.rank in blocking else ""
        where = f", in {frames[0]}" if frames else ""
        return f"rank {heartbeat.rank}{state} in step {heartbeat.step + 1}, phase {heartbeat.phase}{where}"

    named = [heartbeat for heartbeat in heartbeats if heartbeat.rank in blocking] or heartbeats
    cause = "; ".join(map(describe, named)) or "no rank has written a heartbeat"
    cause = cause if blocking else f"the cause is unknown: {cause}"
    return {
        "kind": status.TIMED_OUT,
        "phase": first and first.phase,
        "step": first.step if first else max((heartbeat.step for heartbeat in heartbeats), default=0),
        "rank": first and first.rank,
        "message": f"no rank made progress for {limit_seconds / 60:.3g} minutes; {cause}",
        "hint": HINT,
        "invalid_input": False,
        "peak_bytes": None,
        "stacks": stacks,
    }


def suspects(
    heartbeats: Sequence[Heartbeat], *, unresponsive: Mapping[int, str], stacks: Mapping[str, str]
) -> list[int]:
    """Return ranks that block the others: unresponsive, behind, or outside a collective; empty if unknown."""

    def waits(heartbeat: Heartbeat) -> bool:
        return any(_COLLECTIVE.search(frame) for frame in main_thread(stacks.get(str(heartbeat.rank), ""))[:12])

    behind = min((heartbeat.position for heartbeat in heartbeats), default=None)
    for found in (
        list(unresponsive),
        [heartbeat.rank for heartbeat in heartbeats if heartbeat.position == behind],
        [heartbeat.rank for heartbeat in heartbeats if not waits(heartbeat)],
    ):
        if 0 < len(found) < max(2, len(heartbeats)):
            return found
    return []
