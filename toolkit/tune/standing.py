"""Where a search stands: what its ledger says of each setting, and which trial is next.

A search is replayed from its ledger, round by round, so that an interrupted one resumes where it stopped, and its
result depends on nothing else. A figure of a round counts the steps that all trials up to that round have timed, so
that no later trial changes what a round has decided.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from toolkit.compare.ledger import LedgerRecord, TrialRecord
from toolkit.compare.parity import (
    FACTS_OF_COMPARISON,
    FACTS_OF_WORLD_SIZE,
    batches_unseen,
    count_difference,
    fact_difference,
    outside_band,
)
from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.significance import common_steps, ratio_confidence
from toolkit.compare.specification import ComparisonSpec
from toolkit.record.columns import Interval
from toolkit.tune.elimination import after_round, mean_interval, ratio_interval
from toolkit.tune.field import YOURS, Setting

Outcome = Literal["left", "eliminated", "out_of_memory", "failed", "another_problem", "not_tried"]
# A setting may checkpoint activations, and train a step in other micro-batches.
FREE = ("activation_checkpointing",)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting after the trials so far."""

    setting: Setting
    outcome: Outcome = "left"
    round: int | None = None
    """The round that it left the search in, from 1."""
    why: str | None = None
    logs: tuple[float, ...] = ()
    """Logarithm of seconds per step of each completed trial."""

    @property
    def seconds_per_step(self) -> float | None:
        """Geometric mean over its trials."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The search after the trials so far."""

    measured: tuple[Measured, ...]
    """Settings in the order of the field."""
    round: int
    """The round that is under way, or the last one."""
    missing: tuple[Setting, ...] = ()
    """Settings whose trial of this round is missing, in running order; empty where the search has ended."""
    ended: str | None = None
    """Why no trial is missing."""
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @functools.cached_property
    def winner(self) -> Measured | None:
        """The fastest of the settings that are left, by their complete rounds; None where none has completed."""
        left = [each for each in self.measured if each.outcome == "left" and each.logs]
        rounds = min((len(each.logs) for each in left), default=0)
        return min(left, key=lambda each: statistics.fmean(each.logs[:rounds]), default=None)

    @property
    def others_left(self) -> list[Measured]:
        """Settings from which the winner could not be told apart."""
        return [each for each in self.measured if each.outcome == "left" and each.logs and each is not self.winner]

    def seconds_interval(self, name: str) -> Interval | None:
        """Return the 95 % interval of a setting's seconds per step."""
        return mean_interval(self.figures, name) if name in self.figures else None

    def ratio_to_yours(self, name: str) -> tuple[float, Interval | None] | None:
        """Return seconds per step over the user's own setting's, over the rounds of both, with its interval."""
        own, other = self.figures.get(name, ()), self.figures.get(YOURS, ())
        pairs = [a - b for a, b in zip(own, other, strict=False)]
        if not pairs:
            return None
        ratio = math.exp(statistics.fmean(pairs))
        confidence = ratio_confidence(len(self.measured) - 1)
        return ratio, None if name == YOURS else ratio_interval(self.figures, name, YOURS, confidence=confidence)


def row_of(setting: Setting, spec: ComparisonSpec) -> RowKey:
    """Return the row of a setting's trials in the comparison."""
    return RowKey(preset=setting.name, world_size=spec.world_sizes[0])


