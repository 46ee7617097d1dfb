"""End a run whose timed steps know their median, on all ranks after the same step, and without a collective.

    trainer.add_callback(EnoughSteps(meter, within=0.03, minutes=None, world_size=2))

Rank 0 decides after every fifth step by its own clock, before it begins the next one, and publishes the answer in the
process group's store. Every rank reads the answer two steps later, and passes that step only when it has read it: so
all of them end there, however far one has run ahead. The gradients of a step need rank 0, so the answer has been there
for a step when it is read. Deciding and reading are outside the steps' clock.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback

from toolkit.runs.median import is_within
from toolkit.train.meter import Meter
from toolkit.train.stopping import join_store

LEAST_TIMED_STEPS = 10
DECIDE_EVERY = 5
READ_AFTER = 2
GO = "go"


class EnoughSteps(TrainerCallback):  # type: ignore[misc]
    """`within`: half the 95 % interval of the median over the median. `minutes`: the longest that steps may take."""

    def __init__(
        self, meter: Meter, *, within: float | None, minutes: float | None, world_size: int, evaluates: bool
    ) -> None:
        self.meter, self.within, self.minutes = meter, within, minutes
        self.world_size, self.evaluates = world_size, evaluates
        self.answers: dict[int, str] = {}
        """Rank 0's, by step."""
        self.store: Any = None
        self.began = 0.0
        self.stopped_after: dict[str, Any] | None = None
        """The last step and why, where the run was ended early."""

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self.began = time.monotonic()
        if self.world_size > 1:
            self.store = join_store(timedelta(seconds=args.ddp_timeout))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        step = state.global_step
        decides, reads = step % DECIDE_EVERY == 0, step % DECIDE_EVERY == READ_AFTER
        if decides and self.meter.rank == 0:
            self._publish(step, self._answer())
        if reads and step - READ_AFTER > self.meter.resumed_step and (why := self._read(step - READ_AFTER)) != GO:
            control.should_training_stop, control.should_evaluate = True, self.evaluates
            self.stopped_after = {"step": step, "why": why}
        if decides or reads:
            self.meter.restart_clock()

    def _answer(self) -> str:
        self.meter.flush(wait=False)
        timed = self.meter.timed_seconds
        if self.minutes is not None and time.monotonic() - self.began > self.minutes * 60:
            return f"{self.minutes:g} minutes"
        if self.within is not None and len(timed) >= LEAST_TIMED_STEPS and is_within(timed, self.within):
            return f"median step known to {self.within:.1%}"
        return GO

    def _publish(self, step: int, answer: str) -> None:
        self.answers[step] = answer
        if self.store is not None:
            self.store.set(f"enough/{step}", answer)

    def _read(self, step: int) -> str:
        if self.store is None or step in self.answers:
            return self.answers[step]
        return str(self.store.get(f"enough/{step}").decode())
