"""How often ZeRO-3 gathers a tensor: deepspeed 0.19.8 keeps what is used again soon.

>>> first, again = zero3_gathers(job, persistent=40_960, reuse=1_000_000_000)
"""

from __future__ import annotations

from collections import Counter

from toolkit.models.shape import is_embedding
from toolkit.plan.traffic import TrafficJob


def zero3_gathers(job: TrafficJob, persistent: int, reuse: int) -> tuple[Counter[int], Counter[int]]:
    """How often tensors of each size are gathered in a micro-step: for the first time, and again.

    deepspeed records the order in which modules are used, and releases a tensor after a use unless it is used again
    within `stage3_max_reuse_distance` elements: a model of half that many parameters is gathered once, not twice.
    """
    uses = _uses(job)
    position_of_next: dict[int, int] = {}
    travelled = [0]
    for _, size in uses:
        travelled.append(travelled[-1] + size)
    released_before = [True] * len(uses)
    for place in range(len(uses) - 1, -1, -1):
        tensor, _ = uses[place]
        following = position_of_next.get(tensor)
        if following is not None:
            released_before[following] = travelled[following] - travelled[place + 1] >= reuse
        position_of_next[tensor] = place
    first: Counter[int] = Counter()
    again: Counter[int] = Counter()
    for place, (tensor, size) in enumerate(uses):
        if size <= persistent:
            continue
        if position_of_next[tensor] == place:
            first[size] += 1
        elif released_before[place]:
            again[size] += 1
    return first, again


def _uses(job: TrafficJob) -> list[tuple[int, int]]:
    """(tensor, elements) in the order of use: forward, then backward, with a layer's recomputation before it."""
    numbered = iter(range(10**9))
    embeddings = [(next(numbered), tensor.num_elements) for tensor in job.shape.outer if is_embedding(tensor)]
    layers = [[(next(numbered), tensor.num_elements) for tensor in layer] for layer in job.layers]
    rest = [(next(numbered), tensor.num_elements) for tensor in job.shape.outer if not is_embedding(tensor)]
    head = [*rest, *(embeddings[:1] if job.shape.tied_embeddings else [])]
    uses = [*embeddings, *(use for layer in layers for use in layer), *head, *reversed(head)]
    for layer in reversed(layers):
        uses += [*layer, *reversed(layer)] if job.activation_checkpointing else [*reversed(layer)]
    return uses + list(reversed(embeddings))
