"""The answer of a comparison: the preset to take, or why that cannot be said yet (docs/concepts/compare.md).

Only rows that completed, trained the baseline's problem and do not differ by design are considered, and only speeds
with intervals decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.compare.results import Results
from toolkit.compare.rows import Row
from toolkit.compare.significance import SAME_SPEED, quotient, verdict
from toolkit.record import status
from toolkit.record.columns import Interval
from toolkit.units import fixed, gib, interval, percent

LabelledRow = tuple[str, Row]
"""A row with the label that the report gives it."""
# Two more narrow an interval more than longer trials do (docs/evidence/trust.md).
MORE_REPEATS = 2
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
    if unclear and "--repeats" not in headline:
        repeats = results.method.repeats + MORE_REPEATS
        details.append(f"the ratio of {_names(unclear)} is unclear: run `--resume --repeats {repeats}`")
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
        more = f"single runs have no intervals: run `--resume --repeats {FEWEST_REPEATS}`"
        why = more if ranked else "no speed is known"
        return Answer(headline=f"Not decided yet: {why}", details=tuple(_least_memory(results, ranked)))
    return _decide(results, world_size, ranked)


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
        repeats = results.method.repeats + MORE_REPEATS
        why = f"the speeds of {names} differ by less than their intervals: run `--resume --repeats {repeats}`"
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
    """What a CPU shows: parity, and what the same rows would hold on GPUs."""
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
