"""Communication volume: the collectives of one optimizer step, and what one GPU sends in them.

Derived from the preset's files and the model's tensors, as read in the source of deepspeed 0.19.8 (`ulysses_sp.py`
included), torch 2.13 (`_context_parallel/_attention.py`), transformers 5.23 (`distributed/`) and accelerate 1.15, and
compared with collectives counted in real runs of two to four CPU ranks (docs/concepts/ddp-zero-fsdp2.md). Left out are
the few bytes of losses, norms, flags, attention's statistics, token counts, routing weights and adapters' columns.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from toolkit.engines.planned import Collective
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.training_setup import TrainingSetup


def communication_bytes(collectives: Iterable[Collective]) -> int:
    """Return the bytes that each GPU sends, over rings."""
    return sum(collective.sent_bytes for collective in collectives)


@lru_cache(maxsize=64)  # for the time of a step, and for its bytes
def step_collectives(setup: TrainingSetup) -> tuple[Collective, ...]:
    """Return all collectives of one optimizer step, its accumulation steps included."""
    planned = (*setup.preset.traits.collectives(setup), *_scoring(setup), *split_collectives(setup))
    return tuple(collective for collective in planned if collective.group_size > 1 and collective.payload_bytes)


def _scoring(setup: TrainingSetup) -> Iterator[Collective]:
    """Forwards of a reference, or of the policy without a graph, gather what is sharded once more."""
    times = setup.accumulation_steps * setup.job.method.scoring_forwards
    if setup.preset.shards_parameters and times:
        payload = times * setup.engine.element_bytes * setup.shape.num_params
        calls, ranks = times * len(setup.weights.units), setup.world_size // setup.preset.replicas
        group = "replica" if setup.preset.replicas > 1 else "all"
        yield Collective("all_gather", "parameters for scoring", payload, calls, group_size=ranks, group=group)


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
