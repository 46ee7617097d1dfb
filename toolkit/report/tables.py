"""Tables as text, before the console, Markdown or HTML, and the texts in them: one line, nothing unprintable."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from toolkit.units import NOT_AVAILABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The text of a cell, and the number that it is sorted by: None for words and unknowns."""

    text: str
    value: float | None = None


UNKNOWN = Cell(text=NOT_AVAILABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """The heading of a column; the console breaks it at its line feeds."""

    text: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Headings and rows; the first column names the row."""

    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def without_unknown_columns(self) -> Table | None:
        """Return the table without numeric columns in which no row has a value; None where none is left."""
        kept = [
            index
            for index, heading in enumerate(self.headings)
            if not heading.numeric or any(row[index].value is not None for row in self.rows)
        ]
        if not any(self.headings[index].numeric for index in kept):
            return None
        return Table(
            headings=tuple(self.headings[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
        )


def text_heading(text: str) -> Heading:
    """Return the heading of a column of words, aligned left."""
    return Heading(text=text, numeric=False)


def text_cell(text: str) -> Cell:
    """Return words on one line, wherever they came from."""
    return Cell(text=one_line(text))


def number_cell(value: float | None, digits: int) -> Cell:
    """Return a number with this many digits after the point."""
    return UNKNOWN if value is None else Cell(text=f"{value:,.{digits}f}", value=value)


def rich_table(table: Table) -> RichTable:
    """Return a table for the console: lines without color."""
    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in table.headings:
        numeric = heading.numeric
        shown.add_column(Text(heading.text), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell.text) for cell in row))
    return shown


def one_line(text: str | None, limit: int | None = None) -> str:
    """Return text without line breaks, with control characters made visible, shortened to `limit` characters.

    >>> one_line("CUDA out\\nof memory", limit=12), one_line("\\x1b[2J")
    ('CUDA out of…', '\\\\x1b[2J')
    """
    line = " ".join(_visible(text or "").split())
    return line if limit is None or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def many_lines(text: str) -> list[str]:
    """Return the lines of a text with control characters made visible, without blank lines and trailing blanks."""
    lines = [_visible(line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


def _visible(text: str) -> str:
    """No terminal acts on the text, and no reader is misled by characters that reverse it."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else char.encode("unicode_escape").decode()
        for char in text
    )
