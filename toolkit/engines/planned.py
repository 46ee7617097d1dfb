"""What an engine decides of a plan: the bytes that one rank holds, and what of a job decides them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ADAM_BYTES = 8  # AdamW in fp32: momentum and variance


class PlannedBatch(Protocol):
    """What of a job decides the buffers."""

    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def optim(self) -> str: ...
    @property
    def has_bucket_views(self) -> bool: ...
    @property
    def keeps_whole_gradients(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of one rank, on the GPU, in host memory or on disk: what the attestation counts."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    persistent_bytes: int = 0
    """Part of `parameter_bytes` that stays on the GPU with offload: small parameters that ZeRO-3 keeps whole, in
    addition to their shards, and the constants of 4-bit weights."""

    @property
    def total_bytes(self) -> int:
        """Sum of the three states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBuffers:
    """Bytes on the GPU, by the time at which they are allocated."""

    lasting_bytes: int = 0  # during the entire run
    waiting_bytes: int = 0  # until the last accumulation step is reduced: buckets beside the gradients that wait
    load_bytes: int = 0  # while the engine is built, in addition to the parameters
    forward_layer_bytes: int = 0  # while one layer runs forward
    forward_bytes: int = 0  # at the end of the forward
    loss_bytes: int = 0  # between forward and backward
    backward_bytes: int = 0  # while the last layer runs backward, which is the first to do so
    midway_bytes: int = 0  # in addition, while ZeRO-3 prefetches head (forward) or embedding (backward) beside layers
    first_layer_bytes: int = 0  # while the first layer runs backward
    end_bytes: int = 0  # after the backward of the layers, while an embedding's gradient is computed
    accumulated_bytes: int = 0  # FSDP2's unsharded gradients (`--accumulate whole`), up to the last accumulation step
    step_bytes: int = 0
