"""Readings of ranks are checked against the values that a preset requires."""

from __future__ import annotations

import pytest

from toolkit.observe.attest.differences import byte_differences, differences, expected_values, rank_differences
from toolkit.observe.attest.readings import Values
from toolkit.presets import load_preset
from toolkit.presets.characteristics import shard_byte_limits

SETTINGS = {"gradient_clipping": 1.0, "activation_checkpointing": False}
FP32_BYTES = 4


def expected(name: str, world_size: int | None = 2, dtype: str = "float32") -> Values:
    return expected_values(load_preset(name), world_size, compute_dtype=dtype, settings=SETTINGS)


def matching_ranks(name: str, world_size: int = 2) -> list[Values]:
    """Readings without a difference."""
    return [{"rank": rank, **expected(name, world_size)} for rank in range(world_size)]


# -- expected values


def test_a_preset_requires_its_engine_its_sharding_and_fp32_master_weights() -> None:
    assert expected("zero3_cpu_offload", 4, dtype="bfloat16") == {
        "gradient_clipping": 1.0,
        "activation_checkpointing": False,
        "world_size": 4,
        "engine": "deepspeed",
        "sharding": "full_shard",
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "compute_dtype": "bfloat16",
        "master_dtype": "float32",
        "optimizer_dtype": "float32",
    }


def test_ddp_wraps_a_single_process_on_a_cpu_only() -> None:
    assert expected("ddp", 1)["engine"] == "none"
    on_cpu = expected_values(load_preset("ddp"), 1, compute_dtype="float32", settings={}, on_cpu=True)
    assert on_cpu["engine"] == "ddp"
    assert expected("ddp", 2)["engine"] == "ddp"
    assert [expected(preset, 1)["engine"] for preset in ("zero1", "fsdp2")] == ["deepspeed", "fsdp2"]


def test_a_hybrid_mesh_requires_the_launched_shard_degree() -> None:
    found = expected_values(load_preset("fsdp2_hybrid"), 8, compute_dtype="float32", settings=SETTINGS, dp_shard_size=4)
    assert (found["sharding"], found["dp_shard_size"]) == ("hybrid_shard", 4)
    assert "dp_shard_size" not in expected("fsdp2_hybrid", 8)


def test_each_replica_of_a_hybrid_mesh_must_hold_the_complete_model() -> None:
    facts = {"dp_shard_size": 2, "parameter_bytes": 5, "byte_limits": {}, "whole_bytes": {"parameter": 10}}
    ranks = [{"rank": rank, **facts} for rank in range(4)]
    assert byte_differences(ranks) == []
    ranks[3]["parameter_bytes"] = 4
    assert [str(difference) for difference in byte_differences(ranks)] == [
        "parameter_bytes of all ranks is 19, expected at least 20"
    ]


def test_without_a_preset_only_settings_and_world_size_are_checked() -> None:
    assert expected_values(None, None, compute_dtype="float32", settings=SETTINGS) == SETTINGS
    assert expected_values(None, 2, compute_dtype="float32", settings=SETTINGS) == SETTINGS | {"world_size": 2}


# -- differences


@pytest.mark.parametrize("name", ["ddp", "zero3_cpu_offload", "fsdp2_hybrid"])
def test_matching_readings_have_no_differences(name: str) -> None:
    assert differences(expected(name), matching_ranks(name)) == []


