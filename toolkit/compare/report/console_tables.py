"""Show a comparison on a terminal: legible at 100 columns, and without color."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.compare.report.result_tables import comparison_table
from toolkit.compare.report.table_model import Table, one_line
from toolkit.compare.results import Results

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# Two lines of a terminal: the complete message is in report.md.
MESSAGE_CHARACTERS = 180


def console_table(results: Results) -> RichTable:
    """Return one line per row, in the order given; below them, why a row has no ratio."""
    from rich.text import Text

    table = rich_table(comparison_table(results, narrow=True))
    table.caption, table.caption_justify = Text("\n".join(_reasons(results)), style=""), "left"
    return table


def rich_table(table: Table) -> RichTable:
    """Return a table as lines without color."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in table.headings:
        numeric = heading.numeric
        side = "right" if numeric else "left"
        shown.add_column(Text(heading.text), justify=side, no_wrap=numeric, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        shown.add_row(*(Text(cell.text) for cell in row))
    return shown


def _reasons(results: Results) -> list[str]:
    """A line for each row that failed or that trained another problem."""
    reasons = [
        (label, row, row.parity_message if row.failed_parity else row.message)
        for label, row in results.labelled_rows
        if row.failed_parity or not row.completed
    ]
    return [
        one_line(f"{label}: {row.status_text}: {reason or 'no message'}", MESSAGE_CHARACTERS)
        for label, row, reason in reasons
    ]
