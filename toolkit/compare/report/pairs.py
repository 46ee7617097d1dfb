"""Two comparisons of one job held side by side: before and after an upgrade, or on two machines.

>>> pair_sentence(pair_up(before, after))                # doctest: +SKIP
'Of 3 rows in both, 1 became faster (zero2-n2: 1.12), 0 slower; no difference is seen in 2.'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from toolkit.compare.report import facts
from toolkit.compare.report.cells import (
    Cell,
    Column,
    Sheet,
    measured,
    number_cell,
    speed,
    tenths,
    text_cell,
    text_column,
)
from toolkit.compare.report.sheets import interval_cell, results_unit
from toolkit.compare.results import Results, Row
from toolkit.errors import ToolkitError
from toolkit.units import NOT_AVAILABLE

# What makes two jobs the same; where they lie on a disk does not.
PLACES = ("model", "dataset", "training_arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One row of both comparisons."""

    name: str
    before: Row
    after: Row

    @property
    def ratio(self) -> float | None:
        """Speed after over speed before; None unless both finished and trained the problem."""
        if not facts.finished(self.before) or not facts.finished(self.after):
            return None
        old, new = self.before["tokens_per_second"], self.after["tokens_per_second"]
        return new / old if old and new else None

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """From the intervals of both speeds; as wide as their ends allow, so wider than 95 %."""
        old, new = self.before["tokens_per_second_interval"], self.after["tokens_per_second_interval"]
        if self.ratio is None or not old or not new:
            return None
        return new[0] / old[1], new[1] / old[0]

    @property
    def verdict(self) -> str | None:
        """`faster`, `slower` or `no difference seen`; None without an interval."""
        bounds = self.ratio_interval
        if bounds is None:
            return None
        return "faster" if bounds[0] > 1 else "slower" if bounds[1] < 1 else "no difference seen"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Two comparisons: rows in both, rows in one, and what differs around them."""

    before: Results
    after: Results
    pairs: tuple[Pair, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    environment: tuple[tuple[str, str, str], ...]
    """Name, value before, value after of what differs."""


def pair_up(before: Results, after: Results) -> Paired:
    """Rows of the same name together. Raises ToolkitError where the jobs are not the same, with what differs."""
    before, after = facts.honest(before), facts.honest(after)
    if different := job_differences(before, after):
        said = "; ".join(f"{name} {old} and {new}" for name, old, new in different)
        raise ToolkitError(
            f"the two comparisons do not train the same job: {said}",
            hint="compare the same job again; `toolkit report DIR` reports each alone",
        )
    old = {row["trial"]: row for row in before["rows"]}
    new = {row["trial"]: row for row in after["rows"]}
    return Paired(
        before=before,
        after=after,
        pairs=tuple(Pair(name=name, before=old[name], after=new[name]) for name in old if name in new),
        only_before=tuple(name for name in old if name not in new),
        only_after=tuple(name for name in new if name not in old),
        environment=tuple(environment_differences(before, after)),
    )


def job_differences(before: Results, after: Results) -> list[tuple[str, str, str]]:
    """What of the jobs differs: name, value before, value after. Models and data are told apart by their last name."""
    old, new = _job(before), _job(after)
    return [(key, str(old.get(key)), str(new.get(key))) for key in {**old, **new} if old.get(key) != new.get(key)]


def _job(results: Results) -> dict[str, object]:
    job: dict[str, object] = {key: value for key, value in results["job"].items() if key not in PLACES}
    job |= {key: _last_name(str(results["job"][key])) for key in ("model", "dataset")}
    words = [_last_name(word) for word in results["job"]["training_arguments"]]
    return job | {"training arguments": " ".join(words)}


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def environment_differences(before: Results, after: Results) -> list[tuple[str, str, str]]:
    """What of the machines and versions differs."""
    old, new = _flat(before["environment"]), _flat(after["environment"])
    names = [*old, *(name for name in new if name not in old)]
    shown = [(name, old.get(name, NOT_AVAILABLE), new.get(name, NOT_AVAILABLE)) for name in names]
    return [difference for difference in shown if difference[1] != difference[2]]


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in environment.items():
        if key == "versions":
            flat |= {name: str(version) for name, version in sorted(value.items())}
        elif key == "gpus":
            flat[key] = ", ".join(f"{gpu['name']} (driver {gpu.get('driver') or NOT_AVAILABLE})" for gpu in value)
        elif key != "disk":  # its free bytes always differ
            flat[key] = NOT_AVAILABLE if value is None else str(value)
    return flat


def pair_title(paired: Paired) -> str:
    """When each was made."""
    dates = [results["created"].replace("T", " ")[:16] for results in (paired.before, paired.after)]
    return f"Before and after: {' and '.join(dates)}"


def pair_sentence(paired: Paired) -> str:
    """What became faster or slower, as far as intervals separate."""
    if not paired.pairs:
        return "No row is in both comparisons."
    judged = [pair for pair in paired.pairs if pair.verdict is not None]
    single = [pair.name for pair in paired.pairs if pair.verdict is None and pair.ratio is not None]
    clauses = [_judged(judged, len(paired.pairs)) if judged else f"{len(paired.pairs)} rows are in both"]
    if single:
        which = f" ({', '.join(single)})" if judged else ""
        clauses.append(f"{len(single)} of single runs, of which nothing is claimed{which}")
    changed = [
        f"{pair.name}: {facts.status_text(pair.before)} before, {facts.status_text(pair.after)} after"
        for pair in paired.pairs
        if facts.status_text(pair.before) != facts.status_text(pair.after)
    ]
    clauses += changed
    clauses += [f"only before: {', '.join(paired.only_before)}"] * bool(paired.only_before)
    clauses += [f"only after: {', '.join(paired.only_after)}"] * bool(paired.only_after)
    return "; ".join(clauses) + "."


def _judged(pairs: Sequence[Pair], num_rows: int) -> str:
    said = {word: [pair for pair in pairs if pair.verdict == word] for word in ("faster", "slower")}
    parts = [f"{len(found)} became {word}{_named(found)}" for word, found in said.items()]
    unseen = sum(pair.verdict == "no difference seen" for pair in pairs)
    return f"Of {num_rows} rows in both, {', '.join(parts)}, no difference is seen in {unseen}"


def _named(pairs: Sequence[Pair]) -> str:
    return f" ({', '.join(f'{pair.name}: {pair.ratio:.2f}' for pair in pairs)})" if pairs else ""


def pair_sheet(paired: Paired, *, narrow: bool = False) -> Sheet:
    """Each row's figures before and after, and the ratio of the speeds; `narrow` for a terminal."""
    unit = results_unit(paired.before)
    headers = [Column(header="tokens/s\nbefore"), Column(header="after"), Column(header="ratio")]
    headers += [] if narrow else [Column(header="interval")]
    headers += [text_column("difference"), Column(header=f"peak {unit.name}\nbefore"), Column(header="after")]
    headers += [Column(header="last loss\nbefore"), Column(header="after")]
    headers += [] if narrow else [Column(header="MFU before"), Column(header="after")]
    return Sheet(
        columns=(text_column("row"), *headers),
        rows=tuple(_pair_cells(paired, pair, narrow=narrow) for pair in paired.pairs),
    )


