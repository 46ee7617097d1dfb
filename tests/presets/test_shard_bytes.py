"""Bytes that one rank may hold under each sharding, with the engine's padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.presets import load_preset
from toolkit.presets.characteristics import largest_shard, shard_byte_limits

# A layer's matrix of 5 x 2 elements: 10, or 5 on each of two ranks where nothing is padded.
SHAPES = [(5, 2)]
FP32_BYTES = 4


@pytest.mark.parametrize(
    ("shapes", "engine", "ranks", "elements"),
    [
        ([(5, 2)], "fsdp2", 2, 6),  # 3 of 5 rows
        ([(4, 2)], "fsdp2", 2, 4),
        ([(5, 2), (1,)], "fsdp2", 2, 7),  # the first rank holds the only element of the bias
        ([()], "fsdp2", 2, 1),  # a scalar cannot be cut
        ([(5, 2)], "deepspeed", 2, 13),  # 5, and padding of two groups to a multiple of 2 x 2
        ([(1,)] * 100, "deepspeed", 2, 100),  # ZeRO-3 pads each of 100 single elements to 2
        ([(100, 100)], "deepspeed", 4, 2516),  # 2,500 and 2 groups x 2 x 4
    ],
)
def test_the_largest_shard_includes_the_engines_padding(
    shapes: list[tuple[int, ...]], engine: str, ranks: int, elements: int
) -> None:
    assert largest_shard(shapes, engine, ranks=ranks) == elements


# Ten fp32 elements on two ranks, 40 bytes unsharded. Highest of a DeepSpeed shard: (5 + 8 of padding) x 4 = 52, and
# 5 % of 40 = 2 for what ZeRO-3 keeps gathered of parameters. Highest of an FSDP2 shard: 3 rows x 2 x 4 = 24.
@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "optimizer"),
    [
        ("ddp", (40, 40), (40, 40), (40, 40)),
        ("zero1", (40, 40), (40, 40), (0, 52)),
        ("zero2", (40, 40), (0, 52), (0, 52)),
        ("zero3", (0, 54), (0, 52), (0, 52)),
        ("zero3_cpu_offload", (0, 54), (0, 52), (0, 52)),
        ("fsdp2", (0, 24), (0, 24), (0, 24)),
    ],
)
def test_the_limits_of_ten_elements_on_two_ranks(
    name: str, parameter: tuple[int, int], gradient: tuple[int, int], optimizer: tuple[int, int]
) -> None:
    parts = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    assert {part: shard_byte_limits(load_preset(name), part, SHAPES, FP32_BYTES, ranks=2) for part in parts} == parts


def test_a_single_rank_holds_everything_under_every_sharding() -> None:
    assert shard_byte_limits(load_preset("zero2"), "optimizer", SHAPES, FP32_BYTES, ranks=1) == (
        40,
        56,
    )  # padded to 10 + 4 at most
    assert shard_byte_limits(load_preset("fsdp2"), "parameter", SHAPES, FP32_BYTES, ranks=1) == (40, 40)


def test_fsdp2_that_keeps_parameters_gathered_still_shards_them_between_steps() -> None:
    gathered = replace(load_preset("fsdp2"), sharding="shard_grad_op")
    assert shard_byte_limits(gathered, "parameter", SHAPES, FP32_BYTES, ranks=2) == (0, 24)
