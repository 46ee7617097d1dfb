"""Ranks that divide each sequence: context parallelism (ring attention over FSDP2) and sequence parallelism (Ulysses).

Both are accelerate's, Ulysses with DeepSpeed; docs/concepts/parallelism.md shows the figures without the fixes.

With ring attention a sequence is divided into `2 * cp` pieces, of which each rank holds an early and a late one: causal
attention then gives every rank the same work. Rows are padded to a multiple of `2 * cp` tokens: torch 2.13 stops in a
tensor error at 65 tokens, and at 66 it divides unevenly and says nothing.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

from toolkit.parallel.layout import ParallelLayout

IGNORED = -100
TOKEN_WEIGHT = "sequence_parallel_weight"


def parallelism_config(layout: ParallelLayout, *, attention: str) -> Any:
    """Return accelerate's `ParallelismConfig` of a layout; under sequence parallelism rows may differ in length."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention) if layout.sp > 1 else None
    return ParallelismConfig(cp_size=layout.cp, sp_size=layout.sp, dp_shard_size=layout.dp_shard, sp_handler=handler)


@functools.cache
def ring_attention_on_cpu() -> None:
    """Give torch's ring templates the attention kernels of a CPU; torch dispatches CUDA's alone."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def unwrapped(values: Any) -> list[Any]:
        return [value._local_tensor if isinstance(value, DTensor) else value for value in values]

    def wrapped(mesh: Any, parts: Any) -> tuple[Any, ...]:
        return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts)

    def forward(_op: Any, args: Any, kwargs: Any) -> Any:
        mesh, kwargs = args[0].device_mesh, dict(kwargs)
        if kwargs.pop("attn_mask", None) is not None:
            raise NotImplementedError("ring attention takes no mask")
        query, key, value, dropout, causal = (*unwrapped(args), 0.0, False)[:5]
        if dropout:
            raise NotImplementedError("the attention kernel of a CPU has no dropout")
        if key.shape[1] != query.shape[1]:  # the kernel has no grouped queries
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        parts = ring._templated_ring_attention(
            mesh.get_group(), 2, forward_op, query, key, value,
            is_causal=causal, dropout_p=0.0, scale=kwargs.get("scale"),
        )  # fmt: skip
        return wrapped(mesh, parts)

    def backward(_op: Any, args: Any, kwargs: Any) -> Any:
        mesh, scale = args[1].device_mesh, kwargs.get("scale")
        gradient, query, key, value, out, logsumexp, _, causal = unwrapped(args)

        def kernel(*, grad_out: Any, is_causal: bool, scale: Any, **held: Any) -> Any:
            tensors = (held[name] for name in ("query", "key", "value", "out", "logsumexp"))
            return backward_op(grad_out, *tensors, 0.0, is_causal, scale=scale)

        parts = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, kernel, grad_out=gradient, grad_out_name="grad_out",
            query=query, key=key, value=value, out=out, logsumexp=logsumexp, is_causal=causal, scale=scale,
        )  # fmt: skip
        return wrapped(mesh, parts)

    ring.custom_ops[forward_op], ring.custom_ops[backward_op] = forward, backward


def apply_ulysses_fixes(*, on_cpu: bool) -> None:
    """Put the libraries right in this process, before the Trainer is built."""
    _same_rows_for_a_group()
    _attend_in_every_batch()
    _weight_by_tokens()
    if on_cpu:
        _gather_backward_on_gloo()


class SequenceParts:
    """Batches of a loader that gives the same rows to all ranks of a group; each rank takes its part of every row.

    DeepSpeed's own loader deals different rows to the ranks and gathers them: rows meet in other optimizer steps unless
    `--gradient_accumulation_steps` is a multiple of `--sp`, an epoch that does not divide repeats rows, later epochs
    begin at the end of the old iterator, and the Trainer cannot skip batches when it resumes.
    """

    def __init__(self, loader: Any, *, rank: int, size: int) -> None:
        self.loader, self.rank, self.size = loader, rank, size
        self.dataset, self.batch_sampler, self.batch_size = loader.dataset, loader.batch_sampler, loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of every row, with labels shifted before they are cut (`shift_labels`)."""
        import torch

        for batch in self.loader:
            labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
            whole = {name: value for name, value in batch.items() if name != "labels"} | {"shift_labels": labels}
            yield {
                name: value.chunk(self.size, dim=1)[self.rank].contiguous() if torch.is_tensor(value) else value
                for name, value in whole.items()
            }

    def set_epoch(self, epoch: int) -> None:
        """Draw another order of the rows."""
        self.loader.set_epoch(epoch)


