"""Report two comparisons of one job side by side: before and after an upgrade, or on two nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.compare.result_tables import bytes_cell, format_cell, make_table, results_unit
from toolkit.compare.results import Environment, Results
from toolkit.compare.rows import Row
from toolkit.compare.significance import difference
from toolkit.errors import ToolkitError
from toolkit.record.columns import Column, Interval
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Cell, Table, number_cell, text_cell, text_heading
from toolkit.units import NOT_AVAILABLE, fixed, interval, speed

FILE_NAME = "before-and-after"
RATIO_INTERVAL = Column("interval", interval(fixed(3)))
NOTES = (
    "A ratio above 1: faster after. Its interval comes from the intervals of both speeds, so it is wider than theirs.",
    "The two were measured at different times: what else changed on the node is part of the difference.",
)


def ratio(before: Row, after: Row) -> float | None:
    """Return the speed after over the speed before; None unless both completed and trained the baseline's problem."""
    old, new = before.tokens_per_second, after.tokens_per_second
    return new / old if before.completed and after.completed and old and new else None


def ratio_interval(before: Row, after: Row) -> Interval | None:
    """Return its interval, from the ends of both speeds' intervals, so wider than a 95 % confidence interval."""
    old, new = before.tokens_per_second_interval, after.tokens_per_second_interval
    if ratio(before, after) is None or not old or not new or not old[0]:
        return None
    return new[0] / old[1], new[1] / old[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAndAfter:
    """Two comparisons of one job."""

    before: Results
    after: Results
    environment: Sequence[tuple[str, str, str]]
    """Name, value before, value after of what differs."""

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        """The rows that are in both."""
        after = {row.key: row for row in self.after.rows}
        return [(row, after[row.key]) for row in self.before.rows if row.key in after]

    @property
    def summary(self) -> str:
        """The rows that became faster or slower, claimed only where the ratio's interval excludes 1."""
        pairs = self.pairs
        if not pairs:
            return "No row is in both comparisons."
        claims = {before.trial: difference(ratio_interval(before, after)) for before, after in pairs}
        ratios = {before.trial: ratio(before, after) for before, after in pairs}
        changes = []
        for word in ("faster", "slower"):
            named = [f"{name}: {ratios[name]:.2f}" for name, claim in claims.items() if claim == word]
            changes.append(f"{len(named)} became {word}" + (f" ({', '.join(named)})" if named else ""))
        changes.append(f"no difference is seen in {list(claims.values()).count('no difference seen')}")
        compared = f"Of {len(pairs)} rows in both, {', '.join(changes)}"
        clauses = [compared if any(claims.values()) else f"{len(pairs)} rows are in both"]
        single = [name for name, claim in claims.items() if claim is None and ratios[name] is not None]
        if single:
            clauses.append(f"nothing is claimed of {len(single)} single runs ({', '.join(single)})")
        clauses += [
            f"{before.trial}: {before.status_text} before, {after.status_text} after"
            for before, after in pairs
            if before.status_text != after.status_text
        ]
        both = {before.key for before, _ in pairs}
        for when, results in {"before": self.before, "after": self.after}.items():
            lonely = [row.trial for row in results.rows if row.key not in both]
            clauses += [f"only {when}: {', '.join(lonely)}"] if lonely else []
        return "; ".join(clauses) + "."

    def table(self) -> Table:
        """Return each row's figures before and after, and the ratio of the speeds."""
        unit = results_unit(self.before)
        headings = ["row", "tokens/s\nbefore", "after", "ratio", "interval", "verdict", f"peak {unit.name}\nbefore"]
        headings += ["after", "last loss\nbefore", "after"]
        rows = [
            [
                text_cell(before.trial),
                _speed_cell(before),
                _speed_cell(after),
                number_cell(ratio(before, after), 3),
                format_cell(ratio_interval(before, after), RATIO_INTERVAL, unit),
                text_cell(difference(ratio_interval(before, after)) or NOT_AVAILABLE),
                bytes_cell(self.before.peak_bytes(before), unit),
                bytes_cell(self.after.peak_bytes(after), unit),
                *(number_cell(row.last_loss if row.completed else None, 4) for row in (before, after)),
            ]
            for before, after in self.pairs
        ]
        return make_table(headings, rows)

    def rendered(self, suffix: str) -> str:
        """Return the report as Markdown (`md`) or as a self-contained page (`html`)."""
        dates = [results.created.replace("T", " ")[:16] for results in (self.before, self.after)]
        headings = tuple(map(text_heading, ("what differs", "before", "after")))
        differences = Table(headings=headings, rows=tuple(tuple(map(text_cell, line)) for line in self.environment))
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
    return BeforeAndAfter(before=before, after=after, environment=environment)


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Name, value before and value after of what differs."""
    values = {name: [each.get(name) for each in (old, new)] for name in {**old, **new}}
    texts = {name: [NOT_AVAILABLE if value is None else str(value) for value in both] for name, both in values.items()}
    return [(name, before, after) for name, (before, after) in texts.items() if before != after]


def _job(results: Results) -> dict[str, object]:
    """Models and data by the last part of their path: the same files may be in another folder."""

    def last_part(path: str) -> str:
        return path.rstrip("/").rpartition("/")[2] or path

    job = results.job
    return job.model_dump(exclude={"model", "dataset", "training_arguments"}) | {
        "model": last_part(job.model),
        "dataset": ", ".join(map(last_part, job.dataset.split(", "))),
        "training arguments": " ".join(map(last_part, job.training_arguments)),
    }


def _environment(environment: Environment) -> dict[str, object]:
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver or NOT_AVAILABLE})" for gpu in environment.gpus)
    rest = environment.model_dump(exclude={"gpus", "versions", "disk"})  # free space always differs
    return {"gpus": gpus, **rest, **dict(sorted(environment.versions.items()))}


def _speed_cell(row: Row) -> Cell:
    """A speed, or why there is none."""
    if row.tokens_per_second is None or not row.completed:
        return Cell(text=row.status_text if row.status_text != "completed" else NOT_AVAILABLE)
    return Cell(text=speed(row.tokens_per_second), value=row.tokens_per_second)
