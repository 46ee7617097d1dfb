"""A thread of each rank that writes its pulse every second, and ends a run in which no rank gets on.

    Watchdog(progress, ranks=Path("out/ranks"), rank=0).start()

It adds no collective. Outside the steps (data, loading, saving) processor time counts as getting on: tokenising
a large file or compiling may take long, and is no hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from toolkit.errors import EXIT_RUN_FAILED, ToolkitError
from toolkit.runs.hangs import hang_failure, stalled_seconds
from toolkit.runs.pulses import (
    DEFAULT_HANG_TIMEOUT_MINUTES,
    HANG_CLAIM,
    HANG_TIMEOUT_VARIABLE,
    STACKS_SIGNAL,
    Pulse,
    peak_resident_bytes,
    read_pulses,
    stacks_path,
    write_pulse,
)
from toolkit.train.failure import Progress

TICK_SECONDS = 1.0
STEP_PHASES = ("train", "forward", "backward", "step")
WORKING_CPU_SECONDS = 1.0
CLAIM_SECONDS = 30.0


def hang_timeout_seconds() -> float:
    """From the environment, or the default; 0 is off. Raises ToolkitError for what is no such number."""
    given = os.environ.get(HANG_TIMEOUT_VARIABLE)
    try:
        minutes = DEFAULT_HANG_TIMEOUT_MINUTES if given is None else float(given)
    except ValueError:
        minutes = -1.0
    if not minutes >= 0:
        raise ToolkitError(f"{HANG_TIMEOUT_VARIABLE} is {given!r}, expected minutes, or 0 for no limit")
    return minutes * 60


class Watchdog:
    """Pulse and watch of one rank; a daemon thread, gone with its process."""

    def __init__(
        self, progress: Progress, *, ranks: Path, rank: int, on_hang: Callable[[dict[str, Any]], None]
    ) -> None:
        self.progress, self.ranks, self.rank, self.on_hang = progress, ranks, rank, on_hang
        self.limit_seconds = hang_timeout_seconds()
        self.process = psutil.Process()
        self.started_unix = self.process.create_time()
        self.seen: tuple[Any, ...] = ()
        self.cpu_seconds = 0.0
        self.progress_unix = time.time()

    def start(self) -> None:
        """Open the file for stacks, listen for the signal that asks for them, and begin to watch."""
        ranks = self.ranks
        ranks.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks_path(ranks, self.rank).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        self.beat()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with contextlib.suppress(OSError):  # a full disk is for the main thread to tell
                self.beat()
            if self.limit_seconds and time.time() - self.progress_unix > self.limit_seconds:
                self._judge()

    def beat(self) -> None:
        """Note whether the rank has got on, and write its pulse."""
        now = time.time()
        if self._got_on():
            self.progress_unix = now
        write_pulse(self.ranks, self.pulse(now))

    def _got_on(self) -> bool:
        where = (self.progress.step, self.progress.micro_steps, self.progress.phase)
        moved, self.seen = where != self.seen, where
        if moved or self.progress.phase in STEP_PHASES:
            return moved
        times = self.process.cpu_times()
        used = times.user + times.system + times.children_user + times.children_system
        if used - self.cpu_seconds < WORKING_CPU_SECONDS:
            return False
        self.cpu_seconds = used
        return True

    def pulse(self, now: float) -> Pulse:
        return Pulse(
            rank=self.rank,
            host=os.uname().nodename,
            pid=os.getpid(),
            process_started_unix=self.started_unix,
            step=self.progress.step,
            micro_steps=self.progress.micro_steps,
            phase=self.progress.phase,
            progress_unix=self.progress_unix,
            written_unix=now,
            peak_host_bytes=peak_resident_bytes(),
        )

    def _judge(self) -> None:
        """This rank has not got on for the limit; if no other has either, the run hangs. One rank tells."""
        if stalled_seconds(read_pulses(self.ranks), now=time.time()) <= self.limit_seconds or not self._claim():
            return
        self.on_hang(hang_failure(self.ranks, limit_seconds=self.limit_seconds))
        for pulse in read_pulses(self.ranks):
            if pulse.rank != self.rank and pulse.process is not None:
                with contextlib.suppress(OSError):
                    os.kill(pulse.pid, signal.SIGKILL)  # it may not be able to end by itself
        sys.stderr.flush()
        os._exit(EXIT_RUN_FAILED)

    def _claim(self) -> bool:
        """Whether this rank is to tell: the first that asks, or any later one where the first has not ended the run."""
        claim = self.ranks / HANG_CLAIM
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return time.time() - claim.stat().st_mtime > CLAIM_SECONDS
        return True
