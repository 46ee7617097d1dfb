"""How ranks are divided is read back, and a run whose ranks are divided otherwise fails."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.observe.attest.clipping import gradient_replicas
from toolkit.observe.attest.differences import differences, expected_values
from toolkit.observe.attest.read_layout import first_rows_sha256, layout_differences
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import load_preset

LAYOUT = ParallelLayout(dp_shard=2, tp=2)


def readings() -> list[dict[str, Any]]:
    """Four ranks in two groups, each with rows of its own."""
    groups, rows = [[0, 1], [0, 1], [2, 3], [2, 3]], "aabb"
    return [{"rank": rank, "batch_group": groups[rank], "first_rows_sha256": rows[rank]} for rank in range(4)]


def named(ranks: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(difference.name, difference.rank) for difference in layout_differences(ranks, LAYOUT)]


def test_ranks_of_a_group_train_on_rows_that_no_other_group_has() -> None:
    assert named(readings()) == []
    assert layout_differences(readings(), None) == []


def test_a_rank_with_rows_of_its_own_is_named() -> None:
    ranks = readings()
    ranks[3]["first_rows_sha256"] = "c"
    assert named(ranks) == [("first_rows_sha256 (equal to rank 2's)", 3)]


def test_two_groups_with_the_same_rows_are_named() -> None:
    ranks = readings()
    for reading in ranks:
        reading["first_rows_sha256"] = "a"
    assert named(ranks) == [("first_rows_sha256 (other than rank 0's)", rank) for rank in (2, 3)]


def test_a_rank_in_another_group_is_named() -> None:
    ranks = readings()
    ranks[1]["batch_group"] = [1, 3]
    assert named(ranks) == [("batch_group", 1)]


def test_another_degree_than_the_expected_one_is_a_difference() -> None:
    expected = expected_values(load_preset("fsdp2_tp"), 4, compute_dtype="float32", settings={}, layout=LAYOUT)
    found = {"rank": 0, **expected, "layout": ParallelLayout(dp_shard=4).degrees()}
    assert [difference.name for difference in differences(expected, [found])] == ["layout"]
    assert differences(expected, [{"rank": 0, **expected}]) == []


def test_the_order_of_batches_is_part_of_their_digest() -> None:
    assert first_rows_sha256(["one", "two"]) != first_rows_sha256(["two", "one"])


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [(None, 4), (ParallelLayout(dp_replicate=2, tp=2).degrees(), 1), (ParallelLayout(dp_shard=4, ep=2).degrees(), 1)],
)
def test_where_layers_are_split_each_rank_has_divided_its_norm_by_its_copies(layout: Any, replicas: int) -> None:
    assert gradient_replicas([{"sharding": "replicate", "layout": layout}] * 4) == replicas  # type: ignore[list-item]
