"""Top-k gradient compression with error feedback, as a DDP communication hook.

Each rank sends the fraction of a bucket's elements that is largest in size, and keeps the rest: it is added to the
next step's gradient, so that nothing is lost, only late (Stich et al., https://arxiv.org/abs/1809.07599).

    ddp_model.register_comm_hook(TopK(0.01), top_k_hook)
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


class TopK:
    """What was not sent yet, one tensor a parameter: DDP builds its buckets anew after the first step."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.unsent: dict[torch.Tensor, torch.Tensor] = {}

    def add_unsent(self, bucket: dist.GradBucket) -> None:
        """Put what earlier steps kept back on this step's gradients."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self.unsent:
                gradient.add_(self.unsent[parameter].view_as(gradient))

    def keep_unsent(self, bucket: dist.GradBucket) -> None:
        """Keep what is left in the bucket for the next step."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self.unsent:
                self.unsent[parameter].copy_(gradient)
            else:
                self.unsent[parameter] = gradient.clone()


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of each rank's largest elements; zero where no rank sent."""
    buffer = bucket.buffer()
    state.add_unsent(bucket)
    k = max(1, math.ceil(state.fraction * buffer.numel()))
    indices = buffer.abs().topk(k, sorted=False).indices
    values = buffer[indices]
    buffer[indices] = 0
    state.keep_unsent(bucket)
    ranks = dist.get_world_size()
    sent = indices.to(torch.int32)  # a bucket has fewer than 2**31 elements
    all_indices = [torch.empty_like(sent) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    gathers = [dist.all_gather(all_indices, sent, async_op=True), dist.all_gather(all_values, values, async_op=True)]

    def add_up(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.zero_()
        for their_indices, their_values in zip(all_indices, all_values, strict=True):
            buffer.index_add_(0, their_indices, their_values / ranks)
        return buffer

    # Both, by name: gloo's threads may finish the second before the first.
    return torch.futures.collect_all([work.get_future() for work in gathers]).then(add_up)
