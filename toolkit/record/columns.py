"""Declare a column of the results once: type, meaning, unit, how repeats are combined, and how tables show it.

A declaration is a field of a `Model`: annotated with its type and a `Column`, followed by its meaning as a docstring.
JSON, CSV, tables and the reference pages are made from it.

>>> from toolkit.record.measurements import Figures
>>> column_of(Figures, "timed_seconds").unit, str(column_of(Figures, "timed_seconds").repeats)
('s', 'the median over repeats')
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict

Format = Callable[[Any], str]  # writes a value as a table shows it


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


@dataclass(frozen=True, slots=True)
class Column:
    """What a field's type and docstring do not say about it.

    The console breaks a heading at its line feeds. In it `{unit}` stands for the table's unit of bytes, `{baseline}`
    and `{short_baseline}` for the baseline's name, and `{process}` for `process` or, on GPUs, `GPU`.
    """

    heading: str | None = None
    show: Format | None = None  # None: bytes in the table's unit
    unit: str | None = None
    repeats: Repeats | None = None  # how a row combines its repeats; None where repeats have nothing to do with it
    is_speed: bool = False  # a speed, or derived from one: withheld from a row that failed parity
    in_csv: bool = True  # scalars are columns of `results.csv`
    only_if_known: str | None = None
    """The comparison table shows it only where a row has a value of this key, and never on a terminal."""


class Model(BaseModel):
    """An immutable part of the results, whose fields are columns."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    def updated(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields; only what is read from a file is validated."""
        assert set(changes) <= set(type(self).model_fields), f"unknown: {set(changes) - set(type(self).model_fields)}"
        return self.model_copy(update=changes)


def column_of(model: type[Model], key: str) -> Column:
    """Return the declaration of a model's field, an empty one where it has no other than its meaning."""
    return next((item for item in model.model_fields[key].metadata if isinstance(item, Column)), Column())


def _none_if_not_finite(value: object) -> object:
    """NaN and infinity cannot be written as JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _none_if_not_a_share(value: object) -> object:
    """A fraction outside 0 to 1 comes from miscounted tokens; parity reports the counts themselves."""
    return None if isinstance(value, int | float) and not 0 <= value <= 1 else value


# A text or a boolean is no number: pydantic would convert "12" and true.
Count = Annotated[int, Strict(), Ge(0)]
PositiveCount = Annotated[int, Strict(), Gt(0)]
Bytes = Count | None
Real = Annotated[float, Strict()]
NonNegativeReal = Annotated[float, Strict(), Ge(0)]
Share = Annotated[float, Strict(), Ge(0), Le(1)]
Interval = tuple[NonNegativeReal, NonNegativeReal]  # low and high end
Number = Annotated[Real | None, BeforeValidator(_none_if_not_finite)]
Measured = Annotated[NonNegativeReal | None, BeforeValidator(_none_if_not_finite)]
PerStep = tuple[Number, ...]
Fraction = Annotated[Share | None, BeforeValidator(_none_if_not_a_share)]
