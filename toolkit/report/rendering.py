"""Tables as text, and reports from templates: HTML that makes no request, and Markdown for a pull request.

Nothing in the values is trusted. Each is reduced to one printable line and escaped when a template writes it; the
filters `lines`, `breakable` and `code` do the same for what is not one line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from toolkit.errors import ToolkitError
from toolkit.files import write_bytes
from toolkit.report.charts import CSS_VARIABLES
from toolkit.units import NOT_AVAILABLE, seconds

TEMPLATES = Path(__file__).parent / "templates"
# Values of a status or parity cell that are not shown in red.
NO_ALARM = ("completed", "reference", "agrees", "not_supported", NOT_AVAILABLE)


def render(template: str, **values: Any) -> str:
    """Return a template with its values; `title` and `summary` are required by every template."""
    return _environment(markdown=template.endswith(".md.j2")).get_template(template).render(**values)


def write_report_file(file: Path, content: str) -> Path:
    """Write a file completely, unencodable text as `?`. Raises ToolkitError for a folder that cannot be written."""
    try:
        write_bytes(file, content.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ToolkitError(f"cannot write {file}: {error.strerror}", hint="name another folder") from error
    return file


@functools.cache
def _environment(*, markdown: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_markdown_value if markdown else _html_value,
        keep_trailing_newline=markdown,
    )
    environment.filters.update(
        code=_code, lines=lambda text: Markup("\n").join(many_lines(text)), breakable=_breakable, seconds=seconds
    )
    environment.globals.update(
        style=Markup((TEMPLATES / "page.css").read_text("utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text("utf-8")),
        css_variables=CSS_VARIABLES,
        no_alarm=NO_ALARM,
    )
    return environment


def _html_value(value: object) -> object:
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(text: str) -> Markup:
    return Markup(escape(one_line(text)).replace("_", Markup("_<wbr>")))


def _markdown_value(value: object) -> object:
    """One line from which no Markdown, table or HTML can break out."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(re.sub(r"([\\|`*\[\]])", r"\\\1", text))


def _code(text: str, language: str) -> Markup:
    """A block with a fence longer than any run of backticks inside it."""
    lines = many_lines(text)
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup("\n".join([f"{fence}{language}", *lines, fence]))


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

    @property
    def has_figures(self) -> bool:
        """True if a column is not of words."""
        return any(heading.numeric for heading in self.headings)

    def without_unknown_columns(self) -> Table:
        """Return the table without columns of figures in which every row is unknown."""
        return self.with_columns(
            [
                index
                for index, heading in enumerate(self.headings)
                if not heading.numeric or any(row[index] != UNKNOWN for row in self.rows)
            ]
        )

    def with_columns(self, indices: Sequence[int]) -> Table:
        """Return the table with some of its columns."""
        rows = tuple(tuple(row[index] for index in indices) for row in self.rows)
        return Table(headings=tuple(self.headings[index] for index in indices), rows=rows)


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
