"""Where a key and its value stand in a text.

>>> Entry(key="a", line=1, key_span=(0, 1), value_span=(3, 4), flow=False).value_span
(3, 4)
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ToolkitError

# A configuration has a few hundred values, four levels deep.
MAX_VALUES = 20_000
MAX_DEPTH = 40


class NotAConfiguration(ToolkitError):
    """A file that no library would read as a configuration: a list, or more values than any has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key and its value."""

    key: str
    """Dotted."""
    line: int
    """1-based."""
    key_span: tuple[int, int]
    value_span: tuple[int, int]
    flow: bool
    """Inside braces, as everything in JSON is: entries are separated by commas."""


def check_bounds(path: str, *, values: int, depth: int) -> None:
    """Refuse what is larger than any configuration, before time is spent on it."""
    if values > MAX_VALUES:
        raise NotAConfiguration(f"{path} has more than {MAX_VALUES:,} values, more than any configuration")
    if depth > MAX_DEPTH:
        raise NotAConfiguration(f"{path} is nested more than {MAX_DEPTH} deep, deeper than any configuration")
