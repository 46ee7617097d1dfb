"""Gradients that a rank holds between two accumulation steps: read once, after the first one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.presets import Preset
from toolkit.presets.accumulation import SHARDED, WHOLE
from toolkit.presets.shard_bytes import shard_byte_limits
from toolkit.train.attest.read_deepspeed import deepspeed_gradients
from toolkit.train.attest.read_fsdp2 import fsdp2_compute_dtype, is_fsdp2, unsharded_gradients
from toolkit.train.attest.tensors import full_shape, local_bytes, uncompiled


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatedGradients:
    """Live gradients of one rank between accumulation steps."""

    accumulate: str
    """`sharded`, `whole`, or both names joined by `+`."""
    num_bytes: int
    shapes: list[tuple[int, ...]]
    """Unsharded shapes of the parameters that have a gradient."""
    element_bytes: int

    def byte_limits(self, preset: Preset, *, ranks: int) -> tuple[int, int]:
        """Return the lowest and highest bytes of these gradients, if `ranks` share one copy of the model."""
        if self.accumulate == SHARDED and "gradient" in preset.sharded_parts:
            return shard_byte_limits(preset, "gradient", self.shapes, self.element_bytes, ranks=ranks)
        whole = sum(torch.Size(shape).numel() for shape in self.shapes) * self.element_bytes
        return whole, whole


def read_accumulated(trainer: Any) -> AccumulatedGradients | None:
    """Read the gradients that wait for the next accumulation step; None where there are none."""
    wrapped = uncompiled(trainer.model_wrapped)
    shards, whole = _gradients(wrapped)
    held = [*shards, *whole]
    if not held:
        return None
    names = [name for name, tensors in ((SHARDED, shards), (WHOLE, whole)) if tensors]
    return AccumulatedGradients(
        accumulate="+".join(names),
        num_bytes=local_bytes(held),
        shapes=[full_shape(p) for p in _with_gradient(wrapped)],
        element_bytes=fsdp2_compute_dtype(wrapped).itemsize if whole and is_fsdp2(wrapped) else held[0].element_size(),
    )


def _gradients(wrapped: Any) -> tuple[list[Any], list[Any]]:
    """Shards, and whole gradients."""
    own = [p.grad for p in wrapped.parameters() if p.grad is not None]
    if is_fsdp2(wrapped):
        return own, [gradient for _, gradient in unsharded_gradients(wrapped)]
    if hasattr(wrapped, "zero_optimization_stage") and wrapped.zero_optimization_stage() >= 2:
        return deepspeed_gradients(wrapped), own
    return [], own


def _with_gradient(wrapped: Any) -> Iterator[Any]:
    """The trained parameters that a gradient is held of; DeepSpeed's flat buffers hold those of all."""
    unsharded = {id(parameter) for parameter, _ in unsharded_gradients(wrapped)} if is_fsdp2(wrapped) else set()
    flat = hasattr(wrapped, "zero_optimization_stage")
    for parameter in wrapped.parameters():
        if parameter.requires_grad and (flat or parameter.grad is not None or id(parameter) in unsharded):
            yield parameter
