"""Communication of split layers, sequences and experts: what the ranks that share a batch send each other.

Read in the source of transformers 5.23 (`distributed/`), torch 2.13 (`_context_parallel/_attention.py`) and deepspeed
0.19.8 (`ulysses_sp.py`); tests/plan/test_split_communication.py compares it with collectives counted in real runs. Left
out: statistics of attention, token counts and routing weights, and the few columns of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.plan.collectives import Collective
from toolkit.plan.planned_job import TrainingSetup


def split_collectives(setup: TrainingSetup) -> Iterator[Collective]:
    """Yield the collectives of tensor, context, sequence and expert parallelism, accumulation steps included."""
    layout = setup.layout
    if layout is None:
        return
    if layout.tp > 1:
        yield from _tensor_parallel(setup)
    if layout.ep > 1:
        yield from _expert_parallel(setup)
    if layout.cp > 1:
        yield from _ring_attention(setup, layout.cp)
    if layout.sp > 1:
        yield from _ulysses(setup, layout.sp)


def _forwards(setup: TrainingSetup) -> int:
    """Forward passes through the layers in an optimizer step: activation checkpointing repeats them."""
    return setup.job.gradient_accumulation_steps * (2 if setup.job.activation_checkpointing else 1)


def _tensor_parallel(setup: TrainingSetup) -> Iterator[Collective]:
    """Sums of partial outputs in the forward, of partial gradients of inputs in the backward, and the logits.

    Each linear layer that is split by rows has an input of its own to the backward, so query, key and value are summed
    one by one, and gate and up too.
    """
    shape, layout, steps = setup.shape, setup.layout, setup.job.gradient_accumulation_steps
    assert layout is not None
    tokens, element_bytes = setup.local_tokens, setup.engine.element_bytes
    residual_bytes = 4 if setup.engine.autocasts and not setup.adapters else element_bytes
    group: dict[str, Any] = {"group_size": layout.tp, "group": "tp"}
    pairs = [pair for kind, count in _layer_pairs(shape, setup.part) for pair in [kind] * count]
    outputs = [width for whole, part in pairs for width in _output_widths(whole, part)]
    inputs = [width for whole, part in pairs for width in _input_widths(whole, part)]
    hidden = shape.hidden_size
    forward = element_bytes * _forwards(setup) * sum(outputs) + residual_bytes * steps * hidden
    yield Collective(
        name="all_reduce",
        purpose="outputs of split layers",
        payload_bytes=tokens * forward,
        calls=_forwards(setup) * len(outputs) + steps,
        **group,
    )
    yield Collective(
        name="all_reduce",
        purpose="gradients of the inputs of split layers",
        payload_bytes=tokens * residual_bytes * steps * (sum(inputs) + hidden),
        calls=steps * (len(inputs) + 1),
        **group,
    )
    yield Collective(
        name="all_gather",
        purpose="logits",
        payload_bytes=steps * tokens * element_bytes * shape.vocab_size,
        calls=steps,
        **group,
    )


def _layer_pairs(shape: ModelShape, part: ModelShape) -> Iterator[tuple[tuple[Layer, Layer], int]]:
    """Each kind of layer beside the part of it that a rank has, with the number of such layers."""
    part_of = dict(zip(shape.layers, part.layers, strict=True))
    for kind, count in shape.layer_kinds.items():
        yield (kind, part_of[kind]), count


def _split_on(whole: Tensor, part: Tensor, axis: int) -> bool:
    return len(whole.shape) > 1 and whole.shape[axis] != part.shape[axis]


def _output_widths(whole: Layer, part: Layer) -> Iterator[int]:
    """Widths of outputs that are sums over ranks: of weights that are split by columns."""
    for tensor, own in zip(whole, part, strict=True):
        if _split_on(tensor, own, -1):
            yield tensor.shape[-2]


def _input_widths(whole: Layer, part: Layer) -> Iterator[int]:
    """Widths of inputs that every rank has: of weights that are split by rows."""
    for tensor, own in zip(whole, part, strict=True):
        if _split_on(tensor, own, -2):
            yield tensor.shape[-1]


def _expert_parallel(setup: TrainingSetup) -> Iterator[Collective]:
    """Rows travel to their experts and back, in the forward and in the backward; evenly spread over the ranks."""
    shape, layout = setup.shape, setup.layout
    assert layout is not None
    sparse = sum(count for kind, count in shape.layer_kinds.items() if any(tensor.is_expert for tensor in kind))
    passes = _forwards(setup) + setup.job.gradient_accumulation_steps
    hidden_bytes = setup.local_tokens * shape.hidden_size * setup.engine.element_bytes
    yield Collective(
        name="all_to_all",
        purpose="rows of the experts",
        payload_bytes=2 * passes * sparse * hidden_bytes * (shape.experts_per_token or 1) // layout.tp,
        group_size=layout.ep,
        group="ep",
        calls=2 * passes * sparse,
    )
    if layout.tp > 1:  # each rank of a batch sends a slice of its tokens
        yield Collective(
            name="all_gather",
            purpose="outputs of the experts",
            payload_bytes=passes * sparse * hidden_bytes,
            group_size=layout.tp,
            group="tp",
            calls=passes * sparse,
        )


def _ring_attention(setup: TrainingSetup, ranks: int) -> Iterator[Collective]:
    """Keys and values are gathered in forward and backward, and their gradients go round in fp32."""
    shape, steps = setup.shape, setup.job.gradient_accumulation_steps
    local = setup.local_tokens * 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    passes = _forwards(setup) + steps
    yield Collective(
        name="all_gather",
        purpose="keys and values",
        payload_bytes=passes * local * ranks * setup.engine.element_bytes,
        group_size=ranks,
        group="cp",
        calls=passes * shape.num_layers,
    )
    yield Collective(
        name="permute",
        purpose="gradients of keys and values",
        payload_bytes=steps * local * ranks * 4,
        group_size=ranks,
        group="cp",
        calls=steps * shape.num_layers * ranks,
    )


def _ulysses(setup: TrainingSetup, ranks: int) -> Iterator[Collective]:
    """Query, key, value and output change between parts of the sequence and heads, in forward and backward."""
    shape = setup.shape
    heads = 2 * shape.num_attention_heads + 2 * max(shape.num_kv_heads, ranks)  # fewer keys and values are repeated
    passes = _forwards(setup) + setup.job.gradient_accumulation_steps
    payload = setup.local_tokens * heads * shape.head_dim * setup.engine.element_bytes
    yield Collective(
        name="all_to_all",
        purpose="heads of attention",
        payload_bytes=passes * payload * shape.num_layers,
        group_size=ranks,
        group="sp",
        calls=4 * passes * shape.num_layers,
    )
