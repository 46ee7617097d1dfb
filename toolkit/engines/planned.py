"""What an engine decides of a plan: its settings at one world size, and the bytes that one rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from toolkit.models.job_weights import FP32_BYTES, JobWeights
from toolkit.models.optimizers import OptimizerSpec, UpdatedTensor
from toolkit.models.shape import Tensor
from toolkit.parallel.layout import ParallelLayout

ADAM_BYTES = 8  # AdamW in fp32: momentum and variance
SUB_GROUP = 1_000_000_000  # elements: DeepSpeed's default


class PlannedEngine(Protocol):
    """The part of an engine that a plan asks. Sizes are bytes of one rank; `settings` are the engine's own."""

    name: str
    gathers_layers: bool
    autocasts: bool
    has_flat_states: bool
    uses_ddp: bool
    fragments_in_step: float

    def model_states(self, settings: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec) -> ModelStates: ...
    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers: ...
    def offloaded_blocks(self, settings: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]: ...
    def created_on_host(self, states: ModelStates) -> int: ...
    def loads_once(self, settings: EngineSettings, weights: JobWeights) -> bool: ...


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
class EngineSettings:
    """Everything about an engine that decides bytes, once the world size is known. Bucket sizes are in elements."""

    traits: PlannedEngine
    """What wraps the model; that of one process where DDP has nothing to reduce."""
    sharding: str
    shards_parameters: bool
    world_size: int
    shard_ranks: int  # ranks that share one copy of the model
    rank: int = 0
    element_bytes: int = 2  # bytes per element of a parameter in the compute dtype
    trained_bytes: int = 4  # per element of a trained weight and its gradient, outside of DeepSpeed
    offload_optimizer: str | None = None
    offload_param: str | None = None
    reduce_bucket: int = 0  # size of each buffer that gradients are reduced in
    num_reduce_buckets: int = 1
    prefetch_bucket: int = 0
    persistence_threshold: int = 0
    reuse_distance: int = 0
    live_parameters: int = 0  # gathered ones, above which ZeRO-3 prefetches nothing
    sub_group: int = SUB_GROUP
    secondary_partition: int = 1
    """ZeRO++ (hpZ): ranks of one node that share a second copy of the parameters; 1 if there is none."""
    pins_memory: bool = True  # true if offloaded tensors are in page-locked memory
    layout: ParallelLayout | None = None  # how the ranks are divided; None for data parallelism alone
    sharded_at_load: bool = False  # transformers shards the model while it loads it, and reduces gradients in fp32

    def ranks_sharing(self, tensor: Tensor) -> int:
        """Return how many ranks share a tensor, which tensor and expert parallelism have split already.

        Experts have a mesh of their own, and adapters are attached after transformers sharded the model.
        """
        if self.layout is None or not self.sharded_at_load:
            return self.shard_ranks
        if ".lora_" in tensor.name:
            return 1
        return self.layout.expert_shard if self.layout.ep > 1 and tensor.is_expert else self.shard_ranks

    @property
    def tp(self) -> int:
        """Ranks that each layer is split over."""
        return 1 if self.layout is None else self.layout.tp

    @property
    def unties_head(self) -> bool:
        """True if a tied head is gathered and reduced beside its embedding: transformers splits the two one by one."""
        return self.sharded_at_load and self.tp > 1 and self.traits.gathers_layers

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence."""
        return 1 if self.layout is None else self.layout.cp * self.layout.sp

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient while it is reduced."""
        return 4 if self.sharded_at_load else self.element_bytes

    @property
    def num_groups(self) -> int:
        """Groups of ranks that communicate, each with a communicator of its own."""
        if self.world_size == 1:
            return 0
        if self.layout is None:
            return 2 if self.sharding == "hybrid_shard" else 1
        if not self.sharded_at_load and self.layout.pp == 1:  # model states are shared among all, sequences among some
            return 2
        return sum(degree > 1 for degree in self.layout.degrees().values())

    @property
    def autocasts(self) -> bool:
        """True if fp32 weights are cast where they are used; those of DeepSpeed and FSDP2 are bf16 by then."""
        return self.traits.autocasts and self.element_bytes < self.trained_bytes


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


def state_bytes(
    optimizer: OptimizerSpec, weights: JobWeights, share: Callable[[Tensor], int], engine: EngineSettings
) -> int:
    """States of the rows of each tensor that a rank holds. torch's have the dtype of what they update."""

    def held(tensor: Tensor, count: int) -> UpdatedTensor:
        first, *others = tensor.shape or (1,)
        return UpdatedTensor(
            shape=(first * share(tensor) // max(tensor.num_elements, 1), *others),
            count=count,
            is_embedding=tensor.is_embedding,
            is_hidden_matrix=tensor.is_linear_weight and tensor not in weights.shape.outer,
        )

    held_bytes = optimizer.state_bytes(held(tensor, count) for tensor, count in weights.trained)
    return held_bytes * engine.trained_bytes // FP32_BYTES if optimizer.class_name.startswith("torch.") else held_bytes
