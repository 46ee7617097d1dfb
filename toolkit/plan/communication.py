"""Communication volume: the collectives of one optimizer step, and what one GPU sends in them.

Derived from the preset's files and the model's tensors, as read in the source of deepspeed 0.19.8 (`ulysses_sp.py`
included), torch 2.13 (`_context_parallel/_attention.py`), transformers 5.23 (`distributed/`) and accelerate 1.15, and
compared with collectives counted in real runs of two to four CPU ranks (docs/concepts/communication.md). Left out are
the few bytes of losses, norms, flags, attention's statistics, token counts, routing weights and adapters' columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from toolkit.models.shape import Layer
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.interconnect import Collective
from toolkit.plan.planned_job import ACTIVATION_BYTES, TrainingSetup, stage_shape
from toolkit.presets.shard_bytes import zero_block

DDP_BUCKET_BYTES = 25 * 2**20


def communication_bytes(collectives: Iterable[Collective]) -> int:
    """Return the bytes that each GPU sends, over rings."""
    return sum(collective.sent_bytes for collective in collectives)


def step_collectives(setup: TrainingSetup) -> tuple[Collective, ...]:
    """Return all collectives of one optimizer step, its accumulation steps included."""
    preset, engine = setup.preset, setup.preset.engine
    of_states = {"pipeline": _pipeline, "fsdp2": _fsdp2}.get(engine, _ddp)
    if engine == "deepspeed":
        of_states = _zero3 if preset.shards_parameters else _zero12
    elif preset.sharded_at_load and engine != "pipeline":
        of_states = _at_load
    planned = (*of_states(setup), *_scoring(setup), *split_collectives(setup))
    return tuple(collective for collective in planned if collective.group_size > 1 and collective.payload_bytes)


def _scoring(setup: TrainingSetup) -> Iterator[Collective]:
    """Forwards of a reference, or of the policy without a graph, gather what is sharded once more."""
    times = setup.accumulation_steps * setup.job.method.scoring_forwards
    if setup.preset.shards_parameters and times:
        payload = times * setup.engine.element_bytes * setup.shape.num_params
        calls, ranks = times * len(setup.weights.units), setup.world_size // setup.preset.replicas
        group = "replica" if setup.preset.replicas > 1 else "all"
        yield Collective("all_gather", "parameters for scoring", payload, calls, group_size=ranks, group=group)


def _pipeline(setup: TrainingSetup) -> Iterator[Collective]:
    """What a rank between two others sends, and the reductions of gradients after it."""
    shape, settings, layout, job = setup.shape, setup.job.pipeline, setup.layout, setup.job
    assert settings is not None, "a pipeline is planned with its number of stages"
    assert layout is not None
    stages, purpose = partial(Collective, group="pp"), "activations to the next stage, and their gradients back"
    calls = 2 * setup.accumulation_steps * settings.chunks
    payload = ACTIVATION_BYTES * job.tokens_per_micro_batch * shape.hidden_size * calls
    yield stages("permute", purpose, payload, calls, group_size=layout.pp)
    if shape.tied_embeddings:
        payload = 4 * shape.vocab_size * shape.hidden_size
        yield stages("all_reduce", "gradient of a tied embedding", payload, group_size=2)
    largest = max(stage_shape(shape, settings, rank).num_params for rank in range(layout.pp))
    replicas = partial(Collective, group="replicas", group_size=layout.dp_replicate, stride=layout.pp)
    yield replicas("all_reduce", "gradients between pipelines", 4 * largest)


def _ddp(setup: TrainingSetup) -> Iterator[Collective]:
    """fp32 gradients of fp32 weights, in the last accumulation step; in buckets of 25 MiB."""
    payload = 4 * setup.weights.num_trained
    calls = math.ceil(payload / DDP_BUCKET_BYTES)
    yield Collective("all_reduce", "gradients", payload, calls, group_size=setup.world_size)


def _fsdp2(setup: TrainingSetup) -> Iterator[Collective]:
    """Units are gathered in every accumulation step; gradients are reduced in every one, or in the last one.

    accelerate makes a unit of each layer, of an untied input embedding, and of the root: final norm, head, and a tied
    embedding, which stay gathered between forward and backward.
    """
    steps, element_bytes, replicas = setup.accumulation_steps, setup.engine.element_bytes, setup.preset.replicas
    ranks = setup.world_size // replicas
    inside = partial(Collective, group_size=ranks, group="replica" if replicas > 1 else "all")
    embedding = () if setup.shape.tied_embeddings else tuple(t for t in setup.shape.outer if t.is_embedding)[:1]
    regathered = () if setup.preset.sharding == "shard_grad_op" else (*setup.weights.units[:-1], embedding)
    for phase, units in (("forward", setup.weights.units), ("backward", regathered)):
        payload = steps * element_bytes * _padded_rows(units, ranks)
        yield inside("all_gather", f"parameters in the {phase}", payload, steps * len(units))
    reductions = 1 if setup.job.keeps_whole_gradients else steps
    payload = reductions * element_bytes * _padded_rows(setup.trained, ranks)
    calls = reductions * len(setup.weights.units)
    yield inside("reduce_scatter", "gradients", payload, calls)
    between = partial(Collective, group_size=replicas, group="replicas")
    yield between("all_reduce", "gradients between replicas", payload // ranks, calls)


def _at_load(setup: TrainingSetup) -> Iterator[Collective]:
    """FSDP2 on what tensor and expert parallelism leave; experts, dealt to `ep` ranks, have groups of their own.

    Ranks of one group are as far apart as the dimensions inside are large. Adapters are attached after the model was
    sharded, and are whole on each data-parallel rank.
    """
    layout = setup.layout
    if layout is None:
        return
    if setup.weights.adapters:
        group = "dp_shard" if layout.dp_replicate == 1 else "dp_replicate"
        ranks = partial(Collective, group_size=layout.data_parallel_size, group=group, stride=layout.tp)
        payload = 4 * setup.weights.num_trained
        yield ranks("all_reduce", "gradients of adapters", payload, sum(map(len, setup.trained)))
    yield from _at_load_group(setup, layout, experts=False, ranks=layout.dp_shard, stride=layout.tp)
    if layout.ep > 1:
        yield from _at_load_group(setup, layout, experts=True, ranks=layout.expert_shard, stride=layout.ep)


def _at_load_group(
    setup: TrainingSetup, layout: ParallelLayout, *, experts: bool, ranks: int, stride: int
) -> Iterator[Collective]:
    """Gathers in the compute dtype, and reductions in fp32, of the experts or of everything else."""

    def held(units: Iterable[Layer]) -> list[Layer]:
        apart = layout.ep > 1
        parts = (tuple(tensor for tensor in unit if (apart and tensor.is_expert) == experts) for unit in units)
        return [part for part in parts if part]

    layers, outer, steps = setup.part.layers, setup.part.outer, setup.accumulation_steps
    sharers = partial(Collective, group_size=ranks, group="dp_shard", stride=stride)
    name, gradients = ("experts", "gradients of experts") if experts else ("parameters", "gradients")
    embedding = () if setup.shape.tied_embeddings else outer[:1]
    tied_head = outer[:1] if setup.engine.unties_head and setup.shape.tied_embeddings else ()
    for phase, units in (("forward", held((*layers, outer, tied_head))), ("backward", held((*layers, embedding)))):
        payload = steps * setup.engine.element_bytes * _padded_rows(units, ranks)
        yield sharers("all_gather", f"{name} in the {phase}", payload, steps * len(units))
    reduced = [] if setup.weights.adapters else held((*setup.trained, tied_head))
    reductions = 1 if setup.job.keeps_whole_gradients else steps
    payload = reductions * setup.engine.reduce_bytes * _padded_rows(reduced, ranks)
    calls = reductions * len(reduced)
    yield sharers("reduce_scatter", gradients, payload, calls)
    between = partial(Collective, group_size=layout.dp_replicate, group="replicas")
    yield between("all_reduce", f"{gradients} between replicas", payload // ranks, calls)


def _zero12(setup: TrainingSetup) -> Iterator[Collective]:
    """Gradients are all-reduced although each rank keeps a share; updated shares are gathered after the step.

    `use_multi_rank_bucket_allreduce`, DeepSpeed's default, all-reduces the gradients of a bucket, where the paper's
    reduce-scatter would send half. ZeRO-2 does so in every accumulation step, ZeRO-1 (and 0) in the last one.
    """
    zero = zero_block(setup.preset)
    sharding, element_bytes = setup.preset.sharding, setup.engine.element_bytes
    steps = setup.accumulation_steps if sharding == "shard_grad_op" else 1
    to_owner = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    everyone, trained = partial(Collective, group_size=setup.world_size), setup.weights.num_trained
    calls = steps * math.ceil(trained / max(setup.engine.reduce_bucket, 1))
    name = "reduce" if to_owner and sharding != "replicate" else "all_reduce"
    yield everyone(name, "gradients", steps * element_bytes * trained, calls)
    if sharding != "replicate":  # flat buffers of the Trainer's parameter groups, with and without weight decay
        groups = setup.weights.groups(lambda tensor: tensor.num_elements)
        payload = element_bytes * sum(_round_up(size, 2 * setup.world_size) for size in groups)
        yield everyone("all_gather", "updated parameters", payload, 1 if setup.weights.adapters else 2)


def _zero3(setup: TrainingSetup) -> Iterator[Collective]:
    """Tensors are gathered where they are used and missing; gradients are reduced in every accumulation step.

    With hpZ, only the first gather of a step crosses nodes. qgZ sends gradients in 4 bits per element to the ranks of
    the node, then their sums to the same rank of the other nodes.
    """
    zero, ranks, engine, steps = zero_block(setup.preset), setup.world_size, setup.engine, setup.accumulation_steps
    element_bytes, node = engine.element_bytes, engine.secondary_partition
    everyone = partial(Collective, group_size=ranks)
    same_node = partial(Collective, group_size=node, group="replica")

    counted = zero3_gathers(setup, persistent=engine.persistence_threshold, reuse=engine.reuse_distance)
    first, again = (sum(_round_up(size, ranks) * times for size, times in part.items()) for part in counted)
    tensors = steps * sum(part.total() for part in counted)
    gathers = [("forward", steps * first, everyone), ("backward", steps * again, everyone)]
    if node > 1:
        later = (steps - 1) * first + steps * again
        gathers = [("step's first use", first, everyone), ("later uses", later, same_node)]
    gathered_bytes = 1 if zero.get("zero_quantized_weights") else element_bytes
    for phase, elements, group in gathers:
        # A gather fills a prefetch bucket, or takes one tensor if the preset prefetches nothing.
        calls = min(-(-elements // max(engine.prefetch_bucket, 1)), tensors)
        yield group("all_gather", f"parameters in the {phase}", gathered_bytes * elements, calls)

    padded = sum(_round_up(tensor.num_elements, ranks) for layer in setup.trained for tensor in layer)
    calls = steps * math.ceil(padded / max(engine.reduce_bucket, 1))
    if zero.get("zero_quantized_gradients") and ranks > node:
        payload = steps * padded // 2
        between = partial(Collective, group_size=ranks // node, group="replicas")
        yield same_node("all_to_all", "gradients", payload, calls)
        yield between("all_to_all", "gradients between nodes", payload // node, calls)
    else:
        name = "reduce_scatter" if zero.get("reduce_scatter", True) else "all_reduce"
        yield everyone(name, "gradients", steps * element_bytes * padded, calls)
    sizes = [tensor.num_elements for unit in setup.weights.units for tensor in unit]
    small = element_bytes * sum(_round_up(size, ranks) for size in sizes if size <= engine.persistence_threshold)
    yield everyone("all_gather", "small parameters, after the step", small)


def zero3_gathers(setup: TrainingSetup, *, persistent: int, reuse: int) -> tuple[Counter[int], Counter[int]]:
    """Return how often tensors of each size are gathered in an accumulation step: for the first time, and again.

    DeepSpeed 0.19.8 records the order in which modules are used, and releases a tensor after a use unless it is used
    again within `reuse` elements (`stage3_max_reuse_distance`): a model of up to half that size is gathered once.
    Tensors of up to `persistent` elements are never released.
    """
    first, again = Counter[int](), Counter[int]()
    used_until: dict[int, int] = {}
    elements = 0
    for tensor, size in _zero3_uses(setup):
        if size > persistent and tensor not in used_until:
            first[size] += 1
        elif size > persistent and elements - used_until[tensor] >= reuse:
            again[size] += 1
        elements += size
        used_until[tensor] = elements
    return first, again


def _zero3_uses(setup: TrainingSetup) -> list[tuple[int, int]]:
    """(tensor, elements) in order of use: forward, then backward, each layer recomputed before its backward."""
    numbers = iter(range(10**9))
    embeddings = [(next(numbers), tensor.num_elements) for tensor in setup.shape.outer if tensor.is_embedding]
    layers = [[(next(numbers), tensor.num_elements) for tensor in layer] for layer in setup.weights.units[:-1]]
    rest = [(next(numbers), tensor.num_elements) for tensor in setup.shape.outer if not tensor.is_embedding]
    head = [*rest, *(embeddings[:1] if setup.shape.tied_embeddings else [])]
    uses = [*embeddings, *(use for layer in layers for use in layer), *head, *reversed(head)]
    for layer in reversed(layers):
        uses += [*layer, *reversed(layer)] if setup.job.activation_checkpointing else [*reversed(layer)]
    return uses + list(reversed(embeddings))


def split_collectives(setup: TrainingSetup) -> Iterator[Collective]:
    """Yield what ranks that share a batch send each other: split layers, experts and sequences."""
    layout = setup.layout
    if layout is None:
        return
    if layout.tp > 1:
        yield from _tensor_parallel(setup, layout.tp)
    if layout.ep > 1:
        yield from _expert_parallel(setup, layout)
    if layout.cp > 1:
        yield from _ring_attention(setup, layout.cp)
    if layout.sp > 1:
        yield _ulysses(setup, layout.sp)


def _tensor_parallel(setup: TrainingSetup, ranks: int) -> Iterator[Collective]:
    """Sums of partial outputs in the forward, of partial gradients of inputs in the backward, and the logits.

    Outputs are sums over ranks of weights that are split by columns; each layer that is split by rows has an input of
    its own to the backward, so query, key and value are summed one by one, and gate and up too.
    """
    shape, steps, forwards = setup.shape, setup.accumulation_steps, setup.forwards
    tokens, element_bytes, hidden = setup.local_tokens, setup.engine.element_bytes, setup.shape.hidden_size
    residual_bytes = 4 if setup.engine.autocasts and not setup.weights.adapters else element_bytes
    group = partial(Collective, group_size=ranks, group="tp")
    part_of, outputs, inputs = dict(zip(shape.layers, setup.part.layers, strict=True)), list[int](), list[int]()
    for kind, count in shape.layer_kinds.items():
        for whole, part in zip(kind, part_of[kind], strict=True):
            if len(whole.shape) > 1:
                outputs += [whole.shape[-2]] * count if whole.shape[-1] != part.shape[-1] else []
                inputs += [whole.shape[-1]] * count if whole.shape[-2] != part.shape[-2] else []
    payload = tokens * (element_bytes * forwards * sum(outputs) + residual_bytes * steps * hidden)
    yield group("all_reduce", "outputs of split layers", payload, forwards * len(outputs) + steps)
    payload = tokens * residual_bytes * steps * (sum(inputs) + hidden)
    yield group("all_reduce", "gradients of the inputs of split layers", payload, steps * (len(inputs) + 1))
    yield group("all_gather", "logits", steps * tokens * element_bytes * shape.vocab_size, steps)


def _expert_parallel(setup: TrainingSetup, layout: ParallelLayout) -> Iterator[Collective]:
    """Rows travel to their experts and back, in the forward and in the backward; evenly spread over the ranks."""
    shape, passes = setup.shape, setup.forwards + setup.accumulation_steps
    sparse = sum(count for kind, count in shape.layer_kinds.items() if any(tensor.is_expert for tensor in kind))
    payload = passes * sparse * setup.local_tokens * shape.hidden_size * setup.engine.element_bytes
    # With tensor parallelism each rank of a batch sends a slice of its tokens.
    rows = 2 * payload * (shape.experts_per_token or 1) // layout.tp
    yield Collective("all_to_all", "rows of the experts", rows, 2 * passes * sparse, group_size=layout.ep, group="ep")
    outputs = partial(Collective, group_size=layout.tp, group="tp")
    yield outputs("all_gather", "outputs of the experts", payload, passes * sparse)


def _ring_attention(setup: TrainingSetup, ranks: int) -> Iterator[Collective]:
    """Keys and values are gathered in forward and backward, and their gradients go round in fp32."""
    shape, steps = setup.shape, setup.accumulation_steps
    elements = setup.local_tokens * 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * ranks
    passes = setup.forwards + steps
    ring = partial(Collective, group_size=ranks, group="cp")
    payload = passes * elements * setup.engine.element_bytes
    yield ring("all_gather", "keys and values", payload, passes * shape.num_layers)
    yield ring("permute", "gradients of keys and values", steps * elements * 4, steps * shape.num_layers * ranks)


def _ulysses(setup: TrainingSetup, ranks: int) -> Collective:
    """Query, key, value and output change between parts of the sequence and heads, in forward and backward."""
    shape = setup.shape
    heads = 2 * shape.num_attention_heads + 2 * max(shape.num_kv_heads, ranks)  # fewer keys and values are repeated
    passes = (setup.forwards + setup.accumulation_steps) * shape.num_layers
    payload = passes * setup.local_tokens * heads * shape.head_dim * setup.engine.element_bytes
    return Collective("all_to_all", "heads of attention", payload, 4 * passes, group_size=ranks, group="sp")


def _padded_rows(units: Iterable[Layer], ranks: int) -> int:
    """Elements under FSDP2: the first dimension of each tensor is rounded up to a multiple of the ranks."""
    tensors = (tensor for unit in units for tensor in unit if tensor.shape)
    return sum(_round_up(each.shape[0], ranks) * (each.num_elements // max(each.shape[0], 1)) for each in tensors)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
