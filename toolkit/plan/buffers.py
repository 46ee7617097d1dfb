"""What an engine holds beside the model states: buckets, gathered layers, copies while loading and stepping.

    >>> buffers(engine_of(load_preset("ddp"), world_size=2, hidden_size=64), weights).lasting_bytes
    12879104

Read in deepspeed 0.19.8, torch 2.13 and accelerate 1.15; each line says where. Not yet held against a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.plan.engine import Engine
from toolkit.plan.job import Job
from toolkit.plan.states import FP32, ModelStates
from toolkit.plan.weights import Weights
from toolkit.units import MIB

# FSDP2 in the backward: parameters of the layer and of the next one, gradients, and the reduce-scatter's input (torch,
# `_fsdp_param_group.py`, `post_backward` and `_prefetch_unshard`). Without resharding the first two are there anyway,
# and go layer by layer; frozen layers have no gradients, and the first layer has no next one.
PARAMETER_LAYERS, GRADIENT_LAYERS = 2, 2
FORWARD_LAYERS = 3  # the layer, the next one, and what it is gathered through
# DDP's first broadcast of all parameters: flat copies of this size, two on their way (torch, `distributed.py`,
# `broadcast_bucket_size`; `c10d/comm.cpp`, `broadcast_coalesced`).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2
NORM_BYTES = 8  # DeepSpeed takes gradient norms in fp64, one tensor at a time (`zero/utils.py`, `get_norm_dtype`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Bytes on the GPU, by when they are there."""

    lasting_bytes: int = 0
    """As long as the run."""
    forward_bytes: int = 0
    forward_layer_bytes: int = 0
    """While a layer goes forward."""
    loss_bytes: int = 0
    """When forward is through and backward begins."""
    backward_bytes: int = 0
    """While the last layer goes backward, which comes first."""
    first_layer_bytes: int = 0
    """While the first layer does."""
    end_bytes: int = 0
    """When layers are through, and an embedding's gradient is made."""
    accumulated_bytes: int = 0
    """Whole gradients that wait for the last micro-step, where the Trainer defers their reduction."""
    step_bytes: int = 0
    load_bytes: int = 0
    """Beside the parameters, while the model is put together."""


def buffers(engine: Engine, weights: Weights, states: ModelStates, job: Job) -> Buffers:
    """Of one engine."""
    if engine.kind == "fsdp2":
        return _fsdp2(engine, weights, states, job)
    if engine.kind == "deepspeed":
        return _zero3(engine, weights) if engine.shards_parameters else _zero12(engine, weights)
    # DDP's buckets are a second copy of the gradients, unless `gradient_as_bucket_view` is set; accelerate leaves it.
    buckets = FP32 * weights.num_trained if engine.kind == "ddp" else 0
    foreach = FP32 * weights.num_trained if job.optimizer == "foreach" else 0
    whole = FP32 * (weights.num_trained + weights.num_frozen - weights.num_quantized) + weights.quantized_bytes
    temporary = 2 * weights.largest_linear
    return Buffers(
        lasting_bytes=buckets,
        step_bytes=foreach,
        backward_bytes=temporary,
        first_layer_bytes=temporary,
        load_bytes=min(whole, BROADCASTS * BROADCAST_BYTES) if engine.kind == "ddp" else 0,
    )


