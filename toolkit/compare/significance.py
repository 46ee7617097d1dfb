"""What repeated trials allow to be claimed: intervals, differences, ranks, scaling, and the preset to take.

>>> difference((0.71, 0.78))
'slower'

The unit is the trial, never the step: the steps of one process share its placement, clocks and neighbors, so they vary
less than processes do, and an interval over pooled steps would find differences between a preset and itself. Each
trial gives one figure; the interval is Student's t over the logarithms of the trials' figures, because speeds vary by
factors. The variance between the steps of a trial is inside the trial's figure, and so in the interval. Resampling
three trials is no alternative: the bootstrap of so few clusters is too narrow (Cameron, Gelbach and Miller 2008,
"Bootstrap-based improvements for inference with clustered errors"). Method: Kalibera and Jones 2013, "Rigorous
benchmarking in reasonable time"; Georges, Buytaert and Eeckhout 2007, "Statistically rigorous Java performance
evaluation".

A ratio is the difference of two means of logarithms, with Welch's degrees of freedom: an offloading preset varies more
than another. Trials are interleaved, so a drift during the comparison widens both sides and favors none.

The answer (docs/concepts/compare.md) considers only rows that completed, trained the baseline's problem and do not
differ by design, and only speeds with intervals decide.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.compare.results import Results
from toolkit.compare.rows import Difference, Row, RowKey, Run
from toolkit.record import status
from toolkit.record.columns import Interval
from toolkit.units import fixed, gib, interval, percent

CONFIDENCE = 0.95
# One false claim in a hundred comparisons of a preset with itself; at 95 % it would be one in twenty. When many rows
# are compared with the baseline, all of them together make a false claim in at most one comparison of twenty
# (Bonferroni).
PAIR_ERROR = 0.01
COMPARISON_ERROR = 0.05
METHOD = (
    "95 % Student t interval over the logarithms of the repeats' figures; a ratio by Welch's t at ratio_confidence:"
    " 99 %, or more where over 5 rows are compared, so that a comparison without differences claims one at most once"
    " in twenty"
)
SAME_SPEED = 0.05  # two presets are equally fast where the interval of their ratio lies within this share of 1
Verdict = Literal["faster", "slower", "same speed", "unclear"]
SIMPSON_INTERVALS = 200
FASTEST = 1e30  # tokens per second beyond every GPU; damaged times, not speeds, are outside of it and of its inverse
LARGEST_LOG = 700.0  # exp() of more overflows

Speeds = Mapping[RowKey, Sequence[float]]
"""Tokens per second, without padding, of each repeat of a row, over the same steps in all trials with its number of
processes. Rows with other batches, such as those of another layout, pad the same sequences to other lengths."""


def mean_interval(figures: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return the interval of the geometric mean; None with fewer than two figures."""
    if len(figures) < 2:
        return None
    logs = [math.log(figure) for figure in figures]
    half = student_t(confidence, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return exp_interval(statistics.fmean(logs), half)


def ratio_interval(own: Sequence[float], other: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of the ratio of two geometric means; None with fewer than two repeats of either."""
    if min(len(own), len(other)) < 2:
        return None
    logs = [[math.log(figure) for figure in figures] for figures in (own, other)]
    errors = [statistics.variance(values) / len(values) for values in logs]
    middle = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if sum(errors) == 0:
        return exp_interval(middle, 0.0)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True))
    return exp_interval(middle, student_t(confidence, freedom) * math.sqrt(sum(errors)))


def ratio_confidence(num_ratios: int) -> float:
    """Return the confidence level of each of this many ratios in one comparison."""
    return 1 - min(PAIR_ERROR, COMPARISON_ERROR / max(1, num_ratios))


def difference(ratio: Interval | None) -> Difference | None:
    if ratio is None:
        return None
    return "faster" if ratio[0] > 1 else "slower" if ratio[1] < 1 else "no difference seen"


def verdict(ratio: Interval | None) -> Verdict | None:
    """Return what a ratio's interval shows; an interval that includes 1 shows equality only if it is narrow.

    >>> verdict((0.97, 1.02)), verdict((0.3, 2.1)), verdict((0.3, 0.98))
    ('same speed', 'unclear', 'slower')
    """
    if (claim := difference(ratio)) == "no difference seen" and ratio is not None:
        return "same speed" if ratio[0] >= 1 - SAME_SPEED and ratio[1] <= 1 + SAME_SPEED else "unclear"
    return claim if claim in ("faster", "slower") else None


def quotient(own: Interval, other: Interval) -> Interval:
    """Return the interval between the extreme quotients of two intervals: wider than that of the quotient."""
    return own[0] / other[1], own[1] / other[0] if other[0] else math.inf


def student_t(confidence: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t, for fractional degrees of freedom too.

    >>> round(student_t(0.95, 2), 3)
    4.303
    """

    def area(angle: float) -> float:
        """Integral of cos(x) ** (freedom - 1) from 0 to `angle`, by Simpson's rule."""
        width = angle / SIMPSON_INTERVALS
        weights = (1 if i in (0, SIMPSON_INTERVALS) else 4 if i % 2 else 2 for i in range(SIMPSON_INTERVALS + 1))
        return width / 3 * math.fsum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights))

    # With t = sqrt(freedom) * tan(angle) the density is proportional to cos(angle) ** (freedom - 1).
    low, high = 0.0, math.pi / 2
    total = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < confidence * total else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def exp_interval(middle: float, half: float) -> Interval:
    """Return the interval of a factor from its logarithm's; its ends are numbers, however far repeats are apart."""
    high = min(middle + half, LARGEST_LOG)
    return math.exp(min(middle - half, high)), math.exp(high)