@functools.cache
def _same_rows_for_a_group() -> None:
    """Deal rows to groups of ranks, as accelerate does for tensor and context parallelism."""
    from accelerate import Accelerator, accelerator
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups
    from transformers import Trainer, trainer

    prepare, values = accelerator.prepare_data_loader, Trainer.set_initial_training_values
    skip, evaluation = trainer.skip_first_batches, Trainer.get_eval_dataloader

    @functools.wraps(prepare)
    def prepare_data_loader(*args: Any, num_processes: int, process_index: int, **kwargs: Any) -> Any:
        config = AcceleratorState().parallelism_config
        size = 1 if config is None else config.sp_size
        return prepare(*args, num_processes=num_processes // size, process_index=process_index // size, **kwargs)

    def parts(self: Any, loader: Any, _model: Any = None) -> Any:
        if self.parallelism_config is None or self.parallelism_config.sp_size == 1:
            return loader
        rank, size = groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()
        return SequenceParts(loader, rank=rank, size=size)

    @functools.wraps(evaluation)
    def get_eval_dataloader(self: Any, *args: Any, **kwargs: Any) -> Any:
        return parts(self.accelerator, evaluation(self, *args, **kwargs))

    @functools.wraps(values)
    def set_initial_training_values(self: Any, args: Any, loader: Any) -> Any:
        counted, total = copy.copy(self), self.get_total_train_batch_size(args)
        counted.get_sp_size, counted.get_total_train_batch_size = lambda: 1, lambda _: total
        return values(counted, args, loader)  # it would multiply the loader's length by the size of a group

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        if not isinstance(loader, SequenceParts):
            return skip(loader, num_batches)
        return SequenceParts(skip(loader.loader, num_batches), rank=loader.rank, size=loader.size)

    accelerator.prepare_data_loader, trainer.skip_first_batches = prepare_data_loader, skip_first_batches
    Accelerator.deepspeed_ulysses_dl_adapter = parts
    Trainer.set_initial_training_values = set_initial_training_values
    Trainer.get_eval_dataloader = get_eval_dataloader


@functools.cache
def _attend_in_every_batch() -> None:
    """Let DeepSpeed's attention take batches of any number of rows, and exchange heads in evaluations too.

    It asserts the number of rows of a training batch, which the last one of an epoch may not have. In evaluations
    accelerate has it compute whole rows on each rank, and logits for each token of them, which may not fit.
    """
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF as Attention
    from transformers import Trainer

    attend, evaluate = Attention.forward, Trainer.evaluation_loop
    evaluates = False

    @functools.wraps(attend)
    def forward(self: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.batch_size = query.shape[0]
        for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
            length, _, *widths = getattr(self, name)
            setattr(self, name, torch.Size([length or 0, self.batch_size, *widths]))
        self.disable_in_eval = not evaluates  # the live model's logits for fixed tokens are of whole rows
        return attend(self, module, query, *args, **kwargs)

    @functools.wraps(evaluate)
    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        nonlocal evaluates
        evaluates = True
        try:
            return evaluate(*args, **kwargs)
        finally:
            evaluates = False

    Attention.forward, Trainer.evaluation_loop = forward, evaluation_loop


@functools.cache
def _weight_by_tokens() -> None:
    """Weight each micro-batch's loss by its supervised tokens; the Trainer takes the mean of means here."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups
    from transformers import Trainer
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    samples, compute = Trainer.get_batch_samples, Trainer.compute_loss

    @functools.wraps(samples)
    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = samples(self, *args, **kwargs)
        if self.get_sp_size() > 1 and batches:
            counts = [int((batch["shift_labels"] != IGNORED).sum()) for batch in batches]
            tokens = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
            dist.all_reduce(tokens, group=groups._get_sequence_parallel_group())  # of whole sequences
            total = tokens.sum()
            dist.all_reduce(total)
            # The share of the optimizer step's tokens, times what the Trainer divides the loss by later.
            for batch, weight in zip(batches, tokens * dist.get_world_size() * len(batches) / total, strict=True):
                batch[TOKEN_WEIGHT] = float(weight)
        return batches, items

    @functools.wraps(compute)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight = inputs.pop(TOKEN_WEIGHT, None) if model.training else None
        if weight is None:
            return compute(self, model, inputs, return_outputs, num_items_in_batch)
        config = self.accelerator.parallelism_config
        found = deepspeed_sp_compute_loss(self.accelerator, model, inputs, return_outputs, config)
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    Trainer.get_batch_samples, Trainer.compute_loss = get_batch_samples, compute_loss


@functools.cache
def _gather_backward_on_gloo() -> None:
    """Sum the gradients of an `all_gather` and keep this rank's part.

    torch's backward scatters on gloo from a group's rank as if it were a global one: it fails where a group does not
    begin at rank 0.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import functional

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = torch.stack([gradient.contiguous() for gradient in gradients])
        dist.all_reduce(summed, group=ctx.group)
        return None, summed[dist.get_rank(ctx.group)]

    functional._AllGather.backward = staticmethod(backward)
