"""Bytes, seconds and unknown values as text for people.

>>> gib(3 * 2**30)
'3.00 GiB'
>>> gib(None)
'n/a'
"""

from __future__ import annotations

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
