"""Rows of several data sets in one epoch.

Without weights an epoch has every row once. With weights, every row at least once, and as many rows of each data set as
its weight says: 503 rows with weight 0.7 and 1,000 rows with weight 0.3 make an epoch of 3,333 rows.

>>> rows_per_epoch([503, 1000], [0.7, 0.3])
[2333, 1000]
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def fractions(weights: Sequence[float]) -> list[float]:
    """Return weights as fractions of their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def rows_per_epoch(rows: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Return the rows that each data set contributes to an epoch; the epoch ends when the last has none left unread.

    `rows` are the rows of each. The one that lasts longest contributes each of its rows once, the others repeat theirs.
    """
    if weights is None:
        return list(rows)
    shares = fractions(weights)
    total = max(count / share for count, share in zip(rows, shares, strict=True))
    return [max(count, round(total * share)) for count, share in zip(rows, shares, strict=True)]


def repeated_rows(rows: int, count: int, *, seed: str) -> list[int]:
    """Return the indices of `count` of the rows: each `count // rows` times, and some, drawn by the seed, once more.

    >>> repeated_rows(2, 5, seed="42")
    [0, 1, 0, 1, 1]
    """
    times, rest = divmod(count, rows)
    return [*range(rows)] * times + sorted(random.Random(seed).sample(range(rows), rest))


def numbered(row: int, source: int, *, sources: int) -> int:
    """Return the number of a row among those of all data sets; with one data set, its own. Both count from 0."""
    return row * sources + source


def row_and_source(number: int, *, sources: int) -> tuple[int, int]:
    """Return the index of a row in its data set, and that of the data set: the reverse of `numbered`.

    >>> row_and_source(numbered(7, 1, sources=3), sources=3)
    (7, 1)
    """
    return divmod(number, sources)