def _fsdp2(engine: Engine, weights: Weights, states: ModelStates, job: Job) -> Buffers:
    """Every layer is gathered alone; final norm and head stay gathered from forward to backward."""
    element, tail = engine.element_bytes, weights.tail
    layer = weights.gathered_layer(engine.shard_ranks)
    resharded = engine.sharding != "shard_grad_op"
    whole = 0 if resharded else weights.num_trained + weights.num_frozen
    trained = 0 if weights.frozen else 1
    gradients = GRADIENT_LAYERS * trained
    # An embedding that is not the head is reduced alone, last: its gradient, and the reduce-scatter's two ends.
    alone = 0 if weights.shape.tied_embeddings else trained * weights.embedding
    return Buffers(
        # What the last unit was gathered through stays until the next gather: the tail, or a layer where it is tied.
        forward_bytes=element * ((tail if resharded else whole) + (layer if weights.shape.tied_embeddings else tail)),
        forward_layer_bytes=element * FORWARD_LAYERS * layer if resharded else 0,
        loss_bytes=element * (tail if resharded else whole),
        backward_bytes=element * (whole + (gradients + (PARAMETER_LAYERS if resharded else 0)) * layer),
        first_layer_bytes=element * (gradients + 1) * layer,
        end_bytes=element * (2 * alone + alone // engine.shard_ranks if alone else tail),
        accumulated_bytes=trained * element * weights.num_trained if job.gradient_accumulation_steps > 1 else 0,
        step_bytes=states.gradient_bytes if job.optimizer == "foreach" else 0,
        load_bytes=FP32 * weights.largest,  # one whole tensor at a time is broadcast by rank 0
    )


def _zero12(engine: Engine, weights: Weights) -> Buffers:
    """A reduction bucket from backward to step; in the step the partition's gradients flat, and in fp32 beside it."""
    share = weights.num_trained // engine.world_size
    bucket = engine.element_bytes * engine.reduce_bucket * engine.reduce_buckets
    if engine.sharding == "shard_grad_op":
        # What is in a bucket is reduced in a flat copy (`allreduce_bucket`). ZeRO-1's whole gradients cover it: as they
        # are reduced they go.
        bucket += engine.element_bytes * min(engine.reduce_bucket, weights.num_trained)
    norm = NORM_BYTES * min(weights.largest_trained, share)
    flat = (engine.element_bytes + FP32) * share
    if engine.offload_optimizer:  # one gradient at a time is put together on the GPU
        staging = engine.element_bytes * weights.largest_trained
        return Buffers(lasting_bytes=staging, backward_bytes=bucket, first_layer_bytes=bucket, step_bytes=0)
    reduced = bucket + engine.element_bytes * weights.largest_trained
    return Buffers(
        backward_bytes=reduced,
        first_layer_bytes=reduced,
        step_bytes=max(norm, flat),
        # `stage_1_and_2.py` line 440: where the GPU has room for it, a group is flattened there; later come masters
        # and gradients of zeros (`initialize_optimizer_states`).
        load_bytes=max(engine.element_bytes * weights.num_trained, 2 * FP32 * share),
    )


def _zero3(engine: Engine, weights: Weights) -> Buffers:
    """Gathered: what is used again within the reuse distance (forth and back, so half of it), the module that computes,
    and a prefetch bucket (`partitioned_param_coordinator.py`, `__params_to_release`)."""
    whole = weights.num_trained + weights.num_frozen
    kept = min(whole, engine.reuse_distance // 2 + weights.largest + engine.prefetch_bucket)
    share = weights.num_trained // engine.world_size
    sub_group = min(share, engine.sub_group)
    second = engine.element_bytes * whole // engine.machine_partition if engine.machine_partition > 1 else 0
    on_gpu = 0 if engine.offload_optimizer else (engine.element_bytes + FP32) * sub_group
    gradient = engine.element_bytes * weights.largest_trained
    return Buffers(
        lasting_bytes=engine.element_bytes * engine.reduce_bucket + second,
        forward_bytes=engine.element_bytes * kept,
        loss_bytes=engine.element_bytes * kept,
        backward_bytes=engine.element_bytes * kept + 2 * gradient,
        first_layer_bytes=engine.element_bytes * kept + 2 * gradient,
        end_bytes=engine.element_bytes * kept,
        step_bytes=on_gpu,
        # `stage3.py`: a tensor arrives whole; later masters, then a sub-group's zeros or the partition of gradients.
        load_bytes=max(
            FP32 * weights.largest,
            0 if engine.offload_optimizer else FP32 * share + max(FP32 * sub_group, engine.element_bytes * share),
        ),
    )
