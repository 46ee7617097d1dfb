"""Report two comparisons of one job side by side: before and after an upgrade, or on two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.compare.result_tables import bytes_cell, format_cell, results_unit
from toolkit.compare.results import Environment, Results
from toolkit.compare.rows import Difference, Row, RowKey
from toolkit.errors import ToolkitError
from toolkit.record.columns import Column, column_of
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Cell, Heading, Table, number_cell, rich_table, text_cell, text_heading
from toolkit.units import NOT_AVAILABLE, fixed, interval, speed

if TYPE_CHECKING:
    from rich.table import Table as RichTable

FILE_NAME = "before-and-after"
NOTES = (
    "A ratio above 1: faster after. Its interval comes from the intervals of both speeds, so it is wider than theirs.",
    "The two were measured at different times: what else changed on the node is part of the difference.",
)
RATIO_INTERVAL = Column("interval", interval(fixed(3)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPair:
    """One row of both comparisons."""

    before: Row
    after: Row

    @property
    def name(self) -> str:
        """The row's name."""
        return self.before.trial

    @property
    def ratio(self) -> float | None:
        """Speed after over speed before; None unless both completed and trained the baseline's problem."""
        old, new = self.before.tokens_per_second, self.after.tokens_per_second
        return new / old if self.before.completed and self.after.completed and old and new else None

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """From the ends of both speeds' intervals, so wider than a 95 % confidence interval."""
        old, new = self.before.tokens_per_second_interval, self.after.tokens_per_second_interval
        if self.ratio is None or not old or not new or not old[0]:
            return None
        return new[0] / old[1], new[1] / old[0]

    @property
    def difference(self) -> Difference | None:
        """The claim that the ratio's interval supports; None without an interval."""
        if self.ratio_interval is None:
            return None
        low, high = self.ratio_interval
        return "faster" if low > 1 else "slower" if high < 1 else "no difference seen"


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAndAfter:
    """Two comparisons: rows in both, rows in one, and what differs in the environment."""

    before: Results
    after: Results
    pairs: tuple[RowPair, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    environment: tuple[tuple[str, str, str], ...]
    """Name, value before, value after of what differs."""

    @property
    def title(self) -> str:
        """When each was made."""
        dates = [results.created.replace("T", " ")[:16] for results in (self.before, self.after)]
        return f"Before and after: {' and '.join(dates)}"

    @property
    def summary(self) -> str:
        """The rows that became faster or slower, claimed only where the ratio's interval excludes 1."""
        if not self.pairs:
            return "No row is in both comparisons."
        compared = [pair for pair in self.pairs if pair.difference is not None]
        single = [pair.name for pair in self.pairs if pair.difference is None and pair.ratio is not None]
        clauses = [_differences(compared, len(self.pairs)) if compared else f"{len(self.pairs)} rows are in both"]
        if single:
            which = f" ({', '.join(single)})" if compared else ""
            clauses.append(f"{len(single)} of single runs, about which nothing is claimed{which}")
        clauses += [
            f"{pair.name}: {pair.before.status_text} before, {pair.after.status_text} after"
            for pair in self.pairs
            if pair.before.status_text != pair.after.status_text
        ]
        clauses += [f"only before: {', '.join(self.only_before)}"] * bool(self.only_before)
        clauses += [f"only after: {', '.join(self.only_after)}"] * bool(self.only_after)
        return "; ".join(clauses) + "."

    def table(self, *, narrow: bool = False) -> Table:
        """Return each row's figures before and after, and the ratio of the speeds; `narrow` for a terminal."""
        unit = results_unit(self.before).name
        headings = [Heading(text="tokens/s\nbefore"), Heading(text="after"), Heading(text="ratio")]
        headings += [] if narrow else [Heading(text="interval")]
        headings += [text_heading("difference"), Heading(text=f"peak {unit}\nbefore"), Heading(text="after")]
        headings += [Heading(text="last loss\nbefore"), Heading(text="after")]
        headings += [] if narrow else [Heading(text="MFU before"), Heading(text="after")]
        return Table(
            headings=(text_heading("row"), *headings),
            rows=tuple(self._cells(pair, narrow=narrow) for pair in self.pairs),
        )

    def environment_table(self) -> Table | None:
        """Return what differs in the environment; None where nothing does."""
        if not self.environment:
            return None
        return Table(
            headings=(text_heading("what differs"), text_heading("before"), text_heading("after")),
            rows=tuple(tuple(text_cell(word) for word in line) for line in self.environment),
        )

    def rich_table(self) -> RichTable:
        """Return the table for a terminal of 100 columns."""
        return rich_table(self.table(narrow=True))

    def markdown(self) -> str:
        """Return the report as Markdown."""
        return self._rendered("before_and_after.md.j2")

    def html(self) -> str:
        """Return the report as a self-contained page."""
        return self._rendered("before_and_after.html.j2")

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write Markdown and HTML into a folder; return their paths."""
        return (
            write_report_file(folder / f"{FILE_NAME}.md", self.markdown()),
            write_report_file(folder / f"{FILE_NAME}.html", self.html()),
        )

    def _rendered(self, template: str) -> str:
        return render(
            template,
            title=self.title,
            summary=self.summary,
            rows=self.table(),
            notes=NOTES,
            environment=self.environment_table(),
        )

    def _cells(self, pair: RowPair, *, narrow: bool) -> tuple[Cell, ...]:
        unit, mfu = results_unit(self.before), column_of(Row, "mfu")
        cells = [text_cell(pair.name), _speed_cell(pair.before), _speed_cell(pair.after), number_cell(pair.ratio, 3)]
        cells += [] if narrow else [format_cell(pair.ratio_interval, RATIO_INTERVAL, unit)]
        cells.append(text_cell(pair.difference or NOT_AVAILABLE))
        cells += [bytes_cell(results.peak_bytes(row), unit) for results, row in self._both(pair)]
        cells += [number_cell(row.last_loss if row.completed else None, 4) for _, row in self._both(pair)]
        cells += [] if narrow else [format_cell(row.mfu, mfu, unit) for _, row in self._both(pair)]
        return tuple(cells)

    def _both(self, pair: RowPair) -> tuple[tuple[Results, Row], tuple[Results, Row]]:
        return (self.before, pair.before), (self.after, pair.after)


def before_and_after(before: Results, after: Results) -> BeforeAndAfter:
    """Pair the rows of two comparisons. Raises ToolkitError where the jobs differ, with what differs."""
    if different := job_differences(before, after):
        values = "; ".join(f"{name} {old} and {new}" for name, old, new in different)
        raise ToolkitError(
            f"the two comparisons do not train the same job: {values}",
            hint="compare the same job again; `toolkit report DIR` reports each alone",
        )
    old: dict[RowKey, Row] = {row.key: row for row in before.rows}
    new: dict[RowKey, Row] = {row.key: row for row in after.rows}
    return BeforeAndAfter(
        before=before,
        after=after,
        pairs=tuple(RowPair(before=old[key], after=new[key]) for key in old if key in new),
        only_before=tuple(row.trial for key, row in old.items() if key not in new),
        only_after=tuple(row.trial for key, row in new.items() if key not in old),
        environment=tuple(environment_differences(before.environment, after.environment)),
    )


def job_differences(before: Results, after: Results) -> list[tuple[str, str, str]]:
    """Return name, value before and value after of what differs between the jobs.

    Models and data are compared by the last part of their path: the same files may be in another folder.
    """
    old, new = _job(before), _job(after)
    return [(key, str(old.get(key)), str(new.get(key))) for key in {**old, **new} if old.get(key) != new.get(key)]


def _job(results: Results) -> dict[str, object]:
    values = results.job.model_dump(exclude={"model", "dataset", "training_arguments"})
    arguments = " ".join(_last_part(word) for word in results.job.training_arguments)
    data = ", ".join(map(_last_part, results.job.dataset.split(", ")))
    paths = {"model": _last_part(results.job.model), "dataset": data}
    return values | paths | {"training arguments": arguments}


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def environment_differences(before: Environment, after: Environment) -> list[tuple[str, str, str]]:
    """Return name, value before and value after of what differs between the nodes and versions."""
    old, new = _flat(before), _flat(after)
    names = [*old, *(name for name in new if name not in old)]
    shown = [(name, old.get(name, NOT_AVAILABLE), new.get(name, NOT_AVAILABLE)) for name in names]
    return [difference for difference in shown if difference[1] != difference[2]]


def _flat(environment: Environment) -> dict[str, str]:
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver or NOT_AVAILABLE})" for gpu in environment.gpus)
    rest: dict[str, Any] = environment.model_dump(exclude={"gpus", "versions", "disk"})  # free space always differs
    values = {key: NOT_AVAILABLE if value is None else str(value) for key, value in rest.items()}
    return {"gpus": gpus, **values, **dict(sorted(environment.versions.items()))}


def _differences(pairs: Sequence[RowPair], num_rows: int) -> str:
    changed = {word: [pair for pair in pairs if pair.difference == word] for word in ("faster", "slower")}
    parts = [f"{len(found)} became {word}{_named(found)}" for word, found in changed.items()]
    unseen = sum(pair.difference == "no difference seen" for pair in pairs)
    return f"Of {num_rows} rows in both, {', '.join(parts)}, no difference is seen in {unseen}"


def _named(pairs: Sequence[RowPair]) -> str:
    return f" ({', '.join(f'{pair.name}: {pair.ratio:.2f}' for pair in pairs)})" if pairs else ""


def _speed_cell(row: Row) -> Cell:
    """A speed, or why there is none."""
    if row.tokens_per_second is None or not row.completed:
        return Cell(text=row.status_text if row.status_text != "completed" else NOT_AVAILABLE)
    return Cell(text=speed(row.tokens_per_second), value=row.tokens_per_second)
