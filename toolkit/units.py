"""Bytes, seconds, speeds and unknown values as text for people.

>>> gib(3 * 2**30)
'3.00 GiB'
>>> gib(None)
'n/a'
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

GIB = 2**30
MIB = 2**20
KIB = 2**10
SECONDS_PER_HOUR = 3600
NOT_AVAILABLE = "n/a"


def gib(num_bytes: int | None) -> str:
    """Format bytes as GiB (2**30), or as MiB below a tenth of a GiB."""
    if num_bytes is None:
        return NOT_AVAILABLE
    if abs(num_bytes) < GIB // 10:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def tenths_of_gib(num_bytes: int) -> str:
    """Format bytes as a number of GiB, as plans show peaks and the memory of a GPU.

    >>> tenths_of_gib(25_250_000_000)
    '23.5'
    """
    return number(num_bytes / GIB, 1)


def dollars(value: float) -> str:
    """Format a price, with tenths of a cent below a dollar.

    >>> dollars(0.1184), dollars(0.4), dollars(1234.5)
    ('$0.118', '$0.40', '$1,234.50')
    """
    return f"${value:,.{2 if value >= 1 or value == round(value, 2) else 3}f}"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number with thousands separators, or `n/a`."""
    return NOT_AVAILABLE if value is None else f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    """Format a duration: milliseconds below a second, minutes above two."""
    if value is None:
        return NOT_AVAILABLE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value) // 60} min {int(value) % 60:02d} s"


def time_left(value: float) -> str:
    """Format a time to wait, without fractions of a second.

    >>> time_left(12.3), time_left(754), time_left(9000)
    ('12 s', '12 min 34 s', '2 h 30 min')
    """
    minutes, rest = divmod(round(value), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def fixed(digits: int) -> Callable[[float | None], str]:
    """Return the format of a number with this many digits after the point.

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


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "file"), counted(0, "node")
    ('1 file', 'no nodes')
    """
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def percent(fraction: float | None, digits: int = 0) -> str:
    """Format a fraction as a percentage."""
    return NOT_AVAILABLE if fraction is None else f"{100 * fraction:.{digits}f} %"


def interval(show: Callable[[float], str]) -> Callable[[tuple[float, float] | None], str]:
    """Return the format of `(low, high)` with one format for both ends.

    >>> interval(fixed(2))((0.97, 1.03))
    '0.97–1.03'
    """
    return lambda bounds: NOT_AVAILABLE if bounds is None else f"{show(bounds[0])}–{show(bounds[1])}"


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


GIB_UNIT, MIB_UNIT = ByteUnit(name="GiB", num_bytes=GIB), ByteUnit(name="MiB", num_bytes=MIB)


def byte_unit(sizes: Iterable[int | None]) -> ByteUnit:
    """Return GiB where the largest size is tens of GiB, otherwise MiB.

    >>> byte_unit([None, 2**20]).text(3 * 2**19), byte_unit([10 * GIB]).text(3 * 2**29), byte_unit([]).text(1)
    ('1.5', '1.50', '<0.1')
    """
    return GIB_UNIT if max((size for size in sizes if size is not None), default=0) >= 10 * GIB else MIB_UNIT
