"""Sequence parallelism (Ulysses) through accelerate and DeepSpeed, and what is wrong there put right.

    config = sequence_parallel_config(layout, attention="sdpa")          # for `TrainingArguments.parallelism_config`
    apply_fixes(on_cpu=True)

docs/concepts/parallelism.md shows the figures without the fixes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.patches import patched_once

IGNORED = -100
TOKEN_WEIGHT = "sequence_parallel_weight"


def sequence_parallel_config(layout: ParallelLayout, *, attention: str) -> Any:
    """Return accelerate's `ParallelismConfig` of a layout with sequence parallelism; rows may differ in length."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention)
    return ParallelismConfig(sp_size=layout.sp, dp_shard_size=layout.dp_shard, sp_handler=handler)


def apply_fixes(*, on_cpu: bool) -> None:
    """Put the libraries right in this process, before the Trainer is built."""
    _keep_epochs()
    _weight_by_tokens()
    if on_cpu:
        _gather_backward_on_gloo()


@patched_once
def _keep_epochs() -> None:
    """Give DeepSpeed's loader of sequence parts epochs, and a start within one.

    Without it every epoch after the first begins at the end of the old iterator, `set_epoch` never reaches the sampler,
    and the Trainer's `skip_first_batches` raises: the loader has no `dataset`.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter as Adapter
    from transformers import trainer

    def iterate(self: Any) -> Iterator[Any]:
        self.micro_batches.clear()
        self.iter = iter(self.dl)
        skipped, self._skipped = getattr(self, "_skipped", 0), 0
        for _ in range(skipped):
            next(self)
        return self  # type: ignore[no-any-return]

    def set_epoch(self: Any, epoch: int) -> None:
        if hasattr(self.dl, "set_epoch"):
            self.dl.set_epoch(epoch)

    Adapter.__iter__ = iterate
    Adapter.set_epoch = set_epoch
    Adapter.batch_sampler = property(lambda self: self.dl.batch_sampler)
    Adapter.dataset = property(lambda self: self.dl.dataset)
    original = trainer.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, Adapter):
            return original(dataloader, num_batches)
        dataloader._skipped = num_batches
        return dataloader

    trainer.skip_first_batches = skip_first_batches


@patched_once
def _weight_by_tokens() -> None:
    """Weight each micro-batch's loss by its supervised tokens, as without sequence parallelism.

    The Trainer takes the mean of the micro-batches' means there, and of the data-parallel ranks'.
    """
    from transformers import Trainer

    samples, compute = Trainer.get_batch_samples, Trainer.compute_loss

    @functools.wraps(samples)
    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = samples(self, *args, **kwargs)
        if self.get_sp_size() > 1 and batches:
            for batch, weight in zip(batches, _token_weights(self, batches), strict=True):
                batch[TOKEN_WEIGHT] = weight
        return batches, items

    @functools.wraps(compute)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight = inputs.pop(TOKEN_WEIGHT, None) if model.training else None
        if weight is None:
            return compute(self, model, inputs, return_outputs, num_items_in_batch)
        from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

        found = deepspeed_sp_compute_loss(
            self.accelerator, model, inputs, return_outputs, self.accelerator.parallelism_config
        )
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    Trainer.get_batch_samples, Trainer.compute_loss = get_batch_samples, compute_loss


def _token_weights(trainer: Any, batches: list[Any]) -> list[float]:
    """Each micro-batch's share of the optimizer step's tokens, times what the Trainer divides the loss by later."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    device = trainer.accelerator.device
    counts = torch.tensor(
        [int((batch["shift_labels"] != IGNORED).sum()) for batch in batches], dtype=torch.float32, device=device
    )
    dist.all_reduce(counts, group=groups._get_sequence_parallel_group())  # of whole sequences
    total = counts.sum()
    dist.all_reduce(total)
    size = trainer.get_sp_size()
    replicas = dist.get_world_size() // size
    weights: list[float] = (counts * replicas * len(batches) * size / total).tolist()
    return weights


@patched_once
def _gather_backward_on_gloo() -> None:
    """Sum the gradients of an `all_gather` and keep this rank's part.

    torch's backward scatters on gloo from a group's rank as if it were a global one: it fails in every group that does
    not begin at rank 0, so with sequence parallelism beside data parallelism.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import functional

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = torch.stack([gradient.contiguous() for gradient in gradients])
        dist.all_reduce(summed, group=ctx.group)
        return None, summed[dist.get_rank(ctx.group)]

    functional._AllGather.backward = staticmethod(backward)
