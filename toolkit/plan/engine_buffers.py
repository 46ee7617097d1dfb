"""GPU memory of an engine apart from the model states: buckets, gathered layers, copies, and CUDA's overhead.

    >>> from toolkit.plan.engine_settings import EngineSettings
    >>> engine = EngineSettings(kind="ddp", sharding="replicate", shards_parameters=False, world_size=2, shard_ranks=1)
    >>> overhead_bytes(engine, allocated_bytes=0) == CONTEXT_BYTES + COMMUNICATOR_BYTES + ROUNDING_BYTES
    True

Read in the source of deepspeed 0.19.8, torch 2.13 and accelerate 1.15, named at each figure. None of it has been
compared with a GPU yet; published ranges for the overhead are in `docs/concepts/plan.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.models.optimizers import OPTIMIZERS
from toolkit.plan.engine_settings import EngineSettings
from toolkit.plan.model_states import FP32_BYTES, JobWeights, ModelStates
from toolkit.plan.planned_job import PlannedJob
from toolkit.units import MIB

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
# Share of the allocated memory that is reserved and unusable at the peak. Reported: ZeRO-2 36.2 of 36.5 GB used; FSDP1
# 43.9 of 70.1 GB, because of streams and `recordStream`, which FSDP2 does not use. The others are assumed.
FRAGMENTATION = {"none": 0.02, "ddp": 0.02, "pipeline": 0.02, "fsdp2": 0.04, "replicate": 0.02, "shard_optimizer": 0.02}
FRAGMENTATION |= {"shard_grad_op": 0.02, "full_shard": 0.06, "hybrid_shard": 0.06}


def overhead_bytes(engine: EngineSettings, *, allocated_bytes: int) -> int:
    """Return the GPU memory that belongs to no tensor: CUDA context, NCCL, rounding and fragmentation."""
    key = engine.sharding if engine.kind == "deepspeed" else engine.kind
    fragmentation = int(allocated_bytes * FRAGMENTATION[key])
    return CONTEXT_BYTES + engine.num_groups * COMMUNICATOR_BYTES + ROUNDING_BYTES + fragmentation


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBuffers:
    """Bytes on the GPU, by the time at which they are allocated."""

    lasting_bytes: int = 0
    """During the entire run."""
    forward_bytes: int = 0
    """At the end of the forward."""
    forward_layer_bytes: int = 0
    """While one layer runs forward."""
    loss_bytes: int = 0
    """Between forward and backward."""
    backward_bytes: int = 0
    """While the last layer runs backward, which is the first to do so."""
    first_layer_bytes: int = 0
    """While the first layer runs backward."""
    end_bytes: int = 0
    """After the backward of the layers, while an embedding's gradient is computed."""
    accumulated_bytes: int = 0
    """FSDP2's unsharded gradients waiting for the last accumulation step (`--accumulate whole`)."""
    step_bytes: int = 0
    load_bytes: int = 0
    """While the engine is built, in addition to the parameters."""


def engine_buffers(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> EngineBuffers:
    """Return the buffers of one rank."""
    if engine.kind == "fsdp2":
        return _fsdp2(engine, weights, states, job)
    if engine.kind == "deepspeed":
        return _zero3(engine, weights) if engine.shards_parameters else _zero12(engine, weights)
    # DDP's buckets are a second copy of the gradients, unless `gradient_as_bucket_view` is set; accelerate does not.
    buckets = FP32_BYTES * weights.num_trained if engine.kind == "ddp" else 0
    cast_weight = 2 * (weights.largest_trained if weights.frozen else weights.largest_linear)
    return EngineBuffers(
        lasting_bytes=buckets,
        step_bytes=OPTIMIZERS[job.optim].step_copies * FP32_BYTES * weights.num_trained,
        backward_bytes=cast_weight,
        first_layer_bytes=cast_weight,
        load_bytes=min(states.parameter_bytes, BROADCASTS * BROADCAST_BYTES) if engine.kind == "ddp" else 0,
    )


def _fsdp2(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> EngineBuffers:
    """Layers are gathered one by one; final norm and head stay gathered from forward to backward."""
    element, reduced, root = engine.element_bytes, engine.reduce_bytes, weights.root_unit
    layer = weights.largest_gathered_layer(engine.ranks_sharing)
    if engine.unties_head and weights.shape.tied_embeddings:
        root += weights.embedding
    resharded = engine.sharding != "shard_grad_op"
    unsharded = 0 if resharded else weights.num_trained + weights.num_frozen
    trained = 0 if weights.frozen else 1
    gradients = (element + reduced) * trained * layer  # and what the reduce-scatter takes
    # An untied embedding is reduced last and alone: its gradient, and both ends of the reduce-scatter.
    embedding = 0 if weights.shape.tied_embeddings else trained * weights.embedding
    # The buffer that the last unit was gathered through stays until the next gather: the root unit's, or a layer's if
    # the head is tied.
    last_gathered = layer if weights.shape.tied_embeddings else root
    return EngineBuffers(
        forward_bytes=element * ((root if resharded else unsharded) + last_gathered),
        forward_layer_bytes=element * FORWARD_LAYERS * layer if resharded else 0,
        loss_bytes=element * (root if resharded else unsharded),
        backward_bytes=element * (unsharded + (PARAMETER_LAYERS * layer if resharded else 0)) + gradients,
        first_layer_bytes=element * layer + gradients,
        end_bytes=(
            (element + reduced) * embedding + reduced * (embedding // engine.shard_ranks)
            if embedding
            else element * root
        ),
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
    """Gathered at once: parameters that are used again within the reuse distance, the running module, and a prefetch.

    The reuse distance counts uses in forward and backward, so it covers half as many parameters
    (`partitioned_param_coordinator.py`, `__params_to_release`).
    """
    num_params = weights.num_trained + weights.num_frozen
    gathered = min(num_params, engine.reuse_distance // 2 + weights.largest + engine.prefetch_bucket)
    gathered_bytes = engine.element_bytes * gathered
    share = weights.num_trained // engine.world_size
    sub_group = min(share, engine.sub_group)
    secondary = 0
    if engine.secondary_partition > 1:
        secondary = engine.element_bytes * num_params // engine.secondary_partition
    gradient = engine.element_bytes * weights.largest_trained
    # `stage3.py`: tensors arrive whole; later come master weights, then a sub-group of zeros or the gradient partition.
    build = FP32_BYTES * share + max(FP32_BYTES * sub_group, engine.element_bytes * share)
    return EngineBuffers(
        lasting_bytes=engine.element_bytes * engine.reduce_bucket + secondary,
        forward_bytes=gathered_bytes,
        loss_bytes=gathered_bytes,
        backward_bytes=gathered_bytes + 2 * gradient,
        first_layer_bytes=gathered_bytes + 2 * gradient,
        end_bytes=gathered_bytes,
        step_bytes=0 if engine.offload_optimizer else (engine.element_bytes + FP32_BYTES) * sub_group,
        load_bytes=max(weights.largest_bytes(engine.element_bytes), 0 if engine.offload_optimizer else build),
    )
