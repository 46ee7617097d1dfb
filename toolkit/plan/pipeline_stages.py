"""The stages of a pipeline as the planner sees them: what each rank of `--pp` holds and sends, and the worst of them.

The stage with the head has its logits, the first one the most micro-batches in flight; either can need most memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import GPIPE, PipelineSettings, divide_layers
from toolkit.plan.collectives import Collective

ACTIVATION_BYTES = 4  # the residual stream between layers, also under autocast
LOG_PROBABILITY_BYTES = 4  # saved per logit between forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What one rank of a pipeline holds beside model states, in micro-batches of all its layers."""

    micro_batches_in_flight: float
    buffered_activations: int
    """Buffers for activations and gradients from other ranks, each of one micro-batch: torch allocates all at once."""
    logits_in_flight: int
    """Micro-batches whose log-probabilities wait for their backward, beside the one that computes."""


@lru_cache(maxsize=256)
def stage_shape(shape: ModelShape, settings: PipelineSettings, rank: int) -> ModelShape:
    """Return the part of a model that one rank of a pipeline holds; a tied head is a tensor of its own there."""
    ranges = divide_layers(shape.num_layers, settings.stages)
    layers = tuple(chain.from_iterable(shape.layers[part.start : part.stop] for part in _own(ranges, settings, rank)))
    first, last = rank == settings.rank_of(0), rank == settings.rank_of(settings.stages - 1)
    embeddings = tuple(tensor for tensor in shape.outer if tensor.is_embedding)
    head = tuple(tensor for tensor in shape.outer if not tensor.is_embedding)
    if shape.tied_embeddings:
        head += (Tensor(name="lm_head.weight", shape=embeddings[0].shape),)
    outer: Layer = (*(embeddings if first else ()), *(head if last else ()))
    return replace(
        shape,
        layers=layers,
        num_layers=len(layers),
        outer=outer,
        tied_embeddings=False,
        vocab_size=shape.vocab_size if last else 0,
    )


def _own(ranges: list[range], settings: PipelineSettings, rank: int) -> list[range]:
    return [ranges[stage] for stage in settings.stages_of(rank)]


def stage_load(settings: PipelineSettings, rank: int, *, micro_batches: int) -> StageLoad:
    """Return what one rank of a pipeline holds beside its model states."""
    received = settings.chunks - (1 if rank == 0 else 0)
    returned = settings.chunks - (1 if rank == settings.ranks - 1 else 0)
    is_last = rank == settings.ranks - 1
    return StageLoad(
        micro_batches_in_flight=settings.in_flight(rank, micro_batches) / settings.chunks,
        buffered_activations=(received + returned) * micro_batches,
        logits_in_flight=micro_batches - 1 if is_last and settings.schedule == GPIPE else 0,
    )


def bubble_factor(settings: PipelineSettings, micro_batches: int) -> float:
    """Return how many times longer a step takes than without waiting for other stages, if all take the same time.

    (p - 1) / (v m) of the ideal time for p ranks, v stages on each and m micro-batches (section 2.2 of
    https://arxiv.org/abs/2104.04473).

    >>> bubble_factor(PipelineSettings(ranks=4), 12)
    1.25
    """
    return 1 + (settings.ranks - 1) / (settings.chunks * micro_batches)


def pipeline_collectives(
    shape: ModelShape, settings: PipelineSettings, layout: ParallelLayout, *, tokens: int, micro_batches: int
) -> Iterator[Collective]:
    """Yield what a rank between two others sends in a step, and the reductions of gradients after it."""
    activation = ACTIVATION_BYTES * tokens * shape.hidden_size
    calls = 2 * micro_batches * settings.chunks
    yield Collective(
        name="permute",
        purpose="activations to the next stage, and their gradients back",
        payload_bytes=activation * calls,
        group_size=layout.pp,
        group="pp",
        calls=calls,
    )
    if shape.tied_embeddings:
        payload = 4 * shape.vocab_size * shape.hidden_size
        yield Collective(
            name="all_reduce", purpose="gradient of a tied embedding", payload_bytes=payload, group_size=2, group="pp"
        )
    if layout.dp_replicate > 1:
        own = max(stage_shape(shape, settings, rank).num_params for rank in range(layout.pp))
        yield Collective(
            name="all_reduce",
            purpose="gradients between pipelines",
            payload_bytes=4 * own,
            group_size=layout.dp_replicate,
            group="replicas",
            stride=layout.pp,
        )
