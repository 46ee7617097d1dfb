"""What one GPU sends in an optimizer step, by collective: from the preset's files and the model's tensors.

    >>> job = TrafficJob(preset=load_preset("zero2"), shape=shape, world_size=8)
    >>> communication_bytes(step_collectives(job))

Read in deepspeed 0.19.8, torch 2.13 and accelerate 1.15, and held against collectives counted in real runs of two and
four CPU ranks (docs/communication.md). Left out: the few bytes of losses, norms and flags.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from toolkit.models.shape import Layer, is_embedding
from toolkit.plan.engine import zero_block
from toolkit.plan.traffic import Collective, TrafficJob, elements_of
from toolkit.plan.zero3_gathers import zero3_gathers

DDP_BUCKET_BYTES = 25 * 2**20


def step_collectives(job: TrafficJob) -> tuple[Collective, ...]:
    """Everything that travels in one optimizer step of `gradient_accumulation_steps` micro-steps."""
    if job.world_size == 1:
        return ()
    if job.preset.engine == "fsdp2":
        return tuple(_fsdp2(job))
    if job.preset.engine != "deepspeed":
        return tuple(_ddp(job))
    if "parameter" in job.preset.sharded_parts:
        return tuple(_zero3(job))
    return tuple(_zero12(job))


def _ddp(job: TrafficJob) -> Iterator[Collective]:
    """fp32 gradients of fp32 weights, in the last micro-step; in buckets of 25 MiB."""
    payload = 4 * elements_of(job.trained)
    calls = math.ceil(payload / DDP_BUCKET_BYTES)
    yield Collective(
        name="all_reduce", purpose="gradients", payload_bytes=payload, group_size=job.world_size, calls=calls
    )


def _fsdp2(job: TrafficJob) -> Iterator[Collective]:
    """Units are gathered in every micro-step, and gradients reduced in the last one.

    accelerate makes a unit of each layer, of an untied input embedding, and of what comes last: final norm, head, and
    a tied embedding, which is not freed between forward and backward. The Trainer defers the reduction
    (`accelerator.no_sync`), so whole gradients wait on every rank meanwhile.
    """
    steps, bytes_each = job.gradient_accumulation_steps, job.element_bytes
    replicas = job.preset.replicas
    ranks = job.world_size // replicas
    inside: dict[str, Any] = {"group_size": ranks, "group": "replica" if replicas > 1 else "all"}
    embedding = () if job.shape.tied_embeddings else tuple(filter(is_embedding, job.shape.outer))[:1]
    whole = (*job.layers, job.shape.outer)
    again = () if job.preset.sharding == "shard_grad_op" else (*job.layers, embedding)
    if ranks > 1:
        for purpose, units in (("parameters in the forward", whole), ("parameters in the backward", again)):
            payload = steps * bytes_each * sum(_padded_rows(unit, ranks) for unit in units)
            yield from _gather(purpose, payload, steps * len(units), **inside)
    trained = bytes_each * sum(_padded_rows(unit, ranks) for unit in job.trained)
    if ranks > 1:
        yield Collective(name="reduce_scatter", purpose="gradients", payload_bytes=trained, calls=len(whole), **inside)
    if replicas > 1:
        yield Collective(
            name="all_reduce",
            purpose="gradients between replicas",
            payload_bytes=trained // ranks,
            group_size=replicas,
            group="replicas",
            calls=len(whole),
        )


def _zero12(job: TrafficJob) -> Iterator[Collective]:
    """Gradients are all-reduced although each rank keeps a share; updated shares are gathered after the step.

    `use_multi_rank_bucket_allreduce`, deepspeed's default, makes one all-reduce of a bucket's gradients, where the
    paper's reduce-scatter would send half. ZeRO-2 does so in every micro-step, ZeRO-1 (and 0) in the last one.
    """
    zero = zero_block(job.preset)
    sharding, trained = job.preset.sharding, elements_of(job.trained)
    steps = job.gradient_accumulation_steps if sharding == "shard_grad_op" else 1
    to_owner = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    yield Collective(
        name="reduce" if to_owner and sharding != "replicate" else "all_reduce",
        purpose="gradients",
        payload_bytes=steps * job.element_bytes * trained,
        group_size=job.world_size,
        calls=steps * math.ceil(trained / max(job.engine.reduce_bucket, 1)),
    )
    if sharding != "replicate":
        groups = 1 if job.adapters else 2  # the Trainer's parameter groups, with and without weight decay
        payload = job.element_bytes * _padded_groups(job, 2 * job.world_size)
        yield Collective(
            name="all_gather",
            purpose="updated parameters",
            payload_bytes=payload,
            group_size=job.world_size,
            calls=groups,
        )


def _zero3(job: TrafficJob) -> Iterator[Collective]:
    """Each tensor is gathered where it is used and not there, its gradient reduced in every micro-step."""
    zero, ranks, steps = zero_block(job.preset), job.world_size, job.gradient_accumulation_steps
    engine = job.engine
    bytes_each, persistent, machine = engine.element_bytes, engine.persistence_threshold, engine.machine_partition
    prefetch = max(engine.prefetch_bucket, 1)
    counted = zero3_gathers(job, persistent, engine.reuse_distance)
    first, again = (_padded_gathers(part, ranks) for part in counted)
    tensors = steps * sum(part.total() for part in counted)
    everyone: dict[str, Any] = {"group_size": ranks, "group": "all"}
    gathers = [("forward", steps * first, everyone), ("backward", steps * again, everyone)]
    if machine > 1:  # hpZ: the first gather of a step crosses machines, all others find a copy within theirs
        later = (steps - 1) * first + steps * again
        gathers = [("step's first use", first, everyone), ("later uses", later, _machine(machine))]
    weight_bytes = 1 if zero.get("zero_quantized_weights") else bytes_each
    for where, elements, group in gathers:
        # A gather fills a prefetch bucket, or takes one tensor where the preset fetches nothing ahead.
        calls = min(-(-elements // prefetch), tensors)
        yield from _gather(f"parameters in the {where}", weight_bytes * elements, calls, **group)
    trained = [tensor.num_elements for layer in job.trained for tensor in layer]
    padded = sum(_multiple(size, ranks) for size in trained)
    calls = steps * math.ceil(padded / max(engine.reduce_bucket, 1))
    if zero.get("zero_quantized_gradients") and ranks > machine:
        yield from _quantized_gradients(steps * padded, ranks, machine, calls)
    else:
        name = "reduce_scatter" if zero.get("reduce_scatter", True) else "all_reduce"
        payload = steps * bytes_each * padded
        yield Collective(name=name, purpose="gradients", payload_bytes=payload, calls=calls, **everyone)
    everything = [tensor.num_elements for layer in (*job.layers, job.shape.outer) for tensor in layer]
    kept = bytes_each * sum(_multiple(size, ranks) for size in everything if size <= persistent)
    yield from _gather("small parameters, after the step", kept, 1, **everyone)


def _quantized_gradients(elements: int, ranks: int, machine: int, calls: int) -> Iterator[Collective]:
    """qgZ: 4 bits an element to the ranks of the machine, then their sums to the same rank of the other machines."""
    common: dict[str, Any] = {"name": "all_to_all", "calls": calls}
    yield Collective(purpose="gradients", payload_bytes=elements // 2, **_machine(machine), **common)
    yield Collective(
        purpose="gradients between machines",
        payload_bytes=elements // 2 // machine,
        group_size=ranks // machine,
        group="replicas",
        **common,
    )


def _machine(size: int) -> dict[str, Any]:
    return {"group_size": size, "group": "replica"}


def _gather(purpose: str, payload: int, calls: int, *, group_size: int, group: str) -> Iterator[Collective]:
    if payload:
        yield Collective(
            name="all_gather",
            purpose=purpose,
            payload_bytes=payload,
            group_size=group_size,
            group=group,
            calls=calls,
        )


def _padded_gathers(gathers: Counter[int], ranks: int) -> int:
    return sum(_multiple(size, ranks) * times for size, times in gathers.items())


def _padded_rows(layer: Layer, ranks: int) -> int:
    """Elements of a layer as FSDP2 cuts it: the first dimension of each tensor rounded up to a multiple."""
    return sum(
        _multiple(tensor.shape[0], ranks) * (tensor.num_elements // max(tensor.shape[0], 1))
        for tensor in layer
        if tensor.shape
    )


def _padded_groups(job: TrafficJob, multiple: int) -> int:
    """Elements of the flat buffers of ZeRO-1 and ZeRO-2, one a parameter group."""
    sizes = {True: 0, False: 0}
    for layer in job.trained:
        for tensor in layer:
            sizes[tensor.decays] += tensor.num_elements
    return sum(_multiple(size, multiple) for size in sizes.values())


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
