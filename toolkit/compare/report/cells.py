"""Cells of a table, before any of console, Markdown or HTML.

>>> ByteUnit(name="MiB", num_bytes=2**20).cell(3 * 2**20).text
'3.0'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from toolkit.compare.report.facts import one_line
from toolkit.units import GIB, MIB, NOT_AVAILABLE, number

# From here on the largest size of a table reads better in GiB than in MiB.
GIB_FROM_BYTES = 10 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is shown, and the number it is sorted by (None: it is text, or unknown)."""

    text: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A heading; the console breaks it at the line feed, the other pages at their leisure."""

    header: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """Rows in the order that the results give them, one cell a column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def known_columns(sheet: Sheet) -> Sheet | None:
    """The sheet without columns of figures that no row has; None where no figure is left."""
    kept = [
        index
        for index, column in enumerate(sheet.columns)
        if not column.numeric or any(row[index].value is not None for row in sheet.rows)
    ]
    if not any(sheet.columns[index].numeric for index in kept):
        return None
    return Sheet(
        columns=tuple(sheet.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in sheet.rows),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteUnit:
    """One unit for every size of a table, so that a column can be compared at a glance."""

    name: str
    num_bytes: int

    @property
    def smallest(self) -> float:
        """The smallest size that is written as a number."""
        return 0.1 if self.num_bytes == MIB else 0.01

    def cell(self, size: int | None) -> Cell:
        """A size in this unit; a size that would round to zero says that it is not."""
        if size is None:
            return Cell(text=NOT_AVAILABLE)
        in_unit = size / self.num_bytes
        if 0 < in_unit < self.smallest:
            return Cell(text=f"<{self.smallest:g}", value=size)
        digits = 0 if in_unit >= 1000 else 1 if in_unit >= 100 or self.num_bytes == MIB else 2
        return Cell(text=number(in_unit, digits), value=size)


def byte_unit(sizes: Iterable[int | None]) -> ByteUnit:
    """GiB when the largest size is tens of GiB, or MiB."""
    largest = max((size for size in sizes if size is not None), default=0)
    return ByteUnit(name="GiB", num_bytes=GIB) if largest >= GIB_FROM_BYTES else ByteUnit(name="MiB", num_bytes=MIB)


def speed(tokens_per_second: float | None) -> str:
    """Three significant digits or more: 4,102 and 41.0 and 4.10."""
    if tokens_per_second is None:
        return NOT_AVAILABLE
    return number(tokens_per_second, 0 if tokens_per_second >= 100 else 1 if tokens_per_second >= 10 else 2)


def percent(fraction: float | None) -> str:
    """A fraction as a whole percentage."""
    return NOT_AVAILABLE if fraction is None else f"{100 * fraction:.0f} %"


def tenths(fraction: float | None) -> str:
    """A fraction as a percentage with one digit."""
    return NOT_AVAILABLE if fraction is None else f"{100 * fraction:.1f} %"


def price(amount: float | None) -> str:
    """Money with three significant digits, without a currency: nobody said which."""
    return NOT_AVAILABLE if amount is None else f"{amount:.3g}"


def measured(value: float | None, show: Callable[[float | None], str]) -> Cell:
    """A figure as `show` writes it."""
    return Cell(text=show(value), value=value)


def number_cell(value: float | None, digits: int) -> Cell:
    """A figure with this many digits after the point."""
    return Cell(text=number(value, digits), value=value)


def text_cell(text: str) -> Cell:
    """Words on one line, whatever they came from."""
    return Cell(text=one_line(text))


def text_column(header: str) -> Column:
    """A column of words, aligned left."""
    return Column(header=header, numeric=False)
