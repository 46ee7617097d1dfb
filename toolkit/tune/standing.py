"""Where a search stands: what its ledger says of each setting, and which trial is next.

A search is replayed from its ledger, round by round, so that an interrupted one resumes where it stopped, and its
result depends on nothing else. A figure of a round counts the steps that all trials up to that round have timed, so
that no later trial changes what a round has decided.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from toolkit.compare import parity
from toolkit.compare.ledger import LedgerRecord
from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.significance import common_steps, ratio_confidence
from toolkit.compare.specification import ComparisonSpec
from toolkit.record.columns import Interval
from toolkit.tune.elimination import SAME_SPEED, after_round, ratio_interval
from toolkit.tune.field import YOURS, Setting
from toolkit.units import percent

Outcome = Literal["left", "eliminated", "out_of_memory", "failed", "another_problem", "not_tried"]
RACES = ("left", "eliminated")  # outcomes whose trials count
FREE = ("activation_checkpointing",)  # a fact that a setting may change


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting after the trials so far."""

    setting: Setting
    outcome: Outcome = "left"
    round: int | None = None  # in which it left the search, from 1
    why: str | None = None
    logs: tuple[float, ...] = ()
    """Logarithm of seconds per step of each completed trial."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The search after the trials so far."""

    measured: tuple[Measured, ...]  # in the order of the field
    round: int = 1  # that is under way, or the last one
    missing: tuple[Setting, ...] = ()
    """Settings whose trial of this round is missing, in running order; empty where the search has ended."""
    ended: str | None = None
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def left(self) -> list[Measured]:
        """Settings that are left and have trials, the fastest first by the rounds that all of them have."""
        left = [each for each in self.measured if each.outcome == "left" and each.logs]
        rounds = min((len(each.logs) for each in left), default=0)
        return sorted(left, key=lambda each: statistics.fmean(each.logs[:rounds]))

    @property
    def winner(self) -> Measured | None:
        """The fastest setting; None where none has completed a trial."""
        return next(iter(self.left), None)

    def ratio_to_yours(self, name: str) -> tuple[float, Interval | None] | None:
        """Return seconds per step over the user's own setting's, over the rounds of both, with its interval."""
        pairs = [a - b for a, b in zip(self.figures.get(name, ()), self.figures.get(YOURS, ()), strict=False)]
        if not pairs:
            return None
        confidence = ratio_confidence(len(self.measured) - 1)
        interval = None if name == YOURS else ratio_interval(self.figures, name, YOURS, confidence=confidence)
        return math.exp(statistics.fmean(pairs)), interval


def trial_of(setting: Setting, spec: ComparisonSpec, number: int) -> Trial:
    """Return a setting's trial in a round, from 0."""
    return Trial(row=RowKey(preset=setting.name, world_size=spec.world_sizes[0]), repeat=number)


def stand(settings: Sequence[Setting], spec: ComparisonSpec, records: Mapping[str, LedgerRecord]) -> Standing:
    """Replay a search from its ledger."""
    measured = {setting.name: Measured(setting=setting) for setting in settings}
    trials, standing = list[LedgerRecord](), Standing(measured=())
    for number in range(spec.repeats):
        left, missing = [each.setting for each in measured.values() if each.outcome == "left"], list[Setting]()
        if number:  # the first round is in the order of the field, so that a short budget tries the most promising
            left = random.Random(f"{spec.order_seed}-{number}").sample(left, len(left))
        for setting in left:
            record = records.get(trial_of(setting, spec, number).id)
            update: tuple[Outcome, str] | None = None
            if record is not None and record.kind == "trial":
                trials.append(record)
                update = _problem(record, trials)
            elif (smaller := _smaller_without_memory(setting, measured)) is not None:
                update = "not_tried", f"{smaller} ran out of memory with a smaller per-GPU batch"
            else:
                missing.append(setting)
            if update is not None:
                known = {"outcome": update[0], "round": number + 1 if record else None, "why": update[1]}
                measured[setting.name] = replace(measured[setting.name], **known)  # type: ignore[arg-type]
        _add_figures(measured, trials)
        figures = {name: each.logs for name, each in measured.items() if each.logs}
        standing = Standing(measured=tuple(measured.values()), round=number + 1, figures=figures)
        if missing:
            return replace(standing, missing=tuple(missing))
        if not standing.left:
            return replace(standing, ended="no setting is left")
        settled = False
        if number:
            racing = {name: logs for name, logs in figures.items() if measured[name].outcome in RACES}
            race = after_round(racing, num_settings=len(settings), num_rounds=spec.repeats)
            settled = race.settled
            for name, (low, high) in race.slower.items():
                why = f"{low:.3f} to {high:.3f} times the seconds per step of {race.leader}"
                measured[name] = replace(measured[name], outcome="eliminated", round=number + 1, why=why)
            standing = replace(standing, measured=tuple(measured.values()))
        if len(standing.left) == 1:
            return replace(standing, ended="one setting is left")
        if settled:
            return replace(standing, ended=f"no setting that is left can be more than {percent(SAME_SPEED)} faster")
    return replace(standing, ended=f"every setting that is left has {spec.repeats} trials (--rounds)")


def _problem(record: LedgerRecord, trials: Sequence[LedgerRecord]) -> tuple[Outcome, str] | None:
    """How a trial rules its setting out; None if it does not."""
    if record.out_of_memory:
        return "out_of_memory", record.message or record.status
    if not record.completed:
        return "failed", f"{record.status}: {record.message or ''}".removesuffix(": ")
    if _mean_seconds(record, 1) <= 0:
        return "failed", "no step of it was timed"
    baseline = [trial for trial in trials if trial.preset == YOURS and trial.completed][:1]
    if not baseline or record.preset == YOURS:
        return None
    facts = [*parity.FACTS_OF_COMPARISON, *parity.FACTS_OF_WORLD_SIZE]
    found = [parity.fact_difference(record, baseline[0], facts, FREE)]
    found.append(parity.count_difference(record, baseline[0], padding=False))
    found += [] if parity.batches_unseen(record) else parity.outside_band(record, baseline)
    difference = next(filter(None, found), None)
    return None if difference is None else ("another_problem", difference)


def _smaller_without_memory(setting: Setting, measured: Mapping[str, Measured]) -> str | None:
    """A setting with a smaller per-GPU batch, otherwise the same, that ran out of memory."""
    smaller = (each.setting for each in measured.values() if each.outcome == "out_of_memory")
    same = (other.name for other in smaller if other.family == setting.family and 0 < other.batch < setting.batch)
    return next(same, None)


def _add_figures(measured: dict[str, Measured], trials: Sequence[LedgerRecord]) -> None:
    """Set the logarithms of all settings, over the steps that all trials so far have timed."""
    ruled_out = {name for name, each in measured.items() if each.outcome == "another_problem"}
    completed = [trial for trial in trials if trial.completed and trial.preset not in ruled_out]
    steps = common_steps(completed)
    for name, each in measured.items():  # trials are in the order of the rounds
        logs = [math.log(_mean_seconds(trial, steps)) for trial in completed if trial.preset == name and steps]
        measured[name] = replace(each, logs=tuple(logs))


def _mean_seconds(trial: LedgerRecord, steps: int) -> float:
    timed = [trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps]]
    return statistics.fmean(timed or [0.0])
