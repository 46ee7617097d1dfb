"""Stop all ranks at the same place, with a checkpoint, on SIGTERM or Ctrl-C.

No step has a collective for it. A signal wakes a thread of the rank (the main thread may be waiting in a collective,
where no Python handler runs), which publishes in the process group's store where the rank is. The ranks stop at the
first place after those of all ranks: the end of a step, of a batch of an evaluation, or of a save. No rank goes past
it, because all come to the same places in the same order, and none passes one without having read what all published.

Until a step is finished there is nothing to save: the thread ends the process, and names the newest checkpoint.

One signalled rank is enough, such as one on the node that a cloud takes back: it requests the stop in the store, where
a thread of every other rank waits for that, and acts as if it had been signalled too.
"""

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
from toolkit.observe.failure_report import Interrupted, report_failure
from toolkit.observe.progress import Progress
from toolkit.record.checkpoints import describe_latest_checkpoint, resume_hint, resume_words
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.timeline import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# All ranks answer from a thread that nothing blocks.
ANSWER_SECONDS = 10.0
REQUESTED = "stop/requested"
LONGER_THAN_ANY_RUN = timedelta(days=3650)

Place = tuple[int, int]  # completed optimizer steps, and evaluation batches and saves since
BEFORE_TRAINING: Place = (-1, 0)
AFTER_TRAINING: Place = (2**62, 0)


