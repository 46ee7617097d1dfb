"""Communication volume: what one GPU sends in an optimizer step, by collective.

    >>> gather = Collective(name="all_gather", purpose="parameters", payload_bytes=800, group_size=4)
    >>> communication_bytes([gather, gather])
    1200

Derived from the preset's files and the model's tensors, as read in the source of deepspeed 0.19.8, torch 2.13 and
accelerate 1.15, and compared with collectives counted in real runs of two and four CPU ranks
(docs/concepts/communication.md). The few bytes of losses, norms and flags are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from toolkit.models.shape import Layer
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.collectives import Collective
from toolkit.plan.engine_settings import zero_block
from toolkit.plan.pipeline_stages import pipeline_collectives
from toolkit.plan.planned_job import TrainingSetup
from toolkit.plan.split_communication import split_collectives

DDP_BUCKET_BYTES = 25 * 2**20


def communication_bytes(collectives: Iterable[Collective]) -> int:
    """Return the bytes that each GPU sends, over rings."""
    return sum(collective.sent_bytes for collective in collectives)


def step_collectives(setup: TrainingSetup) -> tuple[Collective, ...]:
    """Return all collectives of one optimizer step, its accumulation steps included."""
    if setup.world_size == 1:
        return ()
    return (*_of_model_states(setup), *split_collectives(setup))


def _of_model_states(setup: TrainingSetup) -> Iterator[Collective]:
    """Gathers of parameters and reductions of gradients."""
    if setup.preset.engine == "pipeline":
        return _pipeline(setup)
    if setup.preset.sharded_at_load:
        return _at_load(setup)
    if setup.preset.engine == "fsdp2":
        return _fsdp2(setup)
    if setup.preset.engine != "deepspeed":
        return _ddp(setup)
    return _zero3(setup) if "parameter" in setup.preset.sharded_parts else _zero12(setup)


def _pipeline(setup: TrainingSetup) -> Iterator[Collective]:
    settings, layout, job = setup.job.pipeline, setup.layout, setup.job
    assert settings is not None, "a pipeline is planned with its number of stages"
    assert layout is not None
    return pipeline_collectives(
        setup.shape, settings, layout, tokens=job.tokens_per_micro_batch, micro_batches=job.gradient_accumulation_steps
    )


def _ddp(setup: TrainingSetup) -> Iterator[Collective]:
    """fp32 gradients of fp32 weights, in the last accumulation step; in buckets of 25 MiB."""
    payload = 4 * setup.num_trained
    calls = math.ceil(payload / DDP_BUCKET_BYTES)
    yield Collective(
        name="all_reduce", purpose="gradients", payload_bytes=payload, group_size=setup.world_size, calls=calls
    )


def _fsdp2(setup: TrainingSetup) -> Iterator[Collective]:
    """Units are gathered in every accumulation step; gradients are reduced in every one, or in the last one.

    accelerate makes a unit of each layer, of an untied input embedding, and of the root: final norm, head, and a tied
    embedding, which stay gathered between forward and backward.
    """
    steps, element_bytes = setup.job.gradient_accumulation_steps, setup.engine.element_bytes
    replicas = setup.preset.replicas
    ranks = setup.world_size // replicas
    inside: dict[str, Any] = {"group_size": ranks, "group": "replica" if replicas > 1 else "all"}
    embeddings = tuple(tensor for tensor in setup.shape.outer if tensor.is_embedding)
    embedding = () if setup.shape.tied_embeddings else embeddings[:1]
    units = (*setup.layers, setup.outer)
    regathered = () if setup.preset.sharding == "shard_grad_op" else (*setup.layers, embedding)
    if ranks > 1:
        for purpose, gathered in (("parameters in the forward", units), ("parameters in the backward", regathered)):
            payload = steps * element_bytes * sum(_padded_rows(unit, ranks) for unit in gathered)
            yield from _gather(purpose, payload, steps * len(gathered), **inside)
    reductions = 1 if setup.job.keeps_whole_gradients else steps
    trained = reductions * element_bytes * sum(_padded_rows(unit, ranks) for unit in setup.trained)
    calls = reductions * len(units)
    if ranks > 1:
        yield Collective(name="reduce_scatter", purpose="gradients", payload_bytes=trained, calls=calls, **inside)
    if replicas > 1:
        yield Collective(
            name="all_reduce",
            purpose="gradients between replicas",
            payload_bytes=trained // ranks,
            group_size=replicas,
            group="replicas",
            calls=calls,
        )


def _at_load(setup: TrainingSetup) -> Iterator[Collective]:
    """FSDP2 on what tensor and expert parallelism leave; experts, dealt to `ep` ranks, have groups of their own.

    Ranks of one group are as far apart as the dimensions inside are large.
    """
    layout = setup.layout
    if layout is None or layout.data_parallel_size == 1:
        return
    if setup.adapters:
        yield _averaged_adapters(setup, layout)
    yield from _at_load_group(setup, layout, experts=False, ranks=layout.dp_shard, stride=layout.tp)
    if layout.ep > 1:
        yield from _at_load_group(setup, layout, experts=True, ranks=layout.expert_shard, stride=layout.ep)


def _averaged_adapters(setup: TrainingSetup, layout: ParallelLayout) -> Collective:
    """Adapters are attached after the model was sharded, and are whole on each data-parallel rank."""
    return Collective(
        name="all_reduce",
        purpose="gradients of adapters",
        payload_bytes=4 * setup.num_trained,
        group_size=layout.data_parallel_size,
        group="dp_shard" if layout.dp_replicate == 1 else "dp_replicate",
        stride=layout.tp,
        calls=sum(map(len, setup.trained)),
    )


def _at_load_group(
    setup: TrainingSetup, layout: ParallelLayout, *, experts: bool, ranks: int, stride: int
) -> Iterator[Collective]:
    """Gathers in the compute dtype, and reductions in fp32, of the experts or of everything else."""

    def held(units: Iterable[Layer]) -> list[Layer]:
        apart = layout.ep > 1
        parts = (tuple(tensor for tensor in unit if (apart and tensor.is_expert) == experts) for unit in units)
        return [part for part in parts if part]

    job, layers, outer = setup.job, setup.part.layers, setup.part.outer
    steps = job.gradient_accumulation_steps
    sharers: dict[str, Any] = {"group_size": ranks, "group": "dp_shard", "stride": stride}
    name, of = ("experts", "gradients of experts") if experts else ("parameters", "gradients")
    embedding = () if setup.shape.tied_embeddings else outer[:1]
    tied_head = outer[:1] if setup.engine.unties_head and setup.shape.tied_embeddings else ()
    for phase, units in (("forward", held((*layers, outer, tied_head))), ("backward", held((*layers, embedding)))):
        payload = steps * setup.engine.element_bytes * sum(_padded_rows(unit, ranks) for unit in units)
        if ranks > 1:
            yield from _gather(f"{name} in the {phase}", payload, steps * len(units), **sharers)
    reduced = [] if setup.adapters else held((*setup.trained, tied_head))
    reductions = 1 if job.keeps_whole_gradients else steps
    payload = reductions * setup.engine.reduce_bytes * sum(_padded_rows(unit, ranks) for unit in reduced)
    calls = reductions * len(reduced)
    if ranks > 1 and payload:
        yield Collective(name="reduce_scatter", purpose=of, payload_bytes=payload, calls=calls, **sharers)
    if layout.dp_replicate > 1 and payload:
        yield Collective(
            name="all_reduce",
            purpose=f"{of} between replicas",
            payload_bytes=payload // ranks,
            group_size=layout.dp_replicate,
            group="replicas",
            calls=calls,
        )


def _zero12(setup: TrainingSetup) -> Iterator[Collective]:
    """Gradients are all-reduced although each rank keeps a share; updated shares are gathered after the step.

    `use_multi_rank_bucket_allreduce`, DeepSpeed's default, all-reduces the gradients of a bucket, where the paper's
    reduce-scatter would send half. ZeRO-2 does so in every accumulation step, ZeRO-1 (and 0) in the last one.
    """
    zero = zero_block(setup.preset)
    sharding, element_bytes = setup.preset.sharding, setup.engine.element_bytes
    steps = setup.job.gradient_accumulation_steps if sharding == "shard_grad_op" else 1
    to_owner = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    yield Collective(
        name="reduce" if to_owner and sharding != "replicate" else "all_reduce",
        purpose="gradients",
        payload_bytes=steps * element_bytes * setup.num_trained,
        group_size=setup.world_size,
        calls=steps * math.ceil(setup.num_trained / max(setup.engine.reduce_bucket, 1)),
    )
    if sharding != "replicate":
        yield Collective(
            name="all_gather",
            purpose="updated parameters",
            payload_bytes=element_bytes * _padded_groups(setup, 2 * setup.world_size),
            group_size=setup.world_size,
            calls=1 if setup.adapters else 2,  # the Trainer's parameter groups, with and without weight decay
        )


def _zero3(setup: TrainingSetup) -> Iterator[Collective]:
    """Tensors are gathered where they are used and missing; gradients are reduced in every accumulation step."""
    zero, ranks, engine = zero_block(setup.preset), setup.world_size, setup.engine
    steps, element_bytes, node = setup.job.gradient_accumulation_steps, engine.element_bytes, engine.secondary_partition
    everyone: dict[str, Any] = {"group_size": ranks, "group": "all"}
    yield from _zero3_gathers(setup, everyone)
    trained = [tensor.num_elements for layer in setup.trained for tensor in layer]
    padded = sum(_round_up(size, ranks) for size in trained)
    calls = steps * math.ceil(padded / max(engine.reduce_bucket, 1))
    if zero.get("zero_quantized_gradients") and ranks > node:
        yield from _quantized_gradients(steps * padded, ranks, node, calls)
    else:
        name = "reduce_scatter" if zero.get("reduce_scatter", True) else "all_reduce"
        payload = steps * element_bytes * padded
        yield Collective(name=name, purpose="gradients", payload_bytes=payload, calls=calls, **everyone)
    sizes = [tensor.num_elements for layer in (*setup.layers, setup.outer) for tensor in layer]
    small = sum(_round_up(size, ranks) for size in sizes if size <= engine.persistence_threshold)
    yield from _gather("small parameters, after the step", element_bytes * small, 1, **everyone)


def _zero3_gathers(setup: TrainingSetup, everyone: dict[str, Any]) -> Iterator[Collective]:
    """All gathers of forward and backward; with hpZ, only the first one of a step crosses nodes."""
    engine, steps, node = setup.engine, setup.job.gradient_accumulation_steps, setup.engine.secondary_partition
    counted = zero3_gathers(setup, persistent=engine.persistence_threshold, reuse=engine.reuse_distance)
    first, again = (sum(_round_up(size, setup.world_size) * times for size, times in part.items()) for part in counted)
    tensors = steps * sum(part.total() for part in counted)
    gathers = [("forward", steps * first, everyone), ("backward", steps * again, everyone)]
    if node > 1:
        later = (steps - 1) * first + steps * again
        gathers = [("step's first use", first, everyone), ("later uses", later, _one_node(node))]
    element_bytes = 1 if zero_block(setup.preset).get("zero_quantized_weights") else engine.element_bytes
    for phase, elements, group in gathers:
        # A gather fills a prefetch bucket, or takes one tensor if the preset prefetches nothing.
        calls = min(-(-elements // max(engine.prefetch_bucket, 1)), tensors)
        yield from _gather(f"parameters in the {phase}", element_bytes * elements, calls, **group)


def zero3_gathers(setup: TrainingSetup, *, persistent: int, reuse: int) -> tuple[Counter[int], Counter[int]]:
    """Return how often tensors of each size are gathered in an accumulation step: for the first time, and again.

    DeepSpeed 0.19.8 records the order in which modules are used, and releases a tensor after a use unless it is used
    again within `reuse` elements (`stage3_max_reuse_distance`): a model of up to half that size is gathered once.
    Tensors of up to `persistent` elements are never released.
    """
    uses = _zero3_uses(setup)
    next_use: dict[int, int] = {}
    elements_before = [0]
    for _, size in uses:
        elements_before.append(elements_before[-1] + size)
    was_released = [True] * len(uses)
    for position in range(len(uses) - 1, -1, -1):
        tensor, _ = uses[position]
        following = next_use.get(tensor)
        if following is not None:
            was_released[following] = elements_before[following] - elements_before[position + 1] >= reuse
        next_use[tensor] = position
    first: Counter[int] = Counter()
    again: Counter[int] = Counter()
    for position, (tensor, size) in enumerate(uses):
        if size <= persistent:
            continue
        if next_use[tensor] == position:
            first[size] += 1
        elif was_released[position]:
            again[size] += 1
    return first, again


def _zero3_uses(setup: TrainingSetup) -> list[tuple[int, int]]:
    """(tensor, elements) in order of use: forward, then backward, each layer recomputed before its backward."""
    numbers = iter(range(10**9))
    embeddings = [(next(numbers), tensor.num_elements) for tensor in setup.shape.outer if tensor.is_embedding]
    layers = [[(next(numbers), tensor.num_elements) for tensor in layer] for layer in setup.layers]
    rest = [(next(numbers), tensor.num_elements) for tensor in setup.shape.outer if not tensor.is_embedding]
    head = [*rest, *(embeddings[:1] if setup.shape.tied_embeddings else [])]
    uses = [*embeddings, *(use for layer in layers for use in layer), *head, *reversed(head)]
    for layer in reversed(layers):
        uses += [*layer, *reversed(layer)] if setup.job.activation_checkpointing else [*reversed(layer)]
    return uses + list(reversed(embeddings))


def _quantized_gradients(elements: int, ranks: int, node: int, calls: int) -> Iterator[Collective]:
    """qgZ: 4 bits per element to the ranks of the node, then their sums to the same rank of the other nodes."""
    common: dict[str, Any] = {"name": "all_to_all", "calls": calls}
    yield Collective(purpose="gradients", payload_bytes=elements // 2, **_one_node(node), **common)
    yield Collective(
        purpose="gradients between nodes",
        payload_bytes=elements // 2 // node,
        group_size=ranks // node,
        group="replicas",
        **common,
    )


def _one_node(ranks: int) -> dict[str, Any]:
    return {"group_size": ranks, "group": "replica"}


def _gather(
    purpose: str, payload: int, calls: int, *, group_size: int, group: str, stride: int = 1
) -> Iterator[Collective]:
    if payload:
        yield Collective(
            name="all_gather",
            purpose=purpose,
            payload_bytes=payload,
            group_size=group_size,
            group=group,
            stride=stride,
            calls=calls,
        )


def _padded_rows(layer: Layer, ranks: int) -> int:
    """Elements of a layer under FSDP2: the first dimension of each tensor is rounded up to a multiple of the ranks."""
    return sum(
        _round_up(tensor.shape[0], ranks) * (tensor.num_elements // max(tensor.shape[0], 1))
        for tensor in layer
        if tensor.shape
    )


def _padded_groups(setup: TrainingSetup, multiple: int) -> int:
    """Elements of the flat buffers of ZeRO-1 and ZeRO-2, one per parameter group."""
    sizes = {True: 0, False: 0}
    for layer in setup.trained:
        for tensor in layer:
            sizes[tensor.has_weight_decay] += tensor.num_elements
    return sum(_round_up(size, multiple) for size in sizes.values())


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
