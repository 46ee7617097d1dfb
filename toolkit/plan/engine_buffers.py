"""Memory of an engine apart from its model states on the GPU: buffers, CUDA's overhead, host memory and disk.

Read in the source of deepspeed 0.19.8, torch 2.13 and accelerate 1.15, named at each figure. One H200 was
compared (docs/evidence/gpu.md); published ranges for the overhead are in `docs/concepts/plan.md`.

Offloaded tensors are page-locked, and torch's allocator for such memory rounds every block up to a power of two
(`CachingHostAllocator`): a block of 5 GiB takes 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.models.optimizers import OPTIMIZERS
from toolkit.plan.engine_settings import EngineSettings
from toolkit.plan.model_states import ADAM_BYTES, FP32_BYTES, JobWeights, ModelStates
from toolkit.plan.planned_job import PlannedJob
from toolkit.units import GIB, MIB

# FSDP2 in the backward: parameters of the layer and of the next one, gradients, and the input of the reduce-scatter
# (torch, `_fsdp_param_group.py`, `post_backward` and `_prefetch_unshard`). Without resharding all parameters are there
# anyway, and are freed layer by layer; frozen layers have no gradients, and the first layer has no next one.
PARAMETER_LAYERS = 2
FORWARD_LAYERS = 3  # the layer, the next one, and the buffer it is gathered through
# DDP first broadcasts all parameters through flat copies of this size, two at a time (torch, `distributed.py`,
# `broadcast_bucket_size`; `c10d/comm.cpp`, `broadcast_coalesced`).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2
NORM_BYTES = 8  # DeepSpeed computes gradient norms in fp64, one tensor at a time (`zero/utils.py`, `get_norm_dtype`)

# A CUDA context with cuBLAS and its kernels: 0.5 to 0.9 GiB are reported.
CONTEXT_BYTES = 700 * MIB
# The first NCCL communicator: 0.4 to 1.5 GiB are reported. Ranks that also form groups need a second one.
COMMUNICATOR_BYTES = 800 * MIB
# torch's allocator takes memory from the driver in blocks of 2 MiB (small) and 20 MiB (large).
ROUNDING_BYTES = 64 * MIB
# Reserved beside what is allocated at the peak: blocks that fit nothing else. Model states stay where they are;
# activations come and go with every layer, and the full logits are copied, cast and shifted by a row. Shares of these,
# from what fms-acceleration measured with both figures on one GPU (21 jobs); they hold for ZeRO-2 and ZeRO-3 of other
# sources (docs/evidence/plan-accuracy.md). FSDP1 reserves more, because of `recordStream`, which FSDP2 does not use.
UNUSABLE_OF_ACTIVATIONS, UNUSABLE_OF_LOGITS = 0.12, 0.45
# The same with `expandable_segments`, whose blocks grow in pages of 2 MiB: a block that is too small is no loss. What
# stays was not measured; a part of the rounding of each tensor, so the same for both.
UNUSABLE_IF_EXPANDABLE = 0.03
# In a full fine-tune under DeepSpeed, of what is allocated in the step: flat partitions, their fp32 copies and buckets
# come and go beside states that stay. Six such jobs on one H200 reserved 3.7 to 10.4 % more than without this term.
UNUSABLE_OF_DEEPSPEED_STEP = 0.05
# The largest logits of those jobs. Two public jobs with 34 and 47 GiB of logits fitted GPUs on which the share of 45 %
# alone would have taken 15 and 21 GiB.
LARGEST_FITTED_LOGITS_BYTES = 18 * GIB

# The training script with deepspeed and peft imported and nothing loaded: at most 476 MB resident (torch's CPU build).
# CUDA's libraries add to it on a GPU; that has not been measured.
PROCESS_BYTES = 500 * MIB


def overhead_bytes(
    engine: EngineSettings,
    *,
    activation_bytes: int,
    logits_bytes: int,
    step_bytes: int = 0,
    expandable_segments: bool = False,
) -> int:
    """Return the GPU memory that belongs to no tensor: CUDA context, NCCL, rounding and fragmentation.

    `step_bytes` are allocated in the step of a full fine-tune.
    """
    shared = min(logits_bytes, LARGEST_FITTED_LOGITS_BYTES)
    unusable = int(UNUSABLE_OF_ACTIVATIONS * activation_bytes + UNUSABLE_OF_LOGITS * shared)
    if engine.kind == "deepspeed":
        unusable += int(UNUSABLE_OF_DEEPSPEED_STEP * step_bytes)
    if expandable_segments:
        unusable = int(UNUSABLE_IF_EXPANDABLE * (activation_bytes + logits_bytes))
    return driver_bytes(engine) + ROUNDING_BYTES + unusable


def driver_bytes(engine: EngineSettings) -> int:
    """Return what is in use beside torch's allocator: CUDA's context and NCCL's communicators."""
    return CONTEXT_BYTES + engine.num_groups * COMMUNICATOR_BYTES


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