@pytest.mark.parametrize(
    ("name", "fact", "found", "sentence"),
    [
        ("ddp", "world_size", 1, "world_size on rank 0 is 1, expected 2"),
        ("fsdp2", "engine", "ddp", "engine on rank 0 is ddp, expected fsdp2"),
        ("zero2", "sharding", "shard_optimizer", "sharding on rank 0 is shard_optimizer, expected shard_grad_op"),
        ("ddp", "master_dtype", "bfloat16+float32", "master_dtype on rank 0 is bfloat16+float32, expected float32"),
        ("zero3", "offload_param", "cpu", "offload_param on rank 0 is cpu, expected None"),
        ("ddp", "gradient_clipping", 0.0, "gradient_clipping on rank 0 is 0.0, expected 1.0"),
    ],
)
def test_a_difference_is_reported_with_both_values(name: str, fact: str, found: object, sentence: str) -> None:
    ranks = matching_ranks(name)
    ranks[0][fact] = found
    (difference,) = differences(expected(name), ranks)
    assert difference.to_json() == {"fact": fact, "rank": 0, "expected": expected(name)[fact], "found": found}
    assert str(difference) == sentence


def test_one_process_instead_of_two_is_reported_with_the_missing_engine() -> None:
    alone = [{**matching_ranks("ddp")[0], "world_size": 1, "engine": "none"}]
    assert [(d.name, d.expected, d.found) for d in differences(expected("ddp"), alone)] == [
        ("world_size", 2, 1),
        ("engine", "ddp", "none"),
    ]


def test_every_rank_that_differs_is_reported() -> None:
    ranks = matching_ranks("fsdp2", 4)
    for rank in (1, 3):
        ranks[rank]["engine"] = "ddp"
    assert [d.rank for d in differences(expected("fsdp2", 4), ranks)] == [1, 3]


def test_a_missing_value_is_a_difference() -> None:
    ranks = matching_ranks("ddp")
    del ranks[1]["optimizer_dtype"]
    assert [(d.rank, d.found) for d in differences(expected("ddp"), ranks)] == [(1, None)]


def test_initial_weights_must_be_equal_on_all_ranks() -> None:
    ranks = [{"rank": rank, "initial_weights_sha256": digest} for rank, digest in enumerate(("aa", "aa", "bb"))]
    found_differences = rank_differences("initial_weights_sha256", ranks)
    assert [str(difference) for difference in found_differences] == [
        "initial_weights_sha256 (equal on all ranks) on rank 2 is bb, expected aa"
    ]
    assert rank_differences("initial_weights_sha256", ranks[:2]) == []


# -- bytes


def with_bytes(name: str, shapes: list[tuple[int, ...]], held: list[int], whole: int) -> list[Values]:
    """Ranks that hold these bytes of optimizer states, with the limits of the preset."""
    allowed = shard_byte_limits(load_preset(name), "optimizer", shapes, FP32_BYTES, ranks=len(held))
    return [
        {
            "rank": rank,
            "optimizer_bytes": own,
            "byte_limits": {"optimizer": allowed},
            "whole_bytes": {"optimizer": whole},
        }
        for rank, own in enumerate(held)
    ]


def test_half_of_the_optimizer_states_per_rank_is_allowed_under_zero1() -> None:
    assert byte_differences(with_bytes("zero1", [(1000,)], [2000, 2000], 4000)) == []


def test_unsharded_optimizer_states_under_zero1_are_reported() -> None:
    found_differences = byte_differences(with_bytes("zero1", [(1000,)], [4000, 4000], 4000))
    assert [str(difference) for difference in found_differences] == [
        "optimizer_bytes on rank 0 is 4000, expected 0 to 2032",  # (500 + 8 of padding) x 4
        "optimizer_bytes on rank 1 is 4000, expected 0 to 2032",
    ]


def test_half_of_the_optimizer_states_under_ddp_is_reported() -> None:
    found_differences = byte_differences(with_bytes("ddp", [(1000,)], [4000, 2000], 4000))
    assert [str(difference) for difference in found_differences] == ["optimizer_bytes on rank 1 is 2000, expected 4000"]


def test_shards_that_do_not_add_up_are_reported() -> None:
    found_differences = byte_differences(with_bytes("zero1", [(1000,)], [2000, 1996], 4000))
    assert [str(difference) for difference in found_differences] == [
        "optimizer_bytes of all ranks is 3996, expected at least 4000"
    ]