def stand(settings: Sequence[Setting], spec: ComparisonSpec, records: Mapping[str, LedgerRecord]) -> Standing:
    """Replay a search from its ledger."""
    measured = {setting.name: Measured(setting=setting) for setting in settings}
    trials: list[TrialRecord] = []
    baseline: list[TrialRecord] = []
    standing = Standing(measured=tuple(measured.values()), round=1)
    for number in range(spec.repeats):
        left = [each.setting for each in measured.values() if each.outcome == "left"]
        missing = []
        for setting in _running_order(left, number, spec.order_seed):
            record = records.get(Trial(row=row_of(setting, spec), repeat=number).id)
            if isinstance(record, TrialRecord):
                trials.append(record)
                if setting.name == YOURS and record.completed:
                    baseline.append(record)
                if (problem := _problem(record, baseline)) is not None:
                    outcome, why = problem
                    found = measured[setting.name]
                    measured[setting.name] = replace(found, outcome=outcome, round=number + 1, why=why)
            elif (smaller := _smaller_without_memory(setting, measured.values())) is not None:
                why = f"{smaller} ran out of memory with a smaller per-GPU batch"
                measured[setting.name] = replace(measured[setting.name], outcome="not_tried", why=why)
            else:
                missing.append(setting)
        _add_figures(measured, trials)
        figures = {name: each.logs for name, each in measured.items() if each.logs}
        standing = Standing(measured=tuple(measured.values()), round=number + 1, figures=figures)
        racing = {name: logs for name, logs in figures.items() if measured[name].outcome in ("left", "eliminated")}
        if missing:
            return replace(standing, missing=tuple(missing))
        if not any(each.outcome == "left" for each in measured.values()):
            return replace(standing, ended="no setting is left")
        if number:
            race = after_round(racing, num_settings=len(settings))
            for name, (low, high) in race.slower.items():
                why = f"{low:.3f} to {high:.3f} times the seconds per step of {race.leader}"
                measured[name] = replace(measured[name], outcome="eliminated", round=number + 1, why=why)
            standing = replace(standing, measured=tuple(measured.values()))
            if race.settled and len(race.slower) < len(race.ratios):
                return replace(standing, ended="no setting that is left can be more than 2 % faster")
        if sum(each.outcome == "left" for each in measured.values()) == 1:
            return replace(standing, ended="one setting is left")
    return replace(standing, ended=f"every setting that is left has {spec.repeats} trials (--rounds)")


def _running_order(settings: Sequence[Setting], number: int, seed: int) -> list[Setting]:
    """The first round in the order of the field, so that a short budget tries the most promising; others shuffled."""
    shuffled = random.Random(f"{seed}-{number}").sample(settings, len(settings))
    return shuffled if number else list(settings)


def _problem(record: TrialRecord, baseline: Sequence[TrialRecord]) -> tuple[Outcome, str] | None:
    """How a trial rules its setting out; None if it does not."""
    if record.out_of_memory:
        return "out_of_memory", record.message or record.status
    if not record.completed:
        return "failed", f"{record.status}: {record.message or ''}".removesuffix(": ")
    if _mean_seconds(record, 1) <= 0:
        return "failed", "no step of it was timed"
    difference = next(_differences(record, baseline), None)
    return None if difference is None else ("another_problem", difference)


def _differences(record: TrialRecord, baseline: Sequence[TrialRecord]) -> Iterator[str]:
    """Each way in which a trial did not train the problem of the user's own setting."""
    if not baseline or record.preset == YOURS:
        return
    found = [fact_difference(record, baseline[0], [*FACTS_OF_COMPARISON, *FACTS_OF_WORLD_SIZE], FREE)]
    found.append(count_difference(record, baseline[0], padding=False))
    yield from filter(None, found)
    if not batches_unseen(record):
        yield from outside_band(record, baseline[:1])


def _smaller_without_memory(setting: Setting, measured: Iterable[Measured]) -> str | None:
    """A setting with a smaller per-GPU batch, otherwise the same, that ran out of memory."""
    smaller = (each.setting for each in measured if each.outcome == "out_of_memory")
    same = (other.name for other in smaller if other.family == setting.family and 0 < other.batch < setting.batch)
    return next(same, None)


def _add_figures(measured: dict[str, Measured], trials: Sequence[TrialRecord]) -> None:
    """Set the logarithms of all settings, over the steps that all trials so far have timed."""
    ruled_out = {name for name, each in measured.items() if each.outcome == "another_problem"}
    completed = [trial for trial in trials if trial.completed and trial.preset not in ruled_out]
    steps = common_steps(completed)
    for name, each in measured.items():
        own = sorted((trial for trial in completed if trial.preset == name), key=lambda trial: trial.repeat)
        logs = tuple(math.log(_mean_seconds(trial, steps)) for trial in own) if steps else ()
        measured[name] = replace(each, logs=logs)


def _mean_seconds(trial: TrialRecord, steps: int) -> float:
    timed = [trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps]]
    return statistics.fmean(timed or [0.0])