def engine_buffers(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> EngineBuffers:
    """Return the buffers of one rank."""
    if engine.kind == "fsdp2":
        return _fsdp2(engine, weights, states, job)
    if engine.kind == "deepspeed":
        return _zero3(engine, weights) if engine.shards_parameters else _zero12(engine, weights)
    trained_bytes = engine.trained_bytes
    buckets = trained_bytes * weights.num_trained if engine.kind == "ddp" else 0
    # As views of them, gradients take nothing of their own, but for those of earlier accumulation steps.
    views, accumulates = engine.kind == "ddp" and job.has_bucket_views, job.gradient_accumulation_steps > 1
    casts = engine.trained_bytes == FP32_BYTES  # weights that are held in bf16 are not cast
    cast_weight = 2 * (weights.largest_trained if weights.adapters else weights.largest_linear) * casts
    # A tied head's gradient waits outside of its bucket until the embedding's is added.
    tied = views and weights.shape.tied_embeddings and not weights.adapters
    head = trained_bytes * weights.embedding if tied else 0
    return EngineBuffers(
        lasting_bytes=0 if views else buckets,
        waiting_bytes=buckets if views and accumulates else 0,
        step_bytes=OPTIMIZERS[job.optim].step_copies * trained_bytes * weights.num_trained,
        backward_bytes=cast_weight + head,
        first_layer_bytes=cast_weight + head,
        load_bytes=min(states.parameter_bytes, BROADCASTS * BROADCAST_BYTES) if engine.kind == "ddp" else 0,
    )


def _fsdp2(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> EngineBuffers:
    """Layers are gathered one by one; final norm and head stay gathered from forward to backward."""
    element, reduced, is_tied = engine.element_bytes, engine.reduce_bytes, weights.shape.tied_embeddings
    layer = weights.largest_layer(engine.ranks_sharing)
    # accelerate's root unit: final norm and head
    # without an encoder of images, whose blocks are units of their own
    outer = sum(tensor.num_elements for tensor in weights.shape.outer if not tensor.in_tower)
    root = outer - (0 if is_tied else weights.embedding)
    root += weights.embedding if engine.unties_head and is_tied else 0
    resharded = engine.sharding != "shard_grad_op"
    unsharded = 0 if resharded else weights.num_trained + weights.num_frozen
    trained = 0 if weights.adapters else 1
    gradients = (element + reduced) * trained * layer  # and what the reduce-scatter takes
    # An untied embedding is reduced last and alone: its gradient, and both ends of the reduce-scatter.
    embedding = 0 if is_tied else trained * weights.embedding
    # The buffer that the last unit was gathered through stays until the next gather: the root unit's, or a layer's if
    # the head is tied.
    last_gathered = layer if is_tied else root
    return EngineBuffers(
        forward_bytes=element * ((root if resharded else unsharded) + last_gathered),
        forward_layer_bytes=element * FORWARD_LAYERS * layer if resharded else 0,
        loss_bytes=element * (root if resharded else unsharded),
        backward_bytes=element * (unsharded + (PARAMETER_LAYERS * layer if resharded else 0)) + gradients,
        first_layer_bytes=element * layer + gradients,
        end_bytes=(element + reduced) * embedding + reduced * (embedding // engine.shard_ranks) or element * root,
        accumulated_bytes=reduced * weights.num_trained if job.keeps_whole_gradients else 0,
        step_bytes=OPTIMIZERS[job.optim].step_copies * states.gradient_bytes,
        load_bytes=weights.largest_bytes(element),  # rank 0 broadcasts one complete tensor at a time
    )


def _zero12(engine: EngineSettings, weights: JobWeights) -> EngineBuffers:
    """A reduction bucket until the step; in the step the partition's flat gradients and their fp32 copy."""
    share = weights.num_trained // engine.world_size
    bucket = engine.element_bytes * engine.reduce_bucket * engine.num_reduce_buckets
    if engine.sharding == "shard_grad_op":
        # A bucket is reduced in a flat copy (`allreduce_bucket`). ZeRO-1 frees gradients as they are reduced, so that
        # there is room for the copy.
        bucket += engine.element_bytes * min(engine.reduce_bucket, weights.num_trained)
    norm = NORM_BYTES * min(weights.largest_trained, share)
    flat = (engine.element_bytes + FP32_BYTES) * share
    if engine.offload_optimizer:  # gradients pass through the GPU one at a time
        staging = engine.element_bytes * weights.largest_trained
        return EngineBuffers(lasting_bytes=staging, backward_bytes=bucket, first_layer_bytes=bucket, step_bytes=0)
    reduced = bucket + engine.element_bytes * weights.largest_trained
    return EngineBuffers(
        backward_bytes=reduced,
        first_layer_bytes=reduced,
        step_bytes=max(norm, flat),
        # `stage_1_and_2.py` line 440: a group is flattened on the GPU if it has room for it; later come master weights
        # and gradients of zeros (`initialize_optimizer_states`).
        load_bytes=max(engine.element_bytes * weights.num_trained, 2 * FP32_BYTES * share),
    )


def _zero3(engine: EngineSettings, weights: JobWeights) -> EngineBuffers:
    """Gathered at once: parameters that are used again within the reuse distance, or that have been prefetched.

    The reuse distance counts uses in forward and backward, so it covers half as many parameters. Each module, also one
    without parameters, prefetches at least one tensor: soon as many are there as may be, and the one that exceeds it
    (`partitioned_param_coordinator.py`, `__params_to_release` and `_fetch_sub_module_impl`).
    """
    num_params, element = weights.num_trained + weights.num_frozen, engine.element_bytes
    copies = engine.world_size > 1 or engine.offload_param is not None  # else `NoGatherHandle`: the shard itself
    live = engine.live_parameters if engine.prefetch_bucket else 0
    held = max(engine.reuse_distance // 2, live, weights.largest) + weights.largest_in_layer
    gathered = element * min(num_params, held) * copies
    with_embedding = element * min(num_params, max(held, live + weights.largest)) * copies
    share = weights.num_trained // engine.world_size
    sub_group = min(share, engine.sub_group)
    secondary = element * num_params // engine.secondary_partition if engine.secondary_partition > 1 else 0
    backward = gathered + 2 * element * weights.largest_trained
    # `stage3.py`: tensors arrive whole; later come master weights, then a sub-group of zeros or the gradient partition.
    build = FP32_BYTES * share + max(FP32_BYTES * sub_group, element * share)
    return EngineBuffers(
        lasting_bytes=element * engine.reduce_bucket + secondary,
        forward_bytes=gathered,
        loss_bytes=gathered,
        backward_bytes=backward,
        midway_bytes=with_embedding - gathered,
        first_layer_bytes=backward,
        end_bytes=gathered,
        step_bytes=0 if engine.offload_optimizer else (element + FP32_BYTES) * sub_group,
        load_bytes=max(weights.largest_bytes(element), 0 if engine.offload_optimizer else build),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of one node, all its ranks together."""

    loading_bytes: int
    training_bytes: int
    before_first_step_bytes: int  # offloaded states that exist before the first step; Adam's states are created in it
    disk_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The larger of loading and training."""
        return max(self.loading_bytes, self.training_bytes)


def host_memory(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> HostMemory:
    """Return the host memory of the node with the most ranks."""
    ranks = min(engine.world_size, job.gpus_per_node)
    processes, offloaded = ranks * PROCESS_BYTES, ranks * sum(_offloaded_blocks(engine, weights, states))
    # NVMe has master weights, Adam's states and gradients, and parameter shards (docs/how-to/optimizers.md).
    on_disk = 0
    if engine.offload_optimizer == "nvme":
        on_disk += states.optimizer_bytes + FP32_BYTES * _optimizer_elements(states)
    if engine.offload_param == "nvme":
        on_disk += states.parameter_bytes - states.persistent_bytes
    created = 0  # Adam's states, which DeepSpeed too creates in the first step (`initialize_optimizer_states`)
    if engine.offload_optimizer == "cpu":
        sharded = states.gradient_bytes + states.optimizer_bytes
        created = sharded if engine.kind == "fsdp2" else ADAM_BYTES * _optimizer_elements(states)
    staged = _staged(engine, weights, states, ranks) if job.async_save else 0
    return HostMemory(
        loading_bytes=processes + _loading(engine, weights, ranks) + (offloaded if engine.shards_parameters else 0),
        before_first_step_bytes=offloaded,
        training_bytes=processes + offloaded + ranks * (created + checkpointed_on_host(engine, weights, job)) + staged,
        disk_bytes=ranks * on_disk,
    )


def checkpointed_on_host(engine: EngineSettings, weights: JobWeights, job: PlannedJob) -> int:
    """Return what one rank keeps there of a micro-batch: the input of each layer, in page-locked blocks."""
    if not (job.activation_checkpointing and job.activation_checkpointing_offload):
        return 0
    element = FP32_BYTES if engine.autocasts and not weights.frozen else engine.element_bytes
    rows = -(-job.tokens_per_forward // engine.ranks_per_sequence)
    block = rows * weights.shape.hidden_size * element
    return weights.shape.num_layers * (1 << (block - 1).bit_length())


def _loading(engine: EngineSettings, weights: JobWeights, ranks: int) -> int:
    """Weights until they are on the GPU: every rank's own, under FSDP2 only rank 0's
    (`fsdp_cpu_ram_efficient_loading`), under ZeRO-3 one tensor at a time. If an engine shards 4-bit weights, rank 0
    quantizes all of them first (`toolkit/train/model/four_bit.py`)."""
    if engine.sharded_at_load:  # each rank reads its own parts of one tensor after the other
        return ranks * weights.largest_bytes(engine.element_bytes)
    if engine.kind == "fsdp2" or (engine.shards_parameters and weights.in_4bit):
        return weights.held_bytes(engine.element_bytes)
    largest_or_all = weights.largest_bytes if engine.shards_parameters else weights.held_bytes
    return ranks * largest_or_all(engine.element_bytes)


def _staged(engine: EngineSettings, weights: JobWeights, states: ModelStates, ranks: int) -> int:
    """Copies of what `--async_save` writes: each rank's shards. Of a model that was sharded at load rank 0 gathers the
    weights instead; adapters, which it writes at once, are not copied."""
    trained = FP32_BYTES * weights.num_trained
    if engine.sharded_at_load:
        return ranks * states.optimizer_bytes + (0 if weights.num_frozen else trained)
    share = trained // engine.shard_ranks if weights.num_frozen else states.parameter_bytes
    return ranks * (share + states.optimizer_bytes)


def _optimizer_elements(states: ModelStates) -> int:
    """Elements of a rank's optimizer partition under DeepSpeed."""
    return states.optimizer_bytes // (ADAM_BYTES + FP32_BYTES)


def _offloaded_blocks(engine: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
    """Blocks of host memory that one rank allocates when its engine is built."""
    if engine.offload_optimizer is None:
        return
    if engine.kind == "fsdp2":
        yield states.parameter_bytes - states.persistent_bytes
        return
    elements = _optimizer_elements(states)

    def rounded(size: int) -> int:  # to a power of two if the memory is page-locked
        return 1 << (size - 1).bit_length() if engine.pins_memory and size else size

    if engine.offload_optimizer == "cpu":
        yield rounded(FP32_BYTES * elements)  # master weights
    yield rounded(FP32_BYTES * elements)  # gradients as the optimizer reads them
    # Updated parameters on their way back to the GPU, or ZeRO-3's partition of the gradients.
    yield rounded(engine.element_bytes * elements)
    if not engine.shards_parameters:
        yield rounded(engine.element_bytes * weights.largest_trained)
    elif engine.offload_param == "cpu":
        yield rounded(states.parameter_bytes - states.persistent_bytes)
    if engine.offload_optimizer == "nvme":
        # Buffers that a sub-group is read into (docs/how-to/optimizers.md).
        yield 4 * FP32_BYTES * min(elements, engine.sub_group)
