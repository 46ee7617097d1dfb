"""Show a comparison on a terminal: legible at 100 columns, and without colour.

>>> rich.print(console_table(results))                   # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.compare.report import facts
from toolkit.compare.report.cells import Column, Sheet
from toolkit.compare.report.sheets import comparison_sheet
from toolkit.compare.results import Results

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

# Two lines of a terminal: the whole message is in report.md.
MESSAGE_CHARACTERS = 180


def console_table(results: Results) -> Table:
    """One line a row, in the order given; below it, why a row has no ratio."""
    from rich.text import Text

    results = facts.honest(results)
    table = sheet_table(comparison_sheet(results, narrow=True))
    table.caption, table.caption_justify = Text("\n".join(_reasons(results)), style=""), "left"
    return table


def sheet_table(sheet: Sheet) -> Table:
    """A sheet as lines without colour."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in sheet.columns:
        _add_column(table, column)
    for cells in sheet.rows:
        table.add_row(*(Text(cell.text) for cell in cells))
    return table


def _add_column(table: Table, column: Column) -> None:
    from rich.text import Text

    side: JustifyMethod = "right" if column.numeric else "left"
    table.add_column(Text(column.header), justify=side, no_wrap=column.numeric, overflow="fold")


def _reasons(results: Results) -> list[str]:
    """A line for each row that failed or that trained something else."""
    rows = zip(facts.labels(results), results["rows"], strict=True)
    return [
        facts.one_line(f"{label}: {facts.status_text(row)}: {reason or 'no message'}", MESSAGE_CHARACTERS)
        for label, row in rows
        if (reason := facts.reason(row)) is not None
    ]