class EvaluationStopped(Exception):
    """Ends an evaluation between two of its batches."""


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Stops this rank at a place that all ranks agree on. `world_size` counts the processes that answer."""

    def __init__(self, progress: Progress, folder: RunFolder, *, rank: int, world_size: int) -> None:
        self.progress, self.folder, self.rank, self.world_size = progress, folder, rank, world_size
        self.lock, self.agreed = threading.Lock(), threading.Event()
        self.signal: signal.Signals | None = None
        self.place = self.last_place = BEFORE_TRAINING
        """Where this rank is, and, once all ranks have answered a signal, where the furthest of them was."""
        self.first_step = 0
        self.saves, self.stopped, self.may_stop_evaluation = True, False, False
        self.writer = -1
        self.store: Any = None

    def listen(self) -> None:
        """Handle the signals from now on; only the main thread may call it."""
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte in the pipe matters
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._wait, args=(reader,), name="stop-on-signal", daemon=True).start()

    def follow(self, progress: Progress) -> None:
        """Take the signals of the other ranks as this rank's own, once the attempt has its id."""
        self.progress = progress
        if self.world_size > 1:
            threading.Thread(target=self._follow, name="stop-with-others", daemon=True).start()

    def _follow(self) -> None:
        try:
            store = join_store(timedelta(seconds=ANSWER_SECONDS), self.progress)
            store.set_timeout(LONGER_THAN_ANY_RUN)
            number = int(store.get(REQUESTED))
        except Exception as error:
            if self.place != AFTER_TRAINING:  # the store goes with the run
                unheard = f"rank {self.rank} does not hear of a stop that another rank is told of ({str(error)[:160]})"
                print(f"warning: {unheard}: signal every rank, or no checkpoint is saved", file=sys.stderr, flush=True)
        else:
            os.write(self.writer, bytes([number]))

    def _wait(self, reader: int) -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass
        with self.lock:
            self.signal, place = signal.Signals(number), self.place
        try:
            places = self._places_of_all(place)
        except Exception:  # another rank or the store is gone
            self._exit(f"no checkpoint was saved: {self._silent_ranks()} did not answer within {ANSWER_SECONDS:.0f} s")
        self.last_place = max(places)
        if min(places) == BEFORE_TRAINING or self.last_place[0] == self.first_step:
            self._exit("no step was finished, so there is nothing to save")
        if self.rank == 0:
            self._announce(place)
        self.agreed.set()

    def _places_of_all(self, place: Place) -> list[Place]:
        """Publish this rank's place and return those of all ranks. Before training nobody is waited for."""
        if self.world_size == 1 or self.progress.attempt_id is None:
            return [place]
        assert self.signal is not None
        try:
            self.store = join_store(timedelta(seconds=ANSWER_SECONDS), self.progress)
            self.store.set(REQUESTED, str(int(self.signal)))
            self.store.set(f"stop/{self.rank}", "{} {}".format(*place))
        except Exception:
            if place != BEFORE_TRAINING:
                raise
        if place == BEFORE_TRAINING:
            return [place]
        answers = [self.store.get(f"stop/{rank}").split() for rank in range(self.world_size)]
        return [(int(step), int(since)) for step, since in answers]

    def _silent_ranks(self) -> str:
        """Name the ranks that have published no place, with their nodes where they have written a heartbeat."""
        try:
            silent = [rank for rank in range(self.world_size) if not self.store.check([f"stop/{rank}"])]
        except Exception:  # nobody can be asked: the node that holds the store is gone
            return "the node of rank 0"
        folder = self.progress.output_dir
        nodes = {} if folder is None else {beat.rank: beat.host for beat in read_heartbeats(folder / "ranks")}
        return ", ".join(f"rank {rank} on {nodes.get(rank, 'an unknown node')}" for rank in silent) or "a rank"

    def _announce(self, place: Place) -> None:
        """Say at once what follows: the step, evaluation or save in progress may outlast the notice."""
        assert self.signal is not None
        step, phase = self.last_place[0], self.progress.phase
        if place == AFTER_TRAINING:
            follows = "training is done, and the run completes"
        elif not self.saves:
            follows = f"all ranks end after step {step + 1}, and nothing is saved (`--save_strategy no`)"
        elif phase == "save":
            follows = f"checkpoint-{step} is completed, and the run ends"
        elif phase == "evaluate":
            follows = f"the evaluation ends early, and checkpoint-{step} is saved"
        else:
            follows = f"all ranks end after step {step + 1}, and save it"
        newest = describe_latest_checkpoint(self.folder.checkpoints)
        print(f"{self.signal.name}: {follows}; until then {newest}", flush=True)

    def _exit(self, why: str) -> None:
        """End this process without the main thread, which may be waiting for a rank that never comes."""
        assert self.signal is not None
        step = self.progress.step
        where = f"before the first step (phase {self.progress.phase})"
        if self.place != BEFORE_TRAINING:
            where = f"in step {step + 1} (phase {self.progress.phase})"
        hint = resume_hint(self.folder, resumed_step=step)
        report_failure(Interrupted(f"{self.signal.name} ended the run {where}; {why}", hint=hint), self.progress)
        sys.stdout.flush()
        os._exit(EXIT_RUN_FAILED)

    # -- the places

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saves, self.first_step = str(args.save_strategy) != "SaveStrategy.NO", state.global_step
        self._is_last((state.global_step, 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_last((state.global_step, 0)):  # an evaluation that is due draws its random numbers, and ends
            self._stop(state, control, saves=self.saves)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.may_stop_evaluation and self._is_last((self.place[0], self.place[1] + 1)):
            self._stop(state, control, saves=self.saves)
            raise EvaluationStopped

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_last((self.place[0], self.place[1] + 1)):
            self._stop(state, control, saves=False)

    def _stop(self, state: Any, control: Any, *, saves: bool) -> None:
        """End training here; after the last step it ends, and the run completes, by itself."""
        if state.global_step < state.max_steps:
            self.stopped = control.should_training_stop = True
            control.should_save = saves

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:  # the Trainer would evaluate, and save again
            control.should_evaluate = control.should_save = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        with self.lock:
            self.place = AFTER_TRAINING

    def _is_last(self, place: Place) -> bool:
        """Note that this rank has come to a place, and return True if all ranks stop there."""
        with self.lock:
            self.place = place
            if self.signal is None:
                return False
        if not self.agreed.wait(2 * ANSWER_SECONDS):
            self._exit("no checkpoint was saved: the ranks did not agree on a step")
        return place > self.last_place

    def evaluate_and_save(self, trainer: Any, evaluate_and_save: Callable[[], None]) -> None:
        """Log, evaluate and save, as are due after a step, and end the evaluation where the ranks stop."""
        self.may_stop_evaluation = True
        try:
            evaluate_and_save()
        except EvaluationStopped:
            trainer.control.should_evaluate = False
            evaluate_and_save()
        finally:
            self.may_stop_evaluation = False

    def raise_stopped(self) -> None:
        """Raise Interrupted after the last step, once every rank has finished its save. Collective."""
        if dist.is_initialized():
            dist.barrier()
        assert self.signal is not None
        self.progress.note(STOPPED)
        step = self.progress.step
        saved = f"checkpoint-{step} was saved" if self.saves else "no checkpoint was saved (`--save_strategy no`)"
        later = self.folder.path.name.startswith("training-")  # of a script: only its first training resumes
        hint = resume_words(self.folder) if self.saves and not later else None
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
