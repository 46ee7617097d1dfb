"""Formats of columns."""

from __future__ import annotations

from results_documents import GIB

from toolkit.compare.columns import byte_unit


def test_the_unit_of_a_table_follows_its_largest_size() -> None:
    assert byte_unit([None, 2**20]).text(3 * 2**20 // 2) == "1.5"
    assert byte_unit([10 * GIB]).text(3 * 2**29) == "1.50"
    assert byte_unit([]).text(None) == "n/a"
    assert (byte_unit([]).text(1), byte_unit([]).text(0)) == ("<0.1", "0.0")
