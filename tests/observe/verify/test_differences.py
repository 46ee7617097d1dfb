"""Readings of ranks are checked against the values that a preset requires, and against each other."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.observe.parts import ExpectedRun
from toolkit.observe.verify.differences import (
    byte_differences,
    differences,
    layout_differences,
    optimizer_differences,
    rank_differences,
)
from toolkit.observe.verify.expected import expected_values
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets import load_preset
from toolkit.record.reading import RankReading

SETTINGS = {"gradient_clipping": 1.0, "activation_checkpointing": False}
LAYOUT, ROWS = ParallelLayout(dp_shard=2, tp=2), "first_rows_sha256"


def expected(
    name: str | None, world_size: int | None = 2, *, dtype: str = "no", on_cpu: bool = False, **facts: Any
) -> dict[str, Any]:
    preset = None if name is None else load_preset(name)
    run = ExpectedRun(**{"preset": preset, "world_size": world_size, "settings": SETTINGS} | facts)
    names = {"mixed_precision": dtype, "optim": "unknown", "optim_args": None}
    args = SimpleNamespace(**names, device=torch.device("cpu" if on_cpu else "cuda"))
    return expected_values(run, SimpleNamespace(args=args, model=torch.nn.Linear(1, 1)))


def test_a_preset_requires_its_engine_its_sharding_and_fp32_master_weights() -> None:
    required = {"world_size": 4, "engine": "deepspeed", "sharding": "full_shard", "compute_dtype": "bfloat16"}
    required |= {"offload_optimizer": "cpu", "offload_param": "cpu"}
    required |= {"master_dtype": "float32", "reduce_dtype": "bfloat16", "optimizer_dtype": "float32"}
    assert expected("zero3_cpu_offload", 4, dtype="bf16") == SETTINGS | required
    hybrid = expected("fsdp2_hybrid", 8, dp_shard_size=4)
    assert (hybrid["sharding"], hybrid["dp_shard_size"]) == ("hybrid_shard", 4)
    assert "dp_shard_size" not in expected("fsdp2_hybrid", 8)
    # Without a preset only settings and the world size are checked.
    assert (expected(None, None), expected(None, 2)) == (SETTINGS, SETTINGS | {"world_size": 2})
    # DDP wraps a single process on a CPU only.
    assert [expected("ddp", 1)["engine"], expected("ddp", 1, on_cpu=True)["engine"]] == ["none", "ddp"]
    assert [expected(preset, 1)["engine"] for preset in ("zero1", "fsdp2")] == ["deepspeed", "fsdp2"]


@pytest.mark.parametrize(
    ("preset", "gradients", "reduction", "facts"),
    [
        ("ddp", "float32", "float32", {}),
        ("ddp", "float32", None, {"settings": SETTINGS | {"ddp_comm_hook": "bf16"}}),  # the hook sends what it sends
        ("fsdp2", "float32", "bfloat16", {}),
        ("fsdp2_tp", "float32", "float32", {"layout_at_load": LAYOUT}),
        ("zero2", None, "bfloat16", {}),
        ("ulysses", None, "float32", {}),
    ],
)
def test_gradients_and_their_reduction_have_the_dtypes_of_the_numerics_page(
    preset: str, gradients: str | None, reduction: str | None, facts: dict[str, Any]
) -> None:
    values = expected(preset, dtype="bf16", **facts)
    assert (values.get("gradient_dtype"), values.get("reduce_dtype")) == (gradients, reduction)


def test_a_deepspeed_file_may_name_the_dtype_of_its_reduction() -> None:
    preset = replace(load_preset("zero2"), settings={"communication_data_type": "fp32"})
    assert expected("zero2", dtype="bf16", preset=preset)["reduce_dtype"] == "float32"


def test_every_rank_that_differs_is_reported_with_both_values_and_a_missing_value_is_a_difference() -> None:
    required = expected("fsdp2", 4)
    ranks = [RankReading(rank=rank, **required) for rank in range(4)]
    assert differences(required, ranks) == []
    ranks[1] |= RankReading(engine="ddp")
    ranks[3] = RankReading(rank=3, **{name: value for name, value in required.items() if name != "optimizer_dtype"})
    engine, dtype = differences(required, ranks)
    assert str(engine) == "engine on rank 1 is ddp, expected fsdp2"
    assert dtype.to_json() == {"fact": "optimizer_dtype", "rank": 3, "expected": "float32", "found": None}


def test_an_optimizer_whose_dtypes_follow_from_its_tensors_is_checked_on_each_rank() -> None:
    own = ("uint8", "float32")  # of large tensors, and of small ones
    ranks = [RankReading(rank=n, optimizer_dtype="uint8", expected_optimizer_dtype=own[n]) for n in (0, 1)]
    assert [str(found) for found in differences({}, ranks)] == ["optimizer_dtype on rank 1 is uint8, expected float32"]


def test_initial_weights_must_be_equal_on_all_ranks() -> None:
    ranks = [RankReading(rank=n, initial_weights_sha256=digest) for n, digest in enumerate(("aa", "aa", "bb"))]
    (found,) = rank_differences("initial_weights_sha256", ranks)
    assert str(found) == "initial_weights_sha256 (equal on all ranks) on rank 2 is bb, expected aa"
    assert rank_differences("initial_weights_sha256", ranks[:2]) == []


@pytest.mark.parametrize(
    ("name", "held", "found"),
    [
        ("zero1", [2000, 2000], []),
        # (500 + 8 of padding) x 4
        ("zero1", [4000, 4000], [f"optimizer_bytes on rank {rank} is 4000, expected 0 to 2032" for rank in (0, 1)]),
        ("ddp", [4000, 2000], ["optimizer_bytes on rank 1 is 2000, expected 4000"]),
        ("zero1", [2000, 1996], ["optimizer_bytes of all ranks is 3996, expected at least 4000"]),
        # each replica of a hybrid mesh holds the complete model
        ("fsdp2_hybrid", [2000] * 4, []),
        ("fsdp2_hybrid", [2000] * 3 + [1999], ["optimizer_bytes of all ranks is 7999, expected at least 8000"]),
    ],
)
def test_bytes_that_are_not_allowed_or_missing_are_reported(name: str, held: list[int], found: list[str]) -> None:
    limits = {"optimizer": load_preset(name).shard_byte_limits("optimizer", [(1000,)], 4, ranks=2, hidden_size=None)}
    of_all = RankReading(byte_limits=limits, whole_bytes={"optimizer": 4000})
    of_all |= RankReading(dp_shard_size=2 if name == "fsdp2_hybrid" else None)
    ranks = [of_all | RankReading(rank=rank, optimizer_bytes=own) for rank, own in enumerate(held)]
    assert [str(difference) for difference in byte_differences(ranks)] == found


def test_an_optimizer_that_misses_parameters_differs_and_one_that_is_not_read_does_not() -> None:
    ranks = [RankReading(rank=n, num_trainable_params=20, num_optimizer_params=(20, None, 4)[n]) for n in range(3)]
    (found,) = optimizer_differences(ranks)
    assert str(found) == "trained parameters in the optimizer on rank 2 is 4, expected 20"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({(3, ROWS): "c"}, [(f"{ROWS} (equal to rank 2's)", 3)]),
        ({(n, ROWS): "a" for n in range(4)}, [(f"{ROWS} (other than rank 0's)", rank) for rank in (2, 3)]),
        ({(1, "batch_group"): [1, 3]}, [("batch_group", 1)]),
    ],
)
def test_rows_differ_between_groups_of_ranks(changed: dict[tuple[int, str], Any], found: list[tuple[str, int]]) -> None:
    groups = [[0, 1], [0, 1], [2, 3], [2, 3]]
    ranks = [RankReading(rank=n, batch_group=groups[n], first_rows_sha256="aabb"[n]) for n in range(4)]
    for (rank, name), value in changed.items():
        ranks[rank] |= RankReading(**{name: value})
    assert [(difference.name, difference.rank) for difference in layout_differences(ranks, LAYOUT)] == found
    assert layout_differences(ranks, None) == []
    required = expected("fsdp2_tp", 4, layout=LAYOUT)  # another degree is a difference too
    other = RankReading(**required | {"layout": ParallelLayout(dp_shard=4).degrees()})
    assert [difference.name for difference in differences(required, [other])] == ["layout"]
