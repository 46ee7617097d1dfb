"""The stages of a pipeline as the planner sees them: what each rank of `--pp` holds and sends, and the worst of them.

The stage with the head has its logits, the first one the most micro-batches in flight; either can need most memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.parallel.pipeline_schedule import GPIPE, PipelineSettings, divide_layers

ACTIVATION_BYTES = 4  # the residual stream between layers, also under autocast
LOG_PROBABILITY_BYTES = 4  # saved per logit between forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What one rank of a pipeline holds beside model states, in micro-batches of all its layers."""

    micro_batches_in_flight: float
    buffered_activations: int = 0
    """Buffers for activations and gradients from other ranks, each of one micro-batch: torch allocates all at once."""
    logits_in_flight: int = 0
    """Micro-batches whose log-probabilities wait for their backward, beside the one that computes."""


def stage_shape(shape: ModelShape, settings: PipelineSettings, rank: int) -> ModelShape:
    """Return the part of a model that one rank of a pipeline holds."""
    return model_part(shape, settings.stages, tuple(settings.stages_of(rank)))


@lru_cache(maxsize=1024)
def model_part(shape: ModelShape, stages: int, own: tuple[int, ...]) -> ModelShape:
    """Return what some of the stages into which a model is divided hold of it.

    The first has the embedding, the last the final norm and the head; a tied head is a tensor of its own there.
    """
    ranges = divide_layers(shape.num_layers, stages)
    layers = tuple(chain.from_iterable(shape.layers[ranges[stage].start : ranges[stage].stop] for stage in own))
    embeddings = tuple(tensor for tensor in shape.outer if tensor.is_embedding)
    head = tuple(tensor for tensor in shape.outer if not tensor.is_embedding)
    if shape.tied_embeddings and stages > 1:
        head += (Tensor(name="lm_head.weight", shape=embeddings[0].shape),)
    is_last = stages - 1 in own
    outer: Layer = (*(embeddings if 0 in own else ()), *(head if is_last else ()))
    return replace(
        shape,
        layers=layers,
        num_layers=len(layers),
        outer=outer,
        tied_embeddings=shape.tied_embeddings and stages == 1,
        vocab_size=shape.vocab_size if is_last else 0,
        num_sliding_layers=round(shape.num_sliding_layers * len(layers) / shape.num_layers),
    )


def stage_load(settings: PipelineSettings, rank: int, *, micro_batches: int) -> StageLoad:
    """Return what one rank of a pipeline holds beside its model states."""
    is_first, is_last = rank == 0, rank == settings.ranks - 1
    return StageLoad(
        micro_batches_in_flight=settings.in_flight(rank, micro_batches) / settings.chunks,
        buffered_activations=(2 * settings.chunks - is_first - is_last) * micro_batches,
        logits_in_flight=micro_batches - 1 if is_last and settings.schedule == GPIPE else 0,
    )