def common_steps(trials: Sequence[Run]) -> int:
    """Return the number of timed steps that every completed trial has."""
    return min((len(trial.timed_step_numbers) for trial in trials if trial.completed), default=0)


def speeds_of(trials: Sequence[Run], steps: int, *, padding: bool = True) -> list[float]:
    """Return tokens per second (without `padding`, if counted) of each repeat's first steps; 0 without a clock."""
    speeds = []
    for trial in trials:
        numbers = trial.timed_step_numbers[:steps]
        without_padding = trial.step_non_padding_tokens
        known = bool(without_padding) and None not in without_padding
        counted = without_padding if known and not padding else trial.step_tokens
        seconds = sum(trial.step_seconds[number - 1] or 0.0 for number in numbers)
        tokens = sum(counted[number - 1] or 0 for number in numbers)
        speed = tokens / seconds if seconds else 0.0
        speeds.append(speed if 1 / FASTEST <= speed <= FASTEST else 0.0)
    return speeds


def compare_with_baseline(row: Row, rows: Sequence[Row], speeds: Speeds, baseline: RowKey) -> dict[str, Any]:
    """Return columns: the ratio to the baseline, its claim, and scaling from the preset's fewest processes."""
    columns: dict[str, Any] = {"ratio_to_reference": None}
    if row.key not in speeds:
        return columns
    speed_by_size = {
        other.world_size: other.tokens_per_second or 0.0
        for other in rows
        if other.preset == row.preset and other.has_speed
    }
    if len(speed_by_size) > 1:
        fewest = min(speed_by_size)
        speed_up = speed_by_size[row.world_size] / speed_by_size[fewest]
        columns |= {"speed_up": speed_up, "scaling_efficiency": speed_up / (row.world_size / fewest)}
    if row.key == baseline:
        columns |= {"ratio_to_reference": 1.0, "difference": "reference"}
    elif baseline in speeds:
        own, others = speeds[row.key], speeds[baseline]
        interval = ratio_interval(own, others, confidence_of(rows))
        columns |= {"ratio_interval": interval, "difference": difference(interval)}
        columns["ratio_to_reference"] = statistics.geometric_mean(own) / statistics.geometric_mean(others)
    return columns


def confidence_of(rows: Sequence[Row]) -> float:
    """Return the confidence level of each ratio to a baseline, of which there is one per number of processes."""
    return ratio_confidence(len(rows) - len({row.world_size for row in rows}))


