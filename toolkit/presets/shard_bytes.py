"""Elements and bytes of the model states that one rank holds, with each engine's padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolkit.presets.spec import PresetSpec


def zero_block(preset: PresetSpec) -> dict[str, Any]:
    """Return the `zero_optimization` block of the preset's DeepSpeed file; empty for other engines."""
    return dict((preset.settings or {}).get("zero_optimization") or {})


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
    highest = preset.traits.largest_shard(shapes, ranks=ranks) * element_bytes
    if part == "parameter":
        threshold = persistence_threshold(preset, hidden_size=hidden_size)
        highest += element_bytes * sum(size for size in map(math.prod, shapes) if size <= threshold)
    return (unsharded if ranks == 1 else 0), highest
