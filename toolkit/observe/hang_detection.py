"""A thread of each rank that writes its heartbeat every second, and ends a run in which no rank makes progress.

It adds no collective. Outside the steps (data, loading, saving) processor time counts as progress: tokenising a large
file may take long, and is no hang. Between them a rank that computes makes progress, such as a callback's benchmark: it
takes processor time outside of collectives. So does one in a compiler, which is named.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit.engines.zero import COLLECTIVES_FOLDER
from toolkit.errors import EXIT_RUN_FAILED, ToolkitError
from toolkit.observe.failure_report import report_hang
from toolkit.observe.progress import STEP_PHASES, Progress
from toolkit.record import heartbeat

HEARTBEAT_SECONDS = 1.0
# Processor time that counts as progress: of the process outside the steps, of its main thread between them.
PROGRESS_CPU_SECONDS = 1.0
# Where a compiler or an autotuner is on the stack.
COMPILERS = ("torch/_inductor", "torch/_dynamo", "torch/_functorch", "triton", "torch/utils/cpp_extension.py")
# Where a rank waits for others: in a collective, in a backward that reduces gradients, for another process's build.
WAITS = ("torch/distributed", COLLECTIVES_FOLDER, "torch/autograd/graph.py", "torch/utils/file_baton.py")
# A compiler that has run for so long is named.
NAMED_AFTER_SECONDS = 60.0
# After this long a rank that claimed to report a hang, and did not end the run, is overruled.
CLAIM_SECONDS = 30.0


def hang_timeout_seconds() -> float:
    """Return the limit from the environment, or the default; 0 is no limit. Raises ToolkitError for anything else."""
    given = os.environ.get(heartbeat.HANG_TIMEOUT_VARIABLE)
    minutes = -1.0
    with contextlib.suppress(ValueError):
        minutes = heartbeat.DEFAULT_HANG_TIMEOUT_MINUTES if given is None else float(given)
    if not minutes >= 0:
        raise ToolkitError(f"{heartbeat.HANG_TIMEOUT_VARIABLE} is {given!r}, expected minutes, or 0 for no limit")
    return minutes * 60


class Watchdog:
    """Heartbeat and hang detection of one rank; a daemon thread, gone with its process."""

    def __init__(self, progress: Progress, *, ranks: Path, rank: int) -> None:
        self.progress, self.ranks, self.rank = progress, ranks, rank
        self.limit_seconds, self.process, self.writing = hang_timeout_seconds(), psutil.Process(), threading.Lock()
        self.last_position: tuple[Any, ...] = ()
        self.moved_unix = time.time()
        """When the step, the batch or the phase last changed."""
        self.last_stack: list[tuple[str, str, int]] = []
        self.named: tuple[Any, ...] | None = None
        """The position at which a compiler was named."""
        self.cpu_seconds = self.main_cpu_seconds = 0.0
        self.progress_unix = time.time()

    def start(self) -> None:
        """Open the file for stack traces, handle the signal that requests them, and start watching."""
        self.ranks.mkdir(parents=True, exist_ok=True)
        self.stacks = heartbeat.stacks_path(self.ranks, self.rank).open("w", encoding="utf-8")
        faulthandler.register(heartbeat.STACKS_SIGNAL, file=self.stacks, all_threads=True)
        self.beat()
        # The process must not exit while a heartbeat is half written: its temporary file would stay in the run folder.
        atexit.register(self._end)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _end(self) -> None:
        self.writing.acquire(timeout=HEARTBEAT_SECONDS)
        with contextlib.suppress(OSError):
            if not heartbeat.is_superseded(self.ranks, self.progress.attempt_id):
                self.beat(ended=True)

    def _watch(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            if heartbeat.is_superseded(self.ranks, self.progress.attempt_id):  # the run folder is its successor's
                node, pid, why = os.uname().nodename, os.getpid(), "the run was restarted without it"
                print(f"rank {self.rank} on {node} (process {pid}) ends: {why}", file=sys.stderr, flush=True)
                os._exit(EXIT_RUN_FAILED)
            with contextlib.suppress(OSError), self.writing:  # a full disk is reported by the main thread
                self.beat()
            if self.limit_seconds and time.time() - self.progress_unix > self.limit_seconds:
                self._end_if_all_ranks_hang()

    def beat(self, *, ended: bool = False) -> None:
        """Note whether the rank has made progress, and write its heartbeat."""
        now = time.time()
        if self._made_progress():
            self.progress_unix = now
        beat = heartbeat.Heartbeat(
            rank=self.rank,
            host=os.uname().nodename,
            pid=self.process.pid,
            process_started_unix=self.process.create_time(),
            **{name: getattr(self.progress, name) for name in ("step", "micro_steps", "phase", "attempt_id")},
            progress_unix=self.progress_unix,
            written_unix=now,
            peak_host_bytes=heartbeat.peak_resident_bytes(),
            ended=ended,
        )
        heartbeat.write_heartbeat(self.ranks, beat)

    def _made_progress(self) -> bool:
        position = (self.progress.step, self.progress.micro_steps, self.progress.phase)
        moved, self.last_position = position != self.last_position, position
        if moved:
            self.moved_unix = time.time()
        if moved or self.progress.phase in STEP_PHASES:
            return moved or self._computes()
        times = self.process.cpu_times()
        cpu_seconds = times.user + times.system + times.children_user + times.children_system
        if cpu_seconds - self.cpu_seconds < PROGRESS_CPU_SECONDS:
            return False
        self.cpu_seconds = cpu_seconds
        return True

    def _computes(self) -> bool:
        """Return True where the main thread works outside of what waits for other ranks, or is in a compiler.

        Waiting for a GPU takes processor time too, at one place: there its stack must change.
        """
        main = threading.main_thread().ident or 0
        frame, stack = sys._current_frames().get(main), []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti))
            frame = frame.f_back
        changed, self.last_stack = stack != self.last_stack, stack
        if any(place in file for file, _, _ in stack[:3] for place in WAITS):
            return False
        compiler = next((part for file, _, _ in stack for part in COMPILERS if f"/{part}" in file), None)
        if compiler is None:
            used = time.clock_gettime(time.pthread_getcpuclockid(main)) - self.main_cpu_seconds
            if used < PROGRESS_CPU_SECONDS:
                return False
            self.main_cpu_seconds += used
            return changed or not torch.cuda.is_available()
        if self.named != self.last_position and time.time() - self.moved_unix > NAMED_AFTER_SECONDS:
            self.named = self.last_position
            print(f"rank {self.rank} compiles in step {self.progress.step + 1} ({compiler})", flush=True)
        return True

    def _end_if_all_ranks_hang(self) -> None:
        """End the run if no other rank has made progress within the limit either.

        The first rank that claims it reports; a later one does if the first has not ended the run.
        """
        if heartbeat.stalled_seconds(heartbeat.read_heartbeats(self.ranks), now=time.time()) <= self.limit_seconds:
            return
        claim = self.ranks / heartbeat.HANG_CLAIM
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            if time.time() - claim.stat().st_mtime <= CLAIM_SECONDS:
                return
        report_hang(heartbeat.hang_failure(self.ranks, limit_seconds=self.limit_seconds), self.progress)
        for beat in heartbeat.read_heartbeats(self.ranks):
            if beat.rank != self.rank and beat.process is not None:
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)  # it may not be able to end by itself
        sys.stderr.flush()
        os._exit(EXIT_RUN_FAILED)
