"""Elements and bytes of the model states that one rank holds, with each engine's padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from toolkit.presets.spec import PresetSpec

ADAM_STATES = 2  # momentum and variance
PARAMETER_GROUPS = 2  # the Trainer's: with and without weight decay


def largest_shard(shapes: Sequence[tuple[int, ...]], engine: str, *, ranks: int) -> int:
    """Return the elements of the largest shard that one rank may hold, including padding.

    >>> largest_shard([(5, 2)], "fsdp2", ranks=2)
    6
    """
    sizes = [math.prod(shape) for shape in shapes]
    if engine == "fsdp2":
        rows = [shape[0] if shape else 1 for shape in shapes]
        return sum(math.ceil(row / ranks) * (size // max(row, 1)) for row, size in zip(rows, sizes, strict=True))
    flat = math.ceil(sum(sizes) / ranks) + PARAMETER_GROUPS * 2 * ranks
    return max(flat, sum(math.ceil(size / ranks) for size in sizes))


@lru_cache(maxsize=256)
def zero_block(preset: PresetSpec) -> dict[str, Any]:
    """Return the `zero_optimization` block of the preset's DeepSpeed file; empty for other engines."""
    return dict((preset.deepspeed_config() or {}).get("zero_optimization") or {})


def persistence_threshold(preset: PresetSpec, *, hidden_size: int | None) -> int:
    """Return the elements up to which ZeRO-3 never releases a gathered parameter; 0 for any other preset.

    `auto` is 10 x the hidden size, which the libraries read from the model's configuration (transformers 5,
    `integrations/deepspeed.py`).
    """
    return preset.traits.persistence_threshold(zero_block(preset), preset.sharding, hidden_size=hidden_size)


def shard_byte_limits(
    preset: PresetSpec,
    part: str,
    shapes: Sequence[tuple[int, ...]],
    element_bytes: int,
    *,
    ranks: int,
    hidden_size: int | None = None,
) -> tuple[int, int]:
    """Return the lowest and highest bytes of a model state on one rank, if `ranks` share it.

    Beside its shards, a ZeRO-3 rank holds each parameter up to the persistence threshold whole.
    """
    unsharded = sum(math.prod(shape) for shape in shapes) * element_bytes
    if part not in preset.sharded_parts:
        return unsharded, unsharded
    highest = largest_shard(shapes, preset.engine, ranks=ranks) * element_bytes
    if part == "parameter":
        threshold = persistence_threshold(preset, hidden_size=hidden_size)
        highest += element_bytes * sum(size for size in map(math.prod, shapes) if size <= threshold)
    return (unsharded if ranks == 1 else 0), highest
