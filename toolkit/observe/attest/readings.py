"""Types of `attestation.json`: the values that each rank reads, and a difference from what is expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

Values = dict[str, Any]
"""Values by the names that `attestation.json` gives them."""


class RankReading(TypedDict, total=False):
    """Everything that one rank reads: an element of `ranks` in `attestation.json`.

    docs/reference/run-folder.md says what each key is. A key is missing where the engine or the run has no such thing.
    """

    rank: int
    world_size: int
    device: str
    wrapper: str
    engine: str
    sharding: str
    dp_shard_size: int | None
    """Ranks that share one copy of the model. FSDP2 only."""
    parameter_bytes: int
    optimizer_bytes: int
    parameter_disk_bytes: int
    optimizer_disk_bytes: int
    compute_dtype: str | None
    master_dtype: str | None
    frozen_dtype: str | None
    optimizer_dtype: str | None
    offload_optimizer: str | None
    offload_param: str | None
    gradient_clipping: float
    optimizer_class: str
    optimizer_paged: bool
    adam_w_mode: bool
    """True if DeepSpeed's CPU Adam decouples weight decay. With an offloaded optimizer only."""
    gradient_bytes: int
    gradient_dtype: str | None
    reduce_dtype: str | None
    accumulate: str | None
    accumulated_gradient_bytes: int
    packing: str | None
    packing_loss_difference: float
    packing_neighbour_difference: float
    packing_mask_bytes: int
    num_params: int
    num_trainable_params: int
    activation_checkpointing: bool
    activation_checkpointing_offload: bool
    seed: int
    attn_implementation: str | None
    ddp_comm_hook: str | None
    torch_compile: bool
    compiled_modules: int
    graph_breaks: int
    neftune_noise_alpha: float | None
    loss: str
    loss_chunk_tokens: int | None
    load_in_4bit: bool
    quantized_bytes: int | None
    quantization_constant_bytes: int | None
    quantized_storage_dtype: str | None
    layout: dict[str, int] | None
    batch_group: list[int] | None
    pipeline_schedule: str
    pipeline_stages: int
    micro_batches: int
    activation_dtype: str | None
    stages: list[int]
    layers: list[int]
    tied_copy_bytes: int
    first_rows_sha256: str
    initial_weights_sha256: str | None
    clipped: bool | None
    byte_limits: dict[str, tuple[int, int]]
    """Lowest and highest bytes that the preset's sharding allows this rank, by part of the model states."""
    whole_bytes: dict[str, int]
    """Bytes of the unsharded part: the sum over ranks is no less."""
    expected_optimizer_dtype: str | None
    """Dtypes that the optimizer gives the states of this rank's tensors, by its specification."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value that is not as expected.

    >>> print(Difference(name="world_size", rank=0, expected=2, found=1))
    world_size on rank 0 is 1, expected 2
    """

    name: str
    rank: int | None
    """None for a value of all ranks together."""
    expected: Any
    found: Any

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name}{where} is {self.found}, expected {self.expected}"

    def to_json(self) -> Values:
        """Return the entry of `differences` in `attestation.json`."""
        return {"fact": self.name, "rank": self.rank, "expected": self.expected, "found": self.found}
