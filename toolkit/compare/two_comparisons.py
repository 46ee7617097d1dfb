"""Report two comparisons of one job side by side: before and after an upgrade, or on two nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.compare.results import Environment, Results
from toolkit.compare.rows import Difference, Row
from toolkit.compare.significance import difference, quotient
from toolkit.compare.tables_and_charts import bytes_cell, format_cell, make_table, results_unit
from toolkit.errors import ToolkitError
from toolkit.record.columns import Column, Interval
from toolkit.report.rendering import Cell, Table, number_cell, render, text_cell, write_report_file
from toolkit.units import NOT_AVAILABLE, fixed, interval, speed

FILE_NAME = "before-and-after"
RATIO_INTERVAL = Column("interval", interval(fixed(3)))
NOTES = (
    "A ratio above 1: faster after. Its interval comes from the intervals of both speeds, so it is wider than theirs.",
    "The two were measured at different times: what else changed on the node is part of the difference.",
)


class RowPair(NamedTuple):
    """A row that is in both comparisons, with what its speeds allow to be claimed."""

    before: Row
    after: Row
    ratio: float | None  # speed after over speed before; None unless both completed and trained the baseline's problem
    interval: Interval | None  # from the ends of both speeds' intervals, so wider than a 95 % confidence interval
    claim: Difference | None

    @classmethod
    def of(cls, before: Row, after: Row) -> RowPair:
        old, new = (row.tokens_per_second if row.completed else None for row in (before, after))
        ratio, interval = new / old if old and new else None, None
        old_ends, new_ends = before.tokens_per_second_interval, after.tokens_per_second_interval
        if ratio is not None and old_ends and new_ends and old_ends[0]:
            interval = quotient(new_ends, old_ends)
        return cls(before, after, ratio, interval, difference(interval))


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAndAfter:
    """Two comparisons of one job."""

    before: Results
    after: Results
    environment: Sequence[tuple[str, str, str]]  # name, value before, value after of what differs

    @property
    def pairs(self) -> list[RowPair]:
        after = {row.key: row for row in self.after.rows}
        return [RowPair.of(row, after[row.key]) for row in self.before.rows if row.key in after]

    @property
    def summary(self) -> str:
        """The rows that became faster or slower, claimed only where the ratio's interval excludes 1."""
        pairs = self.pairs
        if not pairs:
            return "No row is in both comparisons."
        changes = []
        for word in ("faster", "slower"):
            named = [f"{pair.before.trial}: {pair.ratio:.2f}" for pair in pairs if pair.claim == word]
            changes.append(f"{len(named)} became {word}" + (f" ({', '.join(named)})" if named else ""))
        changes.append(f"no difference is seen in {sum(pair.claim == 'no difference seen' for pair in pairs)}")
        compared = f"Of {len(pairs)} rows in both, {', '.join(changes)}"
        clauses = [compared if any(pair.claim for pair in pairs) else f"{len(pairs)} rows are in both"]
        single = [pair.before.trial for pair in pairs if pair.claim is None and pair.ratio is not None]
        if single:
            clauses.append(f"nothing is claimed of {len(single)} single runs ({', '.join(single)})")
        clauses += [
            f"{before.trial}: {before.status_text} before, {after.status_text} after"
            for before, after, *_ in pairs
            if before.status_text != after.status_text
        ]
        both = {pair.before.key for pair in pairs}
        for when, results in {"before": self.before, "after": self.after}.items():
            lonely = [row.trial for row in results.rows if row.key not in both]
            clauses += [f"only {when}: {', '.join(lonely)}"] if lonely else []
        return "; ".join(clauses) + "."

    def table(self) -> Table:
        """Return each row's figures before and after, and the ratio of the speeds."""
        unit = results_unit(self.before)
        headings = ["row", "tokens/s\nbefore", "after", "ratio", "interval", "verdict", f"peak {unit.name}\nbefore"]
        rows = [
            [
                text_cell(pair.before.trial),
                *map(_speed_cell, pair[:2]),
                number_cell(pair.ratio, 3),
                format_cell(pair.interval, RATIO_INTERVAL, unit),
                text_cell(pair.claim or NOT_AVAILABLE),
                bytes_cell(self.before.peak_bytes(pair.before), unit),
                bytes_cell(self.after.peak_bytes(pair.after), unit),
                *(number_cell(row.last_loss if row.completed else None, 4) for row in pair[:2]),
            ]
            for pair in self.pairs
        ]
        return make_table([*headings, "after", "last loss\nbefore", "after"], rows)

    def rendered(self, suffix: str) -> str:
        """Return the report as Markdown (`md`) or as a self-contained page (`html`)."""
        dates = [results.created.replace("T", " ")[:16] for results in (self.before, self.after)]
        names = ("what differs", "before", "after")
        differences = make_table(names, [tuple(map(text_cell, line)) for line in self.environment], words=names)
        return render(
            f"before_and_after.{suffix}.j2",
            title=f"Before and after: {' and '.join(dates)}",
            summary=self.summary,
            rows=self.table(),
            notes=NOTES,
            environment=differences if self.environment else None,
        )

    def write(self, folder: Path) -> list[Path]:
        """Write Markdown and HTML into a folder; return their paths."""
        return [write_report_file(folder / f"{FILE_NAME}.{kind}", self.rendered(kind)) for kind in ("md", "html")]


def before_and_after(before: Results, after: Results) -> BeforeAndAfter:
    """Pair the rows of two comparisons. Raises ToolkitError where the jobs differ, with what differs."""
    if different := _differences(_job(before), _job(after)):
        values = "; ".join(f"{name} {old} and {new}" for name, old, new in different)
        raise ToolkitError(
            f"the two comparisons do not train the same job: {values}",
            hint="compare the same job again; `toolkit report DIR` reports each alone",
        )
    environment = _differences(_environment(before.environment), _environment(after.environment))
    return BeforeAndAfter(before=before.as_reported(), after=after.as_reported(), environment=environment)


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str, str]]:
    texts = [
        (name, *(NOT_AVAILABLE if each.get(name) is None else str(each[name]) for each in (old, new)))
        for name in {**old, **new}
    ]
    return [(name, before, after) for name, before, after in texts if before != after]


def _job(results: Results) -> dict[str, object]:
    """Models and data by the last part of their path: the same files may be in another folder."""

    def last_part(path: str) -> str:
        return path.rstrip("/").rpartition("/")[2] or path

    job = results.job
    return job.model_dump(exclude={"model", "dataset", "script", "training_arguments"}) | {
        "script": job.script and last_part(job.script),
        "model": job.model and last_part(job.model),
        "dataset": job.dataset and ", ".join(map(last_part, job.dataset.split(", "))),
        "training arguments": " ".join(map(last_part, job.training_arguments)),
    }


def _environment(environment: Environment) -> dict[str, object]:
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver or NOT_AVAILABLE})" for gpu in environment.gpus)
    rest = environment.model_dump(exclude={"gpus", "versions", "disk"})  # free space always differs
    return {"gpus": gpus, **rest, **dict(sorted(environment.versions.items()))}


def _speed_cell(row: Row) -> Cell:
    if row.has_speed:
        return Cell(text=speed(row.tokens_per_second), value=row.tokens_per_second)
    return Cell(text=NOT_AVAILABLE if row.status_text == "completed" else row.status_text)