def rank_of(row: Row, rows: Sequence[Row], speeds: Speeds) -> int | None:
    """Return the place in its world size and group; None unless separated from all others, all pairs together."""
    kind = (row.world_size, row.group)
    peers = [other for other in rows if other.key in speeds and (other.world_size, other.group) == kind]
    if row not in peers or len(peers) < 2:
        return None
    confidence = ratio_confidence(len(peers) * (len(peers) - 1) // 2)
    others = [speeds[other.key] for other in peers if other is not row]
    claims = [difference(ratio_interval(other, speeds[row.key], confidence)) for other in others]
    return 1 + claims.count("faster") if set(claims) <= {"faster", "slower"} else None


LabelledRow = tuple[str, Row]  # a row with the label that the report gives it
MORE_REPEATS = 2  # two more narrow an interval more than longer trials do (docs/evidence/trust.md)
FEWEST_REPEATS = 3
ON_CPU = "No preset is recommended: a CPU shows memory and training, and its speeds say nothing about GPUs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One sentence that answers "which preset?", and what else a reader must know."""

    headline: str
    details: tuple[str, ...]
    recommends: bool = False

    @property
    def lines(self) -> list[str]:
        return [self.headline, *(f"- {detail}" for detail in self.details)]


def answer(results: Results) -> Answer:
    """Return the preset to take for each number of processes, or why none can be named yet."""
    if not results.rows:
        return Answer(headline="Nothing was compared: there are no rows", details=())
    answers = {f"on {results.hardware(size)}": _answer_at(results, size) for size in results.world_sizes}
    headlines = list(dict.fromkeys(one.headline for one in answers.values()))
    if len(headlines) > 1:
        headlines = [f"{one.headline} ({place})" for place, one in answers.items()]
    headline, placed = "; ".join(headlines), len(answers) > 1
    if results.unfinished:
        headline = f"Interrupted, of finished trials ({len(results.trials)}) only. {headline}"
    details = [f"{place}, {text}" if placed else text for place, one in answers.items() for text in one.details]
    unclear = [label for label, row in results.labelled_rows if verdict(row.ratio_interval) == "unclear"]
    if unclear and "--resume" not in headline:
        details.append(f"the ratio of {_names(unclear)} is unclear: {_more_trials(results)}")
    recommends = any(one.recommends for one in answers.values())
    return Answer(headline=headline, details=(*details, *_about_all(results)), recommends=recommends)


def _answer_at(results: Results, world_size: int) -> Answer:
    rows = [
        (row.preset if label == f"{row.preset} n{world_size}" else label, row)  # the headline names the size
        for label, row in results.labelled_rows
        if row.world_size == world_size and row.comparable and row.group is None
    ]
    ranked = [(label, row) for label, row in rows if row.status_text == status.COMPLETED]  # not one that diverged
    if not ranked:
        return Answer(headline="No preset can be recommended: none trained the same problem", details=())
    if results.on_cpu:
        return Answer(headline=ON_CPU, details=tuple(_bytes_on_cpu(ranked)))
    if (shared := results.method.ranks_per_gpu) > 1:
        why = f"speeds are n/a, since {shared} ranks share a GPU, so no preset is recommended"
        return Answer(headline=f"Memory, losses and parity only: {why}", details=tuple(_least_memory(results, ranked)))
    ranked = [(label, row) for label, row in ranked if row.has_speed]
    if len(ranked) == 1:
        return Answer(headline=f"Take {ranked[0][0]}, the only one that can be compared", details=(), recommends=True)
    if not ranked or not all(row.repeated for _, row in ranked):
        why = f"single runs have no intervals: {_more_trials(results)}" if ranked else "no speed is known"
        return Answer(headline=f"Not decided yet: {why}", details=tuple(_least_memory(results, ranked)))
    return _decide(results, world_size, ranked)


def _more_trials(results: Results) -> str:
    if results.method.search:  # whose settings have as many trials as it needed
        return "`toolkit tune` with `--resume` continues the search"
    repeats = results.method.repeats
    return f"run `--resume --repeats {FEWEST_REPEATS if repeats == 1 else repeats + MORE_REPEATS}`"


def _decide(results: Results, world_size: int, ranked: Sequence[LabelledRow]) -> Answer:
    """Take the least memory among the rows that none beats by more than SAME_SPEED."""

    def memory(labelled: LabelledRow) -> float:
        return results.peak_bytes(labelled[1]) or float("inf")

    fast, slow = [], []
    for label, row in ranked:
        others = [relative_speed(other, row) for _, other in ranked if other is not row]
        if all(high <= 1 + SAME_SPEED for _, high in others):
            fast.append((label, row))
        elif any(low > 1 for low, _ in others):
            slow.append((label, row))
    unclear = [labelled for labelled in ranked if labelled not in fast and labelled not in slow]
    # Differences of memory below one per cent decide nothing.
    least = min(map(memory, fast), default=float("inf"))
    close = [labelled for labelled in fast if memory(labelled) <= 1.01 * least]
    pick = max(close, key=lambda labelled: labelled[1].useful_speed, default=None)
    if pick is None or any(memory(labelled) < memory(pick) for labelled in unclear):
        names = _names([label for label, _ in (*unclear, *fast[:1])][:4])
        why = f"the speeds of {names} differ by less than their intervals: {_more_trials(results)}"
        return Answer(headline=f"Not decided yet: {why}", details=tuple(_least_memory(results, ranked)))
    baseline = next((labelled for labelled in ranked if labelled[1] is results.baseline(world_size)), pick)
    if pick[1] is not baseline[1]:
        why = compared(results, pick, baseline)
    elif len(fast) == 1:
        why = f"the fastest of {len(ranked)}"
    else:
        why = "none is faster, and none as fast uses less memory"
    return Answer(
        headline=f"Take {pick[0]}: {why}", details=tuple(_least_memory(results, ranked, pick)), recommends=True
    )


def _least_memory(results: Results, ranked: Sequence[LabelledRow], base: LabelledRow | None = None) -> list[str]:
    base = base or next((labelled for labelled in ranked if labelled[1].parity == "reference"), None)
    known = [labelled for labelled in ranked if results.peak_bytes(labelled[1])]
    least = min(known, key=lambda labelled: results.peak_bytes(labelled[1]) or 0, default=None)
    if base is None or least is None or least[1] is base[1]:
        return []
    return [f"{least[0]} uses {compared(results, least, base)}"]


def compared(results: Results, own: LabelledRow, other: LabelledRow) -> str:
    """Return memory and speed of a row relative to another, such as `25 % less memory than ddp at the same speed`."""
    (_, row), (name, base) = own, other
    size, base_size = results.peak_bytes(row), results.peak_bytes(base)
    memory = "an unknown memory"
    if size and base_size:
        share, word = percent(abs(1 - size / base_size)), "less" if size < base_size else "more"
        memory = "the same memory" if share == percent(0) else f"{share} {word} memory"
    than = f"{memory} {'as' if 'same' in memory else 'than'} {name}"
    if not (row.repeated and base.repeated):
        return than
    ratio, bounds = row.useful_speed / (base.useful_speed or 1.0), relative_speed(row, base)
    if (found := verdict(bounds)) == "faster":
        return f"{percent(ratio - 1)} faster than {name}, with {memory}"
    speeds = {"same speed": "at the same speed", "slower": f"for {percent(1 - ratio)} less speed"}
    return f"{than} {speeds.get(found or '', f'at {ratio:.2f} ({interval(fixed(2))(bounds)}) times its speed')}"


def relative_speed(own: Row, other: Row) -> Interval:
    """Return the interval of a row's speed over another's; both have intervals.

    With the baseline it is the ratio's, which the trials gave. Of two other rows it is the quotient of the ends of both
    intervals, which is wider; where the comparison ranks one of them, it lies on the side that the rank claims.
    """
    if own.ratio_interval and other.difference == "reference":
        low, high = own.ratio_interval
    elif other.ratio_interval and own.difference == "reference":
        low, high = quotient((1.0, 1.0), other.ratio_interval)
    else:
        low, high = quotient(_useful_interval(own), _useful_interval(other))
    if own.rank is None and other.rank is None:
        return low, high
    return (max(low, 1.0 + 1e-9), high) if own.useful_speed > other.useful_speed else (low, min(high, 1.0 - 1e-9))


def _useful_interval(row: Row) -> Interval:
    low, high = row.tokens_per_second_interval or (0.0, float("inf"))
    share = row.useful_speed / (row.tokens_per_second or 1.0)
    return low * share, high * share


def _bytes_on_cpu(ranked: Sequence[LabelledRow]) -> list[str]:
    lines = [f"{_names([label for label, _ in ranked])} trained the same problem"] if len(ranked) > 1 else []
    planned = {label: row.planned_gpu_state_bytes or 0 for label, row in ranked}
    if all(planned.values()):
        least = min(planned.values())
        names = _names([label for label, size in planned.items() if size <= 1.01 * least])
        baseline, size = next(((name, planned[name]) for name, row in ranked if row.parity == "reference"), ("", least))
        than = f", {percent(1 - least / size)} less than {baseline}" if size > 1.01 * least else ""
        need = "need" if " and " in names else "needs"
        lines.append(f"on GPUs, by the plan, {names} {need} least for model states: {gib(least)} per rank{than}")
    return lines


def _about_all(results: Results) -> list[str]:
    rows, lines = results.labelled_rows, []
    scaled = [row for row in results.rows if row.preset == results.reference and row.scaling_efficiency]
    if len(scaled) > 1:
        first, last = (end(scaled, key=lambda row: row.world_size) for end in (min, max))
        lines.append(
            f"from {first.world_size} to {last.world_size} processes {results.reference} becomes"
            f" {last.speed_up or 0.0:.2f} times as fast ({percent(last.scaling_efficiency)} of ideal)"
        )
    ran = [
        f"{row.per_device_train_batch_size} ({label})"
        for label, row in rows
        if any(probe.status == status.COMPLETED for probe in row.probes or ())
    ]
    lines += [f"the largest per-GPU batch that runs is {', '.join(ran)}"] if ran else []
    left_out = {
        "did not complete": [f"{name}: {r.status}" for name, r in rows if not (r.completed or r.unsupported)],
        "cannot run on this node": [name for name, row in rows if row.unsupported],
        "did not train the same problem": [name for name, row in rows if row.failed_parity],
        "not ranked here, different by design": [f"{name} ({r.group})" for name, r in rows if r.completed and r.group],
        "could not be checked against the baseline": [name for name, row in rows if row.unchecked],
    }
    return lines + [f"{len(names)} {why} ({', '.join(names)})" for why, names in left_out.items() if names]


def _names(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))
