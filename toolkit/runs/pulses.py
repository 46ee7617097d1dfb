"""Signs of life of a run's ranks: what each is doing, when it last got on, and how to make it say where it stands.

    >>> read_pulses(Path("out/ranks"))
    [Pulse(rank=0, host='node1', pid=7, step=3, micro_steps=4, phase='backward', progress_unix=..., written_unix=...)]

A rank writes `ranks/rankR.pulse` from a thread of its own. Whoever stands outside (a peer, the launcher) reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from toolkit.runs.folder import read_json

HANG_TIMEOUT_VARIABLE = "TOOLKIT_HANG_TIMEOUT_MINUTES"
# Shorter than transformers' `ddp_timeout` of 30 minutes, after which a collective fails without saying where.
DEFAULT_HANG_TIMEOUT_MINUTES = 20.0
# Made by the rank that tells of a hang, so that one tells.
HANG_CLAIM = "hang.claim"
# Makes a rank write the stacks of all its threads (faulthandler): from C, so a held interpreter lock is no obstacle.
STACKS_SIGNAL = signal.SIGUSR2
STACKS_CHARACTERS = 8000
# A thread that writes every second and has not for so long does not run.
SILENT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What one rank last said of itself."""

    rank: int
    host: str
    pid: int
    process_started_unix: float
    """With the pid, names the process: a pid alone may be another's by now."""
    step: int
    """Optimizer steps finished."""
    micro_steps: int
    """Batches begun since the process started."""
    phase: str
    progress_unix: float
    """When step, batch or phase last changed."""
    written_unix: float
    peak_host_bytes: int | None = None
    """Highest resident memory of the process so far: of one that is killed, the last that is known."""

    @property
    def process(self) -> psutil.Process | None:
        """The process on this machine, or None where it is gone or on another."""
        if self.host != os.uname().nodename:
            return None
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.process_started_unix) < 1 and found.status() != psutil.STATUS_ZOMBIE:
                return found
        return None

    @property
    def is_gone(self) -> bool:
        """Whether the process was on this machine and is there no more."""
        return self.host == os.uname().nodename and self.process is None


def peak_resident_bytes() -> int:
    """Highest resident memory of this process since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def pulse_path(ranks: Path, rank: int) -> Path:
    """Where a rank's pulse lies; `ranks` is the folder of the ranks' files."""
    return ranks / f"rank{rank}.pulse"


def stacks_path(ranks: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it is asked for them."""
    return ranks / f"rank{rank}.stacks"


def write_pulse(ranks: Path, pulse: Pulse) -> None:
    """Replace the rank's pulse; a reader sees the old or the new one."""
    path = pulse_path(ranks, pulse.rank)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(asdict(pulse)))
    temporary.replace(path)


def read_pulses(ranks: Path) -> list[Pulse]:
    """The last pulse of every rank that has written one, in rank order."""
    found = [read_json(path) for path in ranks.glob("rank*.pulse")]
    with contextlib.suppress(TypeError):
        return sorted((Pulse(**values) for values in found if values), key=lambda pulse: pulse.rank)
    return []


def collect_stacks(ranks: Path, pulses: Sequence[Pulse], *, seconds: float = 3.0) -> dict[str, str]:
    """Ask every rank on this machine for the stacks of all its threads, and give what was written in `seconds`.

    One that was stopped (SIGSTOP) answers only when it goes on, so it is let go on until it has answered.
    """
    waiting = {pulse.rank: pulse for pulse in pulses if pulse.process is not None}
    stopped = {rank for rank, pulse in waiting.items() if _is_stopped(pulse)}
    for pulse in waiting.values():
        _signal(pulse, STACKS_SIGNAL)
        _signal(pulse, signal.SIGCONT)
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in [rank for rank in waiting if "File " in _stacks(ranks, rank)]:
            pulse = waiting.pop(rank)
            if rank in stopped:
                _signal(pulse, signal.SIGSTOP)
    time.sleep(0.1)  # the last lines
    return {str(pulse.rank): _stacks(ranks, pulse.rank) or "no answer" for pulse in pulses}


def _is_stopped(pulse: Pulse) -> bool:
    with contextlib.suppress(psutil.Error):
        process = pulse.process
        return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _signal(pulse: Pulse, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pulse.pid, number)


def _stacks(ranks: Path, rank: int) -> str:
    try:
        return stacks_path(ranks, rank).read_text(errors="replace")[:STACKS_CHARACTERS]
    except OSError:
        return ""


def main_thread(stacks: str) -> list[str]:
    """Frames of the main thread, innermost first: `backward (autograd/graph.py, line 7)`. It is written last."""
    last = re.split(r"(?:Current thread|Thread) 0x", stacks)[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, flags=re.MULTILINE)
    return [f"{function} ({'/'.join(Path(file).parts[-2:])}, line {line})" for file, line, function in found]


def why_silent(pulse: Pulse, *, now: float) -> str | None:
    """Why a rank cannot speak for itself: gone, stopped, or not running; None for one that still writes."""
    process = pulse.process
    if pulse.is_gone:
        return f"its process {pulse.pid} is gone"
    with contextlib.suppress(psutil.Error):
        if _is_stopped(pulse):
            return f"its process {pulse.pid} is stopped"
        if (
            process is not None
            and process.status() == psutil.STATUS_DISK_SLEEP
            and now - pulse.written_unix > SILENT_SECONDS
        ):
            return f"its process {pulse.pid} waits for a disk or a device"
    return f"its process {pulse.pid} does not answer" if now - pulse.written_unix > SILENT_SECONDS else None
