"""Report two comparisons of one job side by side: before and after an upgrade, or on two nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.compare.result_tables import bytes_cell, format_cell, make_table, results_unit
from toolkit.compare.results import Environment, Results
from toolkit.compare.rows import Difference, Row
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
    def ratio_interval(self) -> Interval | None:
        """From the ends of both speeds' intervals, so wider than a 95 % confidence interval."""
        old, new = self.before.tokens_per_second_interval, self.after.tokens_per_second_interval
        if self.ratio is None or not old or not new or not old[0]:
            return None
        return new[0] / old[1], new[1] / old[0]

    @property
    def verdict(self) -> Difference | None:
        """The claim that the ratio's interval supports; None without an interval."""
        return difference(self.ratio_interval)


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
    def summary(self) -> str:
        """The rows that became faster or slower, claimed only where the ratio's interval excludes 1."""
        if not self.pairs:
            return "No row is in both comparisons."
        changes = []
        for word in ("faster", "slower"):
            named = [f"{pair.name}: {pair.ratio:.2f}" for pair in self.pairs if pair.verdict == word]
            changes.append(f"{len(named)} became {word}" + (f" ({', '.join(named)})" if named else ""))
        unseen = sum(pair.verdict == "no difference seen" for pair in self.pairs)
        changes.append(f"no difference is seen in {unseen}")
        compared = f"Of {len(self.pairs)} rows in both, {', '.join(changes)}"
        clauses = [compared if any(pair.verdict for pair in self.pairs) else f"{len(self.pairs)} rows are in both"]
        single = [pair.name for pair in self.pairs if pair.verdict is None and pair.ratio is not None]
        if single:
            clauses.append(f"nothing is claimed of {len(single)} single runs ({', '.join(single)})")
        clauses += [
            f"{pair.name}: {pair.before.status_text} before, {pair.after.status_text} after"
            for pair in self.pairs
            if pair.before.status_text != pair.after.status_text
        ]
        lonely = {"before": self.only_before, "after": self.only_after}
        clauses += [f"only {when}: {', '.join(names)}" for when, names in lonely.items() if names]
        return "; ".join(clauses) + "."

    def table(self) -> Table:
        """Return each row's figures before and after, and the ratio of the speeds."""
        unit = results_unit(self.before)
        headings = ["row", "tokens/s\nbefore", "after", "ratio", "interval", "verdict", f"peak {unit.name}\nbefore"]
        headings += ["after", "last loss\nbefore", "after"]
        rows = [
            [
                text_cell(pair.name),
                _speed_cell(pair.before),
                _speed_cell(pair.after),
                number_cell(pair.ratio, 3),
                format_cell(pair.ratio_interval, RATIO_INTERVAL, unit),
                text_cell(pair.verdict or NOT_AVAILABLE),
                bytes_cell(self.before.peak_bytes(pair.before), unit),
                bytes_cell(self.after.peak_bytes(pair.after), unit),
                *(number_cell(row.last_loss if row.completed else None, 4) for row in (pair.before, pair.after)),
            ]
            for pair in self.pairs
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
    old, new = ({row.key: row for row in results.rows} for results in (before, after))
    return BeforeAndAfter(
        before=before,
        after=after,
        pairs=tuple(RowPair(before=old[key], after=new[key]) for key in old if key in new),
        only_before=tuple(row.trial for key, row in old.items() if key not in new),
        only_after=tuple(row.trial for key, row in new.items() if key not in old),
        environment=tuple(_differences(_environment(before.environment), _environment(after.environment))),
    )


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
