"""What several commands print: messages go to stderr, data goes to stdout."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.entry_point import print_message


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "file"), counted(0, "node")
    ('1 file', 'no nodes')
    """
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def print_failure(status: str, failure: Mapping[str, object]) -> None:
    """Print why a run failed, with what to do about it: its log is relayed only up to the failure."""
    print_message(f"error: {status}: {failure['message']}")
    if failure.get("hint"):
        print_message(f"  hint: {failure['hint']}")
