"""Types of `attestation.json`: the values that each rank reads, and a difference from what is expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

Values = dict[str, Any]
"""Values by the names that `attestation.json` gives them."""


class EngineReading(TypedDict, total=False):
    """Values that depend on the engine; a key is missing where the engine has no such thing."""

    engine: str
    """`none`, `ddp`, `data_parallel`, `deepspeed` or `fsdp2`."""
    sharding: str
    dp_shard_size: int | None
    """Ranks that share one copy of the model. FSDP2 only."""
    parameter_bytes: int
    """Bytes of parameters that this rank holds between steps, on any device."""
    optimizer_bytes: int
    """Bytes of optimizer states, and of fp32 master weights where the engine keeps them apart."""
    parameter_disk_bytes: int
    """The part of `parameter_bytes` that is in NVMe swap files only. DeepSpeed only, as the next."""
    optimizer_disk_bytes: int
    compute_dtype: str | None
    master_dtype: str | None
    frozen_dtype: str | None
    """Dtype of the weights that are not trained, 4-bit ones apart; None where all are."""
    optimizer_dtype: str | None
    offload_optimizer: str | None
    """`cpu`, `nvme` or None."""
    offload_param: str | None
    gradient_clipping: float
    optimizer_class: str
    """Package and class of the optimizer inside accelerate's and DeepSpeed's: `torch.AdamW`."""
    optimizer_paged: bool
    """True if its states may leave the GPU page by page (bitsandbytes)."""
    adam_w_mode: bool
    """True if DeepSpeed's CPU Adam decouples weight decay. With an offloaded optimizer only."""


class GradientReading(TypedDict, total=False):
    """Gradients between their reduction and the first optimizer step."""

    gradient_bytes: int
    gradient_dtype: str | None
    reduce_dtype: str | None
    """The dtype in which ranks exchange gradients."""


class AccumulationReading(TypedDict, total=False):
    """Gradients between the accumulation steps of the first optimizer step."""

    accumulate: str | None
    """`sharded` or `whole`; None where the first step has one accumulation step."""
    accumulated_gradient_bytes: int


class PackingReading(TypedDict, total=False):
    """Isolation of packed documents; `packing` alone, and None, without packing."""

    packing: str | None
    """`isolated` or `leaks`."""
    packing_loss_difference: float
    """Largest mean absolute difference of a token's loss, in its pack and alone."""
    packing_neighbour_difference: float
    """The same with another document beside it in the pack."""
    packing_mask_bytes: int
    """Attention masks that transformers made for the test documents; 0 without a mask."""


class ByteReading(TypedDict, total=False):
    """Bytes that the preset's sharding allows on this rank, by part (`parameter`, `gradient`, `optimizer`)."""

    byte_limits: dict[str, tuple[int, int]]
    """Lowest and highest."""
    whole_bytes: dict[str, int]
    """Bytes of the unsharded part: the sum over ranks is no less."""
    expected_optimizer_dtype: str | None
    """Dtypes that the optimizer gives the states of this rank's tensors, by its specification."""


class RankReading(EngineReading, GradientReading, AccumulationReading, PackingReading, ByteReading, total=False):
    """Everything that one rank reads: an element of `ranks` in `attestation.json`."""

    rank: int
    world_size: int
    device: str
    wrapper: str
    """Class that wraps the model."""
    num_params: int
    num_trainable_params: int
    activation_checkpointing: bool
    seed: int
    attn_implementation: str | None
    ddp_comm_hook: str | None
    activation_checkpointing_offload: bool
    torch_compile: bool
    compiled_modules: int
    """Layers that run compiled; 1 where the model is compiled as a whole."""
    graph_breaks: int
    """Places where the compiler's graph ended within a layer in the first step."""
    neftune_noise_alpha: float | None
    loss: str
    loss_chunk_tokens: int | None
    load_in_4bit: bool
    quantized_bytes: int | None
    """The part of `parameter_bytes` that 4-bit weights take; None without them, as the next two."""
    quantization_constant_bytes: int | None
    """The part of `parameter_bytes` that decodes them: whole on every rank."""
    quantized_storage_dtype: str | None
    """Dtype as which packed 4-bit weights are stored, and sharded."""
    layout: dict[str, int] | None
    """Degrees of parallelism from the live meshes and process groups; None for data parallelism alone."""
    pipeline_schedule: str
    """The order in which torch ran the stages. Pipelines only, as the next six."""
    pipeline_stages: int
    micro_batches: int
    activation_dtype: str | None
    """Dtype in which stages hand activations and their gradients on."""
    stages: list[int]
    """The stages of this rank."""
    layers: list[int]
    """The layers of this rank's stages."""
    tied_copy_bytes: int
    """The part of `parameter_bytes` that is a second copy of the embedding, for the head."""
    batch_group: list[int] | None
    """The ranks that train on the same rows as this one; None for data parallelism alone."""
    first_rows_sha256: str
    """The batches of the first optimizer step that this rank trains on."""
    initial_weights_sha256: str | None
    clipped: bool | None
    """True if the first step's gradient norm was above the clipping threshold; None if the norm is unknown."""


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
