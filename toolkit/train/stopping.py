"""SIGTERM or Ctrl-C on the ranks: all of them end after the same step, with a checkpoint.

    stopping = Stopping(progress, rank=0, world_size=2)
    stopping.listen()                       # early, in the main thread
    trainer.add_callback(stopping)
    trainer.train()
    stopping.raise_if_stopped()             # Interrupted

No step has a collective for it. A signal wakes a thread of the rank (the main thread may be waiting in a collective,
where no Python handler runs), which publishes the step under way in the process group's store. At its next step end
the main thread waits for what all ranks have published: they stop after the highest of those steps. Nobody passes
it, because nobody passes a step end without having read all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.errors import EXIT_RUN_FAILED
from toolkit.train.failure import Interrupted, Progress

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# All ranks get the signal together, and answer from a thread that nothing blocks.
ANSWER_SECONDS = 10.0
BEFORE_TRAINING = -1


class Stopping(TrainerCallback):  # type: ignore[misc]
    """One rank's answer to a signal that asks it to end."""

    def __init__(
        self, progress: Progress, *, rank: int, world_size: int, report: Callable[[BaseException], int]
    ) -> None:
        self.progress, self.rank, self.world_size, self.report = progress, rank, world_size, report
        self.lock = threading.Lock()
        self.agreed = threading.Event()
        self.signal: signal.Signals | None = None
        self.finished_step = BEFORE_TRAINING
        self.stop_step: int | None = None
        self.max_steps = 0
        self.saves = True
        self.stopped = False

    def listen(self) -> None:
        """Take the signals from now on; only the main thread may call it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte in the pipe matters
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._wait, args=(reader,), name="stopping", daemon=True).start()

    def _wait(self, reader: int) -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass
        with self.lock:
            self.signal, step = signal.Signals(number), self.finished_step
        if step == BEFORE_TRAINING:
            self._end("no step was begun, so there is nothing to save")
        try:
            self.stop_step = max(self._steps_of_all(step)) + 1
        except Exception:  # a rank that is gone, or a store that is
            self._end(f"no checkpoint was saved: not every rank answered within {ANSWER_SECONDS:.0f} s")
        self.agreed.set()

    def _steps_of_all(self, step: int) -> list[int]:
        """Publish this rank's step and read the others'."""
        if self.world_size == 1:
            return [step]
        store = join_store(timedelta(seconds=ANSWER_SECONDS))
        store.set(f"stop/{self.rank}", str(step))
        return [int(store.get(f"stop/{rank}")) for rank in range(self.world_size)]

    def _end(self, why: str) -> None:
        """Without the main thread, which may be waiting for a rank that never comes."""
        assert self.signal is not None
        self.report(Interrupted(f"{self.signal.name} ended the run in step {self.progress.step + 1}; {why}"))
        sys.stdout.flush()
        sys.stderr.flush()
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
            asked = self.signal is not None
        if not asked:
            return
        if not self.agreed.wait(2 * ANSWER_SECONDS):
            self._end("no checkpoint was saved: the ranks did not agree on a step")
        if self.stop_step == state.global_step < self.max_steps:
            self.stopped = control.should_training_stop = True
            control.should_save = self.saves

    def raise_if_stopped(self) -> None:
        """After training: say that a signal ended it, once every rank has left its save."""
        if not self.stopped:
            return
        if dist.is_initialized():
            dist.barrier()
        assert self.signal is not None
        step = self.progress.step
        saved = f"checkpoint-{step} was saved" if self.saves else "no checkpoint was saved (`--save_strategy no`)"
        hint = "the same command with `--resume_from_checkpoint latest` goes on" if self.saves else None
        raise Interrupted(f"{self.signal.name} ended the run after step {step}; {saved}", hint=hint)


def join_store(wait: timedelta) -> Any:
    """A connection of this rank's own to the process group's store: what all ranks can write and read."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
    return dist.PrefixStore(f"toolkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _forget_signals() -> None:
    """In a forked child (data loading, tokenising): a signal to it is not one to the rank."""
    with contextlib.suppress(ValueError):  # forked from another thread than the main one
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
