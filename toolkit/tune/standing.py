"""Where a search stands: what its ledger says of each setting, which are eliminated, and which trial is next.

A search is replayed from its ledger, round by round, so that an interrupted one resumes where it stopped, and its
result depends on nothing else. A figure of a round counts the steps that all trials up to that round have timed, so
that no later trial changes what a round has decided.

Settings are eliminated sequentially, at a stated error. A round is one trial of every setting that is left. The figure
of a trial is the logarithm of its seconds per step,

    figure = setting + round + noise,

so that what slows a whole round, such as a neighbor on the node, cancels in the differences within it. After round r,
setting i is eliminated if the confidence interval of its ratio to the leader (the setting with the lowest mean) lies
above 1:

    mean(i) - mean(leader) > t(1 - e_r, df) · s · sqrt(2 / r),
    e_r = e / (K - 1) · (f(r) - f(r - 1)),    f(r) = ((r - 1) / (R - 1))².

The error e (5 %) is shared by the K - 1 settings that could wrongly eliminate the fastest, and by the rounds from the
second to R, the last: by the union bound the truly fastest setting is eliminated in at most e of the searches, whenever
one stops. Dividing an error over repeated looks is the "alpha spending" of Lan and DeMets 1983 ("Discrete sequential
boundaries for clinical trials"), and this f the power family of Kim and DeMets 1987 ("Design and analysis of group
sequential tests based on the type I error spending rate function"): little is spent while few trials say how large
the noise is. Racing to the best by elimination is Maron and Moore 1994 ("Hoeffding races") and, with t tests, Birattari
et al. 2002 ("A racing algorithm for configuring metaheuristics").

The variance s² is pooled over all settings, those already eliminated included: two trials of one setting say little.
Each round adds the squared deviations of its figures from the means of the rounds before, without their common shift
(Helmert contrasts): a round of k settings has k - 1 degrees of freedom. Where the differences between two settings
themselves vary more than that, as those of a setting that offloads do, their own variance is taken.

>>> figures = {"a": [0.0, 0.01, 0.0], "b": [0.7, 0.7, 0.69], "c": [0.02, 0.0, 0.01]}
>>> race = after_round(figures, num_settings=3, num_rounds=8)
>>> race.leader, sorted(race.slower)
('a', ['b'])
"""

import functools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from toolkit.compare import parity
from toolkit.compare.ledger import LedgerRecord
from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.significance import common_steps, exp_interval, ratio_confidence, student_t
from toolkit.compare.specification import ComparisonSpec
from toolkit.record.columns import Interval
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
    logs: tuple[float, ...] = ()  # logarithm of seconds per step of each completed trial


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
    smaller = (each.setting for each in measured.values() if each.outcome == "out_of_memory")
    same = (other.name for other in smaller if other.family == setting.family and 0 < other.batch < setting.batch)
    return next(same, None)


def _add_figures(measured: dict[str, Measured], trials: Sequence[LedgerRecord]) -> None:
    ruled_out = {name for name, each in measured.items() if each.outcome == "another_problem"}
    completed = [trial for trial in trials if trial.completed and trial.preset not in ruled_out]
    steps = common_steps(completed)
    for name, each in measured.items():  # trials are in the order of the rounds
        logs = [math.log(_mean_seconds(trial, steps)) for trial in completed if trial.preset == name and steps]
        measured[name] = replace(each, logs=tuple(logs))


def _mean_seconds(trial: LedgerRecord, steps: int) -> float:
    timed = [trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps]]
    return statistics.fmean(timed or [0.0])


ERROR = 0.05  # share of searches in which the truly fastest setting may be eliminated, at most
SAME_SPEED = 0.02  # a search ends when no setting that is left can be faster than the leader by more than this

Figures = Mapping[str, Sequence[float]]
"""Logarithm of seconds per step by setting and round; a setting that was eliminated has fewer rounds."""
quantile = functools.lru_cache(maxsize=4096)(student_t)


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The settings that are left after a round."""

    leader: str
    ratios: Mapping[str, Interval]
    """Interval of the ratio of seconds per step to the leader's, of each other setting that was left."""

    @property
    def slower(self) -> dict[str, Interval]:
        """Those that are eliminated: their interval excludes 1."""
        return {name: interval for name, interval in self.ratios.items() if interval[0] > 1}

    @property
    def settled(self) -> bool:
        """True if no setting that is left can be faster than the leader by more than `SAME_SPEED`."""
        return all(low >= 1 - SAME_SPEED for low, _ in self.ratios.values())


def spent(after: int, num_rounds: int) -> float:
    """Return f: the share of the error that all rounds up to this one spend."""
    return ((after - 1) / (num_rounds - 1)) ** 2


def after_round(figures: Figures, *, num_settings: int, num_rounds: int, error: float = ERROR) -> Race:
    """Return the race after the last complete round, of `num_settings` (K, all) and `num_rounds` (R, at least 2)."""
    rounds = max(map(len, figures.values()))
    left = {name: values for name, values in figures.items() if len(values) == rounds}
    leader = min(left, key=lambda name: statistics.fmean(left[name]))
    share = spent(rounds, num_rounds) - spent(rounds - 1, num_rounds) if rounds > 1 else 0.0
    # Only the lower end of an interval eliminates, so each end has the whole error of its round.
    confidence, pooled = 1 - 2 * error * share / max(num_settings - 1, 1), noise(figures)
    others = {name: _ratio(left[name], left[leader], pooled, confidence) for name in left if name != leader}
    return Race(leader=leader, ratios={name: interval for name, interval in others.items() if interval is not None})


def noise(figures: Figures) -> tuple[float, int]:
    """Return the pooled variance within settings, without the rounds' common shifts, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for at in range(1, max(map(len, figures.values()), default=0)):
        steps = [values[at] - statistics.fmean(values[:at]) for values in figures.values() if len(values) > at]
        squares += _squares(steps) * at / (at + 1)
        freedom += len(steps) - 1
    return (squares / freedom if freedom else 0.0), freedom


def ratio_interval(figures: Figures, one: str, other: str, *, confidence: float) -> Interval | None:
    """Return the interval of the ratio of two settings, over the rounds of both; None with fewer than two rounds."""
    return _ratio(figures[one], figures[other], noise(figures), confidence)


def mean_interval(figures: Figures, name: str, *, confidence: float = 0.95) -> Interval | None:
    """Return the interval of a setting's geometric mean, with the variance within all settings; None if unknown."""
    freedom = sum(len(values) - 1 for values in figures.values())
    spread = math.sqrt(sum(map(_squares, figures.values())) / max(freedom, 1) / len(figures[name]))
    return exp_interval(statistics.fmean(figures[name]), quantile(confidence, freedom) * spread) if freedom else None


def _ratio(
    one: Sequence[float], other: Sequence[float], pooled: tuple[float, int], confidence: float
) -> Interval | None:
    pairs, (variance, freedom) = [a - b for a, b in zip(one, other, strict=False)], pooled
    if len(pairs) < 2 or not freedom:
        return None
    larger = max(2 * variance, _squares(pairs) / (len(pairs) - 1))
    return exp_interval(statistics.fmean(pairs), quantile(confidence, freedom) * math.sqrt(larger / len(pairs)))


def _squares(values: Sequence[float]) -> float:
    middle = statistics.fmean(values)
    return sum((value - middle) ** 2 for value in values)
