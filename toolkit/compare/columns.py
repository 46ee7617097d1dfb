"""Declare a column of `results.json` once: meaning, unit, how repeats are combined, and how tables show it.

A declaration annotates the field that it describes, so type, JSON Schema, documentation and tables have one source:

>>> from toolkit.compare.rows import Row
>>> column_of(Row, "wall_seconds").unit, str(column_of(Row, "wall_seconds").repeats)
('s', 'the median over repeats')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from toolkit.units import GIB, MIB, NOT_AVAILABLE, number

# From this size on, the largest size of a table reads better in GiB than in MiB.
GIB_FROM_BYTES = 10 * GIB
TableName = Literal["comparison", "memory", "speed", "efficiency", "overhead", "scaling", "trials"]
Format = Callable[[Any], str]
"""Writes a known or unknown value as a table shows it."""


class Repeats(StrEnum):
    """How a row's value is made of its repeats; the text completes "Of a row: …" in the documentation."""

    MIDDLE = "that of the repeat with the median speed, the slower of two"
    COMMON_STEPS = "the geometric mean over repeats, each over the timed steps that all trials of its `world_size` have"
    GEOMETRIC_MEAN = "the geometric mean over repeats"
    MEDIAN = "the median over repeats"
    LARGEST = "the maximum over repeats"
    # The next three count repeats that failed too.
    MEDIAN_OF_ALL = "the median over all repeats that report it"
    LARGEST_OF_ALL = "the maximum over all repeats that report it"
    UNION_OF_ALL = "those of all repeats"


@dataclass(frozen=True, kw_only=True, slots=True)
class Display:
    """The heading and format of a column in a table.

    The console breaks a heading at its line feeds. `{unit}` stands for the table's unit of bytes, `{baseline}` and
    `{short_baseline}` for the baseline's name, `{process}` for `process` or, on GPUs, `GPU`.
    """

    heading: str
    format: Format | None = None
    """None: bytes in the table's unit."""
    only_if_known: str | None = None
    """The comparison table shows the column only where a row has a value of this key, and never on a terminal."""


@dataclass(frozen=True, slots=True)
class Column:
    """Everything about one key of `results.json` but its name and type."""

    meaning: str
    unit: str | None = field(default=None, kw_only=True)
    repeats: Repeats | None = field(default=None, kw_only=True)
    """How a row combines its repeats; None where repeats have nothing to do with it."""
    is_speed: bool = field(default=False, kw_only=True)
    """A speed, or derived from one: withheld from a row that failed parity."""
    in_csv: bool = field(default=True, kw_only=True)
    """Scalars are columns of `results.csv`; new ones go to its end."""
    display: Display | None = field(default=None, kw_only=True)
    """How tables show it, unless `display_in` says otherwise for a table."""
    display_in: Mapping[TableName, Display] = field(default_factory=dict, kw_only=True)

    def display_for(self, table: TableName) -> Display:
        """Return the heading and format in a table. Raises KeyError for a column that no table shows."""
        display = self.display_in.get(table, self.display)
        if display is None:
            raise KeyError(table)
        return display

    @property
    def description(self) -> str:
        """Meaning, unit and aggregation in one paragraph, as the schema and the documentation give them."""
        unit = f" Unit: {self.unit}." if self.unit else ""
        return f"{self.meaning}{unit}" + (f" Of a row: {self.repeats}." if self.repeats else "")

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the description to the field's JSON Schema."""
        return {**handler(core_schema), "description": self.description}


def column_of(model: type[BaseModel], key: str) -> Column:
    """Return the declaration of a model's field. Raises StopIteration where there is none."""
    return next(item for item in model.model_fields[key].metadata if isinstance(item, Column))


def columns_of(model: type[BaseModel]) -> dict[str, Column]:
    """Return the declarations of all fields of a model that have one, in the order of the JSON keys."""
    return {key: item for key, info in model.model_fields.items() for item in info.metadata if isinstance(item, Column)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteUnit:
    """One unit for all sizes of a table, so that a column can be compared at a glance.

    >>> ByteUnit(name="MiB", num_bytes=2**20).text(3 * 2**20)
    '3.0'
    """

    name: str
    num_bytes: int

    def text(self, size: int | None) -> str:
        """Return a size in this unit; one that would round to zero as less than the smallest."""
        if size is None:
            return NOT_AVAILABLE
        in_unit, smallest = size / self.num_bytes, 0.1 if self.num_bytes == MIB else 0.01
        if 0 < in_unit < smallest:
            return f"<{smallest:g}"
        return number(in_unit, 0 if in_unit >= 1000 else 1 if in_unit >= 100 or self.num_bytes == MIB else 2)


GIB_UNIT = ByteUnit(name="GiB", num_bytes=GIB)
MIB_UNIT = ByteUnit(name="MiB", num_bytes=MIB)


def byte_unit(sizes: Iterable[int | None]) -> ByteUnit:
    """Return GiB where the largest size is tens of GiB, otherwise MiB."""
    return GIB_UNIT if max((size for size in sizes if size is not None), default=0) >= GIB_FROM_BYTES else MIB_UNIT


def fixed(digits: int) -> Format:
    """Format a number with this many digits after the point.

    >>> fixed(1)(1234.56)
    '1,234.6'
    """
    return lambda value: number(value, digits)


def speed(tokens_per_second: float | None) -> str:
    """Format a speed with at least three significant digits.

    >>> speed(4102.3), speed(41.02), speed(4.1)
    ('4,102', '41.0', '4.10')
    """
    if tokens_per_second is None:
        return NOT_AVAILABLE
    return number(tokens_per_second, 0 if tokens_per_second >= 100 else 1 if tokens_per_second >= 10 else 2)


def percent(fraction: float | None) -> str:
    """Format a fraction as a whole percentage."""
    return NOT_AVAILABLE if fraction is None else f"{100 * fraction:.0f} %"


def tenths_of_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage with one digit after the point."""
    return NOT_AVAILABLE if fraction is None else f"{100 * fraction:.1f} %"


def price(amount: float | None) -> str:
    """Format an amount of money with three significant digits; the currency is the user's."""
    return NOT_AVAILABLE if amount is None else f"{amount:.3g}"


def interval(show: Callable[[float], str]) -> Format:
    """Format `(low, high)` with one format for both ends.

    >>> interval(fixed(2))((0.97, 1.03))
    '0.97–1.03'
    """
    return lambda bounds: NOT_AVAILABLE if bounds is None else f"{show(bounds[0])}–{show(bounds[1])}"
