"""End a run once its median step time is known well enough, on all ranks after the same step, without a collective.

Rank 0 decides after every fifth step, and publishes the decision in the process group's store. Every rank reads it two
steps later, before it finishes that step: so all of them stop there, however far one has run ahead. The gradients of a
step need rank 0, so the decision has been there for a step. Deciding and reading are outside the steps' clock.
"""

import math
import statistics
import time
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback

from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.signals import join_store
from toolkit.observe.timer import StepTimer
from toolkit.record.measurements import median_interval

MIN_TIMED_STEPS = 10
DECIDE_EVERY_STEPS = 5
READ_AFTER_STEPS = 2
CONTINUE = "go"


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops training when the median step time is known, or after some minutes, and records why in run.json.

    `within` is half the width of the median's 95 % interval over the median; `minutes` is the longest time that the
    steps may take. Either may be None. `evaluates`: make the evaluation that the last step would have made.
    """

    def __init__(
        self, run: ObservedRun, timer: StepTimer, *, within: float | None, minutes: float | None, evaluates: bool
    ) -> None:
        self.run, self.timer, self.within, self.minutes, self.evaluates = run, timer, within, minutes, evaluates
        self.decisions: dict[int, str] = {}
        """Rank 0's decisions, by step."""
        self.store: Any = None

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self.began = time.monotonic()
        if args.world_size > 1:
            self.store = join_store(timedelta(seconds=args.ddp_timeout), self.run.progress)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        decides, reads = step % DECIDE_EVERY_STEPS == 0, step % DECIDE_EVERY_STEPS == READ_AFTER_STEPS
        if decides and self.timer.rank == 0:
            self.decisions[step] = self._decide()
            if self.store is not None:
                self.store.set(f"early_stopping/{step}", self.decisions[step])
        decided_at = step - READ_AFTER_STEPS
        if reads and decided_at > self.timer.resumed_step and (decision := self._read(decided_at)) != CONTINUE:
            control.should_training_stop, control.should_evaluate = True, self.evaluates
            if self.run.writes:
                self.run.folder.update_run(stopped_after={"step": step, "why": decision})
        if decides or reads:
            self.timer.restart_clock()

    def _decide(self) -> str:
        self.timer.flush(wait=False)
        timed = self.timer.timed_seconds
        if self.minutes is not None and time.monotonic() - self.began > self.minutes * 60:
            return f"{self.minutes:g} minutes"
        if self.within is not None and len(timed) >= MIN_TIMED_STEPS:
            median, (low, high) = statistics.median(timed), median_interval(timed) or (0.0, math.inf)
            if max(high - median, median - low) <= self.within * median:
                return f"median step known to {self.within:.1%}"
        return CONTINUE

    def _read(self, step: int) -> str:
        if self.store is None or step in self.decisions:
            return self.decisions[step]
        return str(self.store.get(f"early_stopping/{step}").decode())
