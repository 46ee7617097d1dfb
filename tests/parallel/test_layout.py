"""Degrees of parallelism: which ranks train on which rows, and how many are left for data parallelism."""

import math

import pytest

from toolkit.parallel.layout import ParallelLayout, divide_ranks
from toolkit.presets import list_presets

GIVEN = [
    (("dp_replicate", "tp"), {"tp": 2}, 8, {"dp_replicate": 4, "tp": 2}),
    (("dp_shard", "tp"), {"tp": 2}, 8, {"dp_shard": 4, "tp": 2}),
    (("dp_replicate", "dp_shard", "tp"), {"tp": 2}, 16, {"dp_replicate": 2, "dp_shard": 4, "tp": 2}),
    (("dp_replicate", "dp_shard", "tp"), {"tp": 2, "dp_replicate": 4}, 16, {"dp_replicate": 4, "dp_shard": 2, "tp": 2}),
    (("dp_shard", "ep"), {"ep": 4}, 8, {"dp_shard": 8, "ep": 4}),
    (("dp_shard", "tp", "ep"), {"tp": 2, "ep": 4}, 8, {"dp_shard": 4, "tp": 2, "ep": 4}),
    (("dp_shard", "cp"), {"cp": 8}, 8, {"cp": 8}),
    (("dp_shard", "sp"), {"sp": 2}, 8, {"dp_shard": 4, "sp": 2}),
    (("dp_shard", "sp"), {}, 8, {"dp_shard": 8}),
]


@pytest.mark.parametrize(("parallel", "degrees", "world_size", "expected"), GIVEN)
def test_ranks_that_no_degree_takes_are_data_parallel(
    parallel: tuple[str, ...], degrees: dict[str, int], world_size: int, expected: dict[str, int]
) -> None:
    layout = divide_ranks(parallel, degrees, world_size=world_size)
    assert {name: size for name, size in layout.degrees().items() if size > 1} == expected
    assert layout.world_size == world_size


def test_experts_are_divided_over_ranks_that_train_on_different_rows() -> None:
    layout = ParallelLayout(dp_shard=4, tp=2, ep=4)
    assert (layout.world_size, layout.data_parallel_size, layout.ranks_per_batch, layout.expert_shard) == (8, 4, 2, 2)


def test_a_layout_is_shown_by_the_degrees_above_1() -> None:
    assert str(ParallelLayout(dp_shard=4, tp=2)) == "dp_shard 4 x tp 2"
    assert str(ParallelLayout()) == "one rank"


def test_every_preset_s_smallest_world_holds_two_ranks_of_each_degree() -> None:
    split = [preset for preset in list_presets() if preset.parallel]
    assert {preset.name for preset in split} == {
        *("tp", "fsdp2_tp", "hsdp_tp", "ep", "ep_tp", "cp", "ulysses", "pipeline_1f1b")
    }
    for preset in split:
        layout = preset.layout(preset.min_world_size, dict.fromkeys(preset.degrees, 2))
        assert layout is not None
        assert layout.world_size == preset.min_world_size
        assert math.prod(layout.degrees()[name] for name in preset.degrees if name != "ep") <= preset.min_world_size
        assert layout.expert_shard >= 1
