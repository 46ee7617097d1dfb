"""What one rank reads back from its live objects after its first step: written, compared and shown. No torch.

>>> reading = RankReading.of(rank=1, engine="fsdp2") | RankReading.of(dp_shard_size=None)
>>> reading.to_json()  # what was not read is absent, and what was read as nothing is None
{'rank': 1, 'engine': 'fsdp2', 'dp_shard_size': None}
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from toolkit.record.columns import Bytes, Count

Dtype = str | None  # torch's name, `bfloat16`; several are joined by `+`
Setting = int | float | None
Values = dict[str, Any]  # values by the names of a reading


class RankReading(BaseModel):
    """The reading of one rank, as `attestation.json` has it. A docstring is of the fields above it too.

    What an engine or a run does not have is not set. A reader of a part returns a reading of that part alone, and `|`
    adds it to what was read before.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    rank: Annotated[int, Field(strict=True)] = 0
    world_size: Count | None = None
    device: str | None = None
    """As the Trainer has them."""
    wrapper: str | None = None
    """Class of the model's wrapper."""
    engine: str | None = None
    sharding: str | None = None
    """`none`, `ddp`, `deepspeed`, `fsdp2` or `pipeline`; `replicate`, `shard_optimizer`, `shard_grad_op`, `full_shard`
    or `hybrid_shard`."""
    parameter_disk_bytes: Bytes = None
    optimizer_disk_bytes: Bytes = None
    """DeepSpeed: the part of the next two on a disk."""
    parameter_bytes: Bytes = None
    optimizer_bytes: Bytes = None
    """Model states on this rank, [defined below](#bytes-of-the-model-states)."""
    compute_dtype: Dtype = None
    master_dtype: Dtype = None
    optimizer_dtype: Dtype = None
    """Dtypes of forward and backward, of the weights that the optimizer updates, and of its states."""
    offload_optimizer: str | None = None
    offload_param: str | None = None
    """`cpu`, `nvme` or null."""
    gradient_clipping: Setting = None
    """Clipping threshold of the gradient norm."""
    adam_w_mode: bool | None = None
    """True if DeepSpeed's CPU Adam decouples weight decay."""
    fsdp2_groups: Count | None = None
    """FSDP2: groups of parameters that are gathered together."""
    dp_shard_size: Count | None = None
    """FSDP2: ranks that share one copy of the model."""
    optimizer_class: str | None = None
    optimizer_paged: bool | None = None
    """Class of the inner optimizer, `torch.AdamW`. True if bitsandbytes may page its states."""
    frozen_dtype: Dtype = None
    """Dtype of frozen weights, 4-bit ones apart."""
    gradient_bytes: Bytes = None
    gradient_dtype: Dtype = None
    reduce_dtype: Dtype = None
    """Gradients, their dtype, and that of [their reduction](../concepts/numerics.md#gradient-reduction)."""
    quantized_bytes: Bytes = None
    quantization_constant_bytes: Bytes = None
    quantized_storage_dtype: Dtype = None
    load_in_4bit: bool | None = None
    """Packed 4-bit weights and their constants in `parameter_bytes`. Their stored dtype. True for a 4-bit base."""
    num_params: Count | None = None
    num_trainable_params: Count | None = None
    """Parameters of the complete model, adapters included."""
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    activation_checkpointing_selective: bool | None = None
    """True if a module's forward ran again in the first backward (with `torch_compile`: if configured). If its inputs
    are in host memory. If attention's outputs were kept."""
    seed: int | None = None
    """Seed of the process's random state."""
    torch_compile: bool | None = None
    compiled_modules: Count | None = None
    graph_breaks: Count | None = None
    """True if a graph was compiled; compiled modules; places where a graph ended within a layer."""
    float8_modules: Count | None = None
    """Linear layers that torchao computes in FP8. Null without one."""
    neftune_noise_alpha: Setting = None
    attn_implementation: str | dict[str, Any] | None = None
    """The noise on the embedding; the attention in use."""
    layout: dict[str, Count] | None = None
    batch_group: list[int] | None = None
    """Degrees of parallelism (`dp_replicate`, `dp_shard`, `pp`, `cp`, `sp`, `tp`, `ep`). Ranks with the same rows."""
    other_models: dict[str, dict[str, Any]] | None = None
    """Models beside the trained one (`ref_model`): `sharding`, `dtype`, `bytes` on this rank, `whole_bytes`,
    `fsdp2_groups`."""
    ddp_comm_hook: str | None = None
    """The gradient hook in use. `reduce_dtype` is then what it sends."""
    loss: str | None = None
    loss_chunk_tokens: Count | None = None
    """`chunked`, `liger` or `full`; tokens of a chunk."""
    pipeline_schedule: str | None = None
    pipeline_stages: Count | None = None
    micro_batches: Count | None = None
    """Pipelines: schedule, stages, micro-batches of a step."""
    activation_dtype: Dtype = None
    """Pipelines: dtype of activations between stages."""
    stages: list[int] | None = None
    layers: list[int] | None = None
    """Pipelines: the stages and layers of this rank."""
    tied_copy_bytes: Bytes = None
    """Pipelines: the second copy of a tied embedding."""
    kernels: list[dict[str, Any]] | None = None
    """The rank's [fast paths](#kernels)."""
    documents: str | None = None
    attention: str | None = None
    experts: str | None = None
    mixers: str | None = None
    loss_path: str | None = None
    recomputed_blocks: str | None = None
    optimizer_path: str | None = None
    """What ran, from its row in `kernels`."""
    byte_limits: dict[str, tuple[int, int]] = Field(default_factory=dict)
    whole_bytes: dict[str, int] = Field(default_factory=dict)
    """Lowest and highest bytes that the sharding allows for each part. The part without sharding."""
    expected_optimizer_dtype: Dtype = None
    """Expected dtypes of the states, if not fp32 AdamW's."""
    accumulate: str | None = None
    accumulated_gradient_bytes: Bytes = None
    """Gradients after the first of several accumulation steps: `sharded` or `whole`, and their bytes."""
    initial_weights_sha256: str | None = None
    """Digest of all weights before the first step, rounded to the compute dtype: equal on all ranks and presets of a
    comparison."""
    packing: str | None = None
    """`isolated`: documents of a pack do not attend to each other."""
    packing_loss_difference: float | None = None
    packing_neighbour_difference: float | None = None
    """Mean difference of a token's loss between packed and alone, and when only the neighbouring document changes."""
    packing_mask_bytes: Bytes = None
    """Attention masks of the test documents; 0 without a mask."""
    replicas: str | None = None
    """`equal`, `different`, `no_sync` (DDP exchanged no gradient) or `local_sgd`: the bits of every trained weight or
    shard that several data-parallel ranks hold."""
    learning_rates: list[float] | None = None
    optimizer_steps: Count | None = None
    """Learning rates of the first step; steps that the optimizer counts. Equal on all ranks where weights are
    sharded."""
    num_optimizer_params: Count | None = None
    """Trained parameters that the optimizer holds; None where an engine steps with tensors of its own."""
    first_rows_sha256: str | None = None
    batch_size: Count | None = None
    """Digest of the first step's batches. Rows of a micro-batch, as the rank's arguments or its loader say."""
    clipped: bool | None = None
    """True if the first step's gradient norm was above the threshold. A gradient ten times too large is clipped once,
    as a check, except under ZeRO-3 and fp16."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return what a rank read, unchecked: a value that nobody foresaw is recorded, and does not end its run."""
        return cls.model_construct(set(values), **values)

    def __or__(self, other: Self) -> Self:
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})

    def to_json(self) -> dict[str, Any]:
        """Return what was read, by name."""
        return self.model_dump(exclude_unset=True, warnings=False)
