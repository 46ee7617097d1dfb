"""Rows of several data sets in one epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from toolkit.data.data_files import fractions, numbered, repeated_rows, row_and_source, rows_per_epoch


def test_without_weights_an_epoch_has_every_row_once() -> None:
    assert rows_per_epoch([3, 5], None) == [3, 5]


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        ([100, 100], [0.7, 0.3], [233, 100]),  # 100 / 0.3 = 333.3 rows in all
        ([100, 100], [7, 3], [233, 100]),  # weights are relative
        ([90, 10], [0.9, 0.1], [90, 10]),  # as many as there are: nothing is repeated
        ([10, 1000], [0.5, 0.5], [1000, 1000]),
        ([4, 6, 10], [1, 1, 2], [6, 6, 12]),
        ([5], [3], [5]),
    ],
)
def test_weights_are_fractions_of_the_rows_of_an_epoch(
    rows: list[int], weights: list[float], expected: list[int]
) -> None:
    counts = rows_per_epoch(rows, weights)
    assert counts == expected
    assert [count / sum(counts) for count in counts] == pytest.approx(fractions(weights), abs=1 / sum(counts))


def test_every_row_is_repeated_as_often_as_any_other_or_once_more() -> None:
    chosen = repeated_rows(4, 11, seed="42")
    assert sorted(Counter(chosen).values()) == [2, 3, 3, 3]
    assert chosen == repeated_rows(4, 11, seed="42")
    assert len({tuple(repeated_rows(4, 11, seed=str(seed))) for seed in range(40)}) == 4


def test_the_number_of_a_row_says_which_data_set_it_is_from() -> None:
    numbers = {numbered(row, source, sources=3): (row, source) for row in range(5) for source in range(3)}
    assert sorted(numbers) == list(range(15))
    assert {number: row_and_source(number, sources=3) for number in numbers} == numbers
    assert numbered(7, 0, sources=1) == 7
