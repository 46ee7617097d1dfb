"""Stop all ranks after the same step, with a checkpoint, on SIGTERM or Ctrl-C.

No step has a collective for it. A signal wakes a thread of the rank (the main thread may be waiting in a collective,
where no Python handler runs), which publishes the step in progress in the process group's store. At its next step end
the main thread waits for what all ranks have published: they stop after the highest of those steps. No rank goes past
it, because no rank passes a step end without having read all of them.

One signalled rank is enough, such as one on the node that a cloud takes back: it requests the stop in the store, where
a thread of every other rank waits for that, and acts as if it had been signalled too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.errors import EXIT_RUN_FAILED
from toolkit.observe.failure_report import Interrupted, report_failure
from toolkit.observe.progress import Progress
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.timeline import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# All ranks answer from a thread that nothing blocks.
ANSWER_SECONDS = 10.0
BEFORE_TRAINING = -1
REQUESTED = "stop/requested"
LONGER_THAN_ANY_RUN = timedelta(days=3650)


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Stops this rank after a step that all ranks agree on. `world_size` counts the processes that answer."""

    def __init__(self, progress: Progress, *, rank: int, world_size: int) -> None:
        self.progress, self.rank, self.world_size = progress, rank, world_size
        self.lock, self.agreed = threading.Lock(), threading.Event()
        self.signal: signal.Signals | None = None
        self.finished_step, self.max_steps = BEFORE_TRAINING, 0
        self.stop_step: int | None = None
        self.saves, self.stopped = True, False
        self.store: Any = None

    def listen(self) -> None:
        """Handle the signals from now on; only the main thread may call it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte in the pipe matters
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._wait, args=(reader,), name="stop-on-signal", daemon=True).start()
        if self.world_size > 1:
            threading.Thread(target=self._follow, args=(writer,), name="stop-with-others", daemon=True).start()

    def _follow(self, writer: int) -> None:
        """Take the signal of another rank as this rank's own."""
        with contextlib.suppress(Exception):  # the store is gone, and with it the run
            store = join_store(LONGER_THAN_ANY_RUN, self.progress)
            os.write(writer, bytes([int(store.get(REQUESTED))]))

    def _wait(self, reader: int) -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass
        with self.lock:
            self.signal, step = signal.Signals(number), self.finished_step
        try:
            self.stop_step = max(self._steps_of_all(step)) + 1
        except Exception:  # another rank or the store is gone
            self._exit(f"no checkpoint was saved: {self._silent_ranks()} did not answer within {ANSWER_SECONDS:.0f} s")
        if step == BEFORE_TRAINING:
            self._exit("no step was begun, so there is nothing to save")
        self.agreed.set()

    def _steps_of_all(self, step: int) -> list[int]:
        """Publish this rank's step and return all ranks' steps. Before the first step nobody is waited for."""
        if self.world_size == 1:
            return [step]
        assert self.signal is not None
        self.store = join_store(timedelta(seconds=ANSWER_SECONDS), self.progress)
        self.store.set(REQUESTED, str(int(self.signal)))
        self.store.set(f"stop/{self.rank}", str(step))
        ranks = [self.rank] if step == BEFORE_TRAINING else range(self.world_size)
        return [int(self.store.get(f"stop/{rank}")) for rank in ranks]

    def _silent_ranks(self) -> str:
        """Name the ranks that have published no step, with their nodes where they have written a heartbeat."""
        try:
            silent = [rank for rank in range(self.world_size) if not self.store.check([f"stop/{rank}"])]
        except Exception:  # nobody can be asked: the node that holds the store is gone
            return "the node of rank 0"
        folder = self.progress.output_dir
        nodes = {} if folder is None else {beat.rank: beat.host for beat in read_heartbeats(folder / "ranks")}
        return ", ".join(f"rank {rank} on {nodes.get(rank, 'an unknown node')}" for rank in silent) or "a rank"

    def _exit(self, why: str) -> None:
        """End this process without the main thread, which may be waiting for a rank that never comes."""
        assert self.signal is not None
        error = Interrupted(f"{self.signal.name} ended the run in step {self.progress.step + 1}; {why}")
        report_failure(error, self.progress)
        sys.stdout.flush()
        os._exit(EXIT_RUN_FAILED)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del control
        self.max_steps, self.saves = state.max_steps, str(args.save_strategy) != "SaveStrategy.NO"
        with self.lock:
            self.finished_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        with self.lock:
            self.finished_step = state.global_step
            if self.signal is None:
                return
        if not self.agreed.wait(2 * ANSWER_SECONDS):
            self._exit("no checkpoint was saved: the ranks did not agree on a step")
        if self.stop_step == state.global_step < self.max_steps:
            self.stopped = control.should_training_stop = True
            control.should_save = self.saves

    def raise_if_stopped(self) -> None:
        """Raise Interrupted where a signal ended training, once every rank has finished its save. Collective."""
        if not self.stopped:
            return
        if dist.is_initialized():
            dist.barrier()
        assert self.signal is not None
        self.progress.note(STOPPED)
        step = self.progress.step
        saved = f"checkpoint-{step} was saved" if self.saves else "no checkpoint was saved (`--save_strategy no`)"
        hint = "the same command with `--resume_from_checkpoint latest` resumes" if self.saves else None
        raise Interrupted(f"{self.signal.name} ended the run after step {step}; {saved}", hint=hint)


def join_store(wait: timedelta, progress: Progress) -> Any:
    """Open a connection of this rank's own to the process group's store, which all ranks can read and write.

    Its keys are this attempt's own: a store may outlive a restart, and torchrun on each node counts restarts itself.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
    return dist.PrefixStore(f"toolkit/{progress.attempt_id}", store)


def _forget_signals() -> None:
    """Restore the default handlers in a forked child (data loading, tokenising): its signals are not the rank's."""
    with contextlib.suppress(ValueError):  # forked from another thread than the main one
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
