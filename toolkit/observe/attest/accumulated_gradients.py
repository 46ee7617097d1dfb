"""Gradients that a rank holds between two accumulation steps: read once, after the first one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.observe.attest.read_deepspeed import accumulated_gradients
from toolkit.observe.attest.read_fsdp2 import (
    fsdp2_compute_dtype,
    is_fsdp2,
    is_replicated_over_data_parallelism,
    unsharded_gradients,
)
from toolkit.observe.attest.tensors import full_shape, local_bytes, uncompiled
from toolkit.presets import Preset
from toolkit.presets.accumulation import SHARDED, WHOLE
from toolkit.presets.shard_bytes import PARAMETER_GROUPS, shard_byte_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatedGradients:
    """Live gradients of one rank between accumulation steps."""

    accumulate: str
    """`sharded`, `whole`, or both names joined by `+`."""
    num_bytes: int
    shapes: list[tuple[int, ...]]
    """Unsharded shapes of the parameters that have a gradient."""
    element_bytes: int
    keeps_whole_tensors: bool = False
    """True under ZeRO-2, which keeps a tensor whole if it is partly in this rank's partition."""

    def byte_limits(self, preset: Preset, *, ranks: int) -> tuple[int, int]:
        """Return the lowest and highest bytes of these gradients, if `ranks` share one copy of the model."""
        if self.accumulate == SHARDED and "gradient" in preset.sharded_parts:
            lowest, highest = shard_byte_limits(preset, "gradient", self.shapes, self.element_bytes, ranks=ranks)
            # The partition of each parameter group has two ends.
            at_ends = 2 * PARAMETER_GROUPS * max(map(math.prod, self.shapes)) if self.keeps_whole_tensors else 0
            return lowest, highest + at_ends * self.element_bytes
        whole = sum(map(math.prod, self.shapes)) * self.element_bytes
        return whole, whole


def read_accumulated(trainer: Any) -> AccumulatedGradients | None:
    """Read the gradients that wait for the next accumulation step; None where there are none."""
    wrapped = uncompiled(trainer.model_wrapped)
    shards, whole = _gradients(wrapped)
    held = [*shards, *whole]
    if not held:
        return None
    computed = whole and is_fsdp2(wrapped)
    return AccumulatedGradients(
        accumulate="+".join(name for name, tensors in ((SHARDED, shards), (WHOLE, whole)) if tensors),
        num_bytes=local_bytes(held),
        shapes=[full_shape(p) for p in _with_gradient(wrapped)],
        element_bytes=fsdp2_compute_dtype(wrapped).itemsize if computed else held[0].element_size(),
        keeps_whole_tensors=_zero_stage(wrapped) == 2,
    )


def _gradients(wrapped: Any) -> tuple[list[Any], list[Any]]:
    """Shards, and whole gradients."""
    own = [p.grad for p in wrapped.parameters() if p.grad is not None]
    if is_fsdp2(wrapped):
        whole = [gradient for gradient in own if is_replicated_over_data_parallelism(gradient)]
        shards = [gradient for gradient in own if not is_replicated_over_data_parallelism(gradient)]
        return shards, [*whole, *(gradient for _, gradient in unsharded_gradients(wrapped))]
    return (accumulated_gradients(wrapped), own) if _zero_stage(wrapped) >= 2 else ([], own)


def _with_gradient(wrapped: Any) -> Iterator[Any]:
    """The trained parameters that a gradient is held of; ZeRO-2 and ZeRO-3 have room for those of all."""
    unsharded = {id(parameter) for parameter, _ in unsharded_gradients(wrapped)} if is_fsdp2(wrapped) else set()
    has_room = _zero_stage(wrapped) >= 2
    for parameter in wrapped.parameters():
        if parameter.requires_grad and (has_room or parameter.grad is not None or id(parameter) in unsharded):
            yield parameter


def _zero_stage(wrapped: Any) -> int:
    return int(wrapped.zero_optimization_stage()) if hasattr(wrapped, "zero_optimization_stage") else 0
