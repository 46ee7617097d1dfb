"""The report of a simulation: the same tables and notes in the terminal and on a page, which also has charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from toolkit.report.charts import Chart
from toolkit.report.rendering import Cell, Heading, Table, render, rich_table

OF_WORDS = ("", "schedule", "stage", "policy", "verdict")  # headings of columns that are not of numbers


def table_of(rows: Sequence[Mapping[str, Cell]]) -> Table:
    """Return a table of rows, each with the same headings."""
    headings = tuple(Heading(text=text, numeric=text not in OF_WORDS) for text in rows[0])
    return Table(headings=headings, rows=tuple(tuple(row.values()) for row in rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Summary, results and notes of one simulation."""

    title: str
    summary: str
    sections: list[tuple[str, Table | Chart | str]]  # heading or "", and a table, a chart on a page, or a text timeline
    notes: list[str]  # what a reader must know before quoting a figure

    def print(self) -> None:
        """Print it as text."""
        console = Console(width=max(Console().width, 104))  # that of a model's stages, whose names stay whole
        print(self.summary)
        for heading, content in self.sections:
            if heading and isinstance(content, Table | str):
                print(f"\n{heading}:")
            if isinstance(content, str):
                print(content)
            elif isinstance(content, Table):
                console.print(rich_table(content))
        print("", *self.notes, sep="\n")

    def page(self) -> str:
        """Return it as a self-contained page of HTML."""
        summary = self.summary.replace("\n", "; ")
        return render("simulation.html.j2", title=self.title, summary=summary, sections=self.sections, notes=self.notes)