def _pair_cells(paired: Paired, pair: Pair, *, narrow: bool) -> tuple[Cell, ...]:
    unit = results_unit(paired.before)
    both = (pair.before, pair.after)
    speeds = [_figure(row, row["tokens_per_second"]) for row in both]
    cells = [text_cell(pair.name), *speeds, number_cell(pair.ratio, 3)]
    cells += [] if narrow else [interval_cell(pair.ratio_interval, lambda bound: f"{bound:.3f}")]
    cells.append(text_cell(pair.verdict or NOT_AVAILABLE))
    peaks = (facts.peak_bytes(paired.before, pair.before), facts.peak_bytes(paired.after, pair.after))
    cells += [unit.cell(peak) for peak in peaks]
    cells += [number_cell(row["last_loss"] if facts.finished(row) else None, 4) for row in both]
    if not narrow:
        cells += [measured(row["mfu"], tenths) for row in both]
    return tuple(cells)


def _figure(row: Row, value: float | None) -> Cell:
    """A speed, or why there is none."""
    if value is None or not facts.finished(row) or not math.isfinite(value):
        return Cell(text=facts.status_text(row) if facts.status_text(row) != "completed" else NOT_AVAILABLE)
    return measured(value, speed)


def environment_sheet(paired: Paired) -> Sheet:
    """What differs around the rows."""
    return Sheet(
        columns=(text_column("what differs"), text_column("before"), text_column("after")),
        rows=tuple(cast(tuple[Cell, ...], tuple(text_cell(word) for word in line)) for line in paired.environment),
    )
