"""DDP's gradient communication hooks: torch's own and top-k compression, counted and read back.

Counted are the bytes of the tensors that a hook passes to `all_reduce` and `all_gather` on this rank, with their
dtypes. Each hook's module sees torch.distributed through a counter, so no other communication is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from transformers import TrainerCallback

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.observe.attest.tensors import uncompiled
from toolkit.train.active_run import ActiveRun

PLAIN_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    # per channel of 512: per tensor, one outlier decides the scale of a whole bucket
    "int8": quantization_hooks.quantization_perchannel_hook,
}


class CommunicationHook(TrainerCallback):  # type: ignore[misc]
    """Registers `--ddp_comm_hook` once DDP wraps the model, and records in run.json the bytes that it sent."""

    def __init__(self, run: ActiveRun, trainer: Any) -> None:
        self.run, self.trainer = run, trainer
        self.hook: CountedHook | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.hook = register_hook(uncompiled(self.trainer.model_wrapped), self.run.arguments.job)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.hook is not None
        self.hook.end_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        assert self.hook is not None
        if self.run.writes and self.hook.steps:
            self.run.folder.update_run(ddp_comm_hook=self.hook.facts())


class CountingDist:
    """torch.distributed with the payload of its collectives counted; everything else passes through."""

    def __init__(self) -> None:
        self.bytes, self.ring_bytes, self.calls = 0, 0.0, 0
        self.dtypes: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_world_size()
        self._count(tensor, 2 * (ranks - 1) / ranks)  # a ring reduces and gathers (N-1)/N of it
        return dist.all_reduce(tensor, *args, **kwargs)

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._count(tensor, dist.get_world_size() - 1)
        return _Gathered(dist.all_gather(tensors, tensor, *args, **kwargs), tensors)

    def _count(self, tensor: torch.Tensor, ring_share: float) -> None:
        size = tensor.numel() * tensor.element_size()
        self.bytes, self.ring_bytes, self.calls = self.bytes + size, self.ring_bytes + ring_share * size, self.calls + 1
        self.dtypes.add(str(tensor.dtype).removeprefix("torch."))


class _Gathered:
    """The work of a gather whose future holds one stacked tensor, as NCCL's does and torch's int8 hook expects."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        self.work, self.tensors = work, tensors

    def get_future(self) -> Any:
        return self.work.get_future().then(lambda _: [torch.stack(self.tensors)])


class CountedHook:
    """A registered hook and the bytes that it has sent so far on this rank."""

    def __init__(self, name: str, hook: Callable[[Any, Any], Any], counter: CountingDist) -> None:
        self.name, self.hook, self.counter = name, hook, counter
        self.calls, self.uncompressed_bytes = 0, 0
        self.steps: list[tuple[int, int, float]] = []
        """Per optimizer step: bytes passed to collectives, bytes of the buckets, bytes that a ring sends."""
        self._before = (0, 0, 0.0)
        self.__name__ = self.__qualname__ = f"toolkit:{name}"

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        self.calls += 1
        self.uncompressed_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        return self.hook(state, bucket)

    def end_step(self) -> None:
        """Close an optimizer step: record the bytes that it sent."""
        now = (self.counter.bytes, self.uncompressed_bytes, self.counter.ring_bytes)
        sent, uncompressed, ring = (after - before for after, before in zip(now, self._before, strict=True))
        self.steps.append((int(sent), int(uncompressed), ring))
        self._before = now

    def facts(self) -> dict[str, Any]:
        """Return run.json's `ddp_comm_hook`; the per-step figures are the last step's, after any uncompressed start."""
        sent, uncompressed, ring = self.steps[-1]
        return {
            "name": self.name,
            "steps": len(self.steps),
            "communication_bytes_per_step": sent,
            "uncompressed_bytes_per_step": uncompressed,
            "ring_bytes_per_step": round(ring),
            "communication_bytes": sum(step[0] for step in self.steps),
            "uncompressed_bytes": sum(step[1] for step in self.steps),
            "dtypes": sorted(self.counter.dtypes),
        }


def register_hook(wrapped: Any, arguments: ModelArguments) -> CountedHook:
    """Register `arguments.ddp_comm_hook` on the live DDP model. Raises ToolkitError where DDP does not wrap it."""
    if not isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        raise ToolkitError(
            f"--ddp_comm_hook: the model is wrapped in {type(wrapped).__name__}, not in DistributedDataParallel",
            hint="`--preset ddp`, with two processes or more",
        )
    counter = CountingDist()
    for module in (default_hooks, powerSGD_hook, quantization_hooks):
        setattr(module, "dist", counter)  # noqa: B010  (mypy)
    name, state = str(arguments.ddp_comm_hook), None
    function: Callable[[Any, Any], Any]
    if name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=arguments.ddp_comm_hook_power_sgd_rank,
            start_powerSGD_iter=arguments.ddp_comm_hook_power_sgd_start,
        )
        function = powerSGD_hook.powerSGD_hook
    elif name == "top_k":
        state, function = TopK(arguments.ddp_comm_hook_top_k_fraction, counter), top_k_hook
    else:
        function = partial(PLAIN_HOOKS[name])
    hook = CountedHook(name, function, counter)
    wrapped.register_comm_hook(state, hook)
    return hook


def registered_hook(wrapped: Any) -> CountedHook | None:
    """Return the hook that the live DDP model has called; None where none was called."""
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ()) if isinstance(hook, CountedHook)]
    return hooks[0] if hooks and hooks[0].calls else None


class TopK:
    """Top-k compression with error feedback: state of `top_k_hook`.

    Each rank sends the `fraction` of a bucket's elements that is largest in magnitude and holds the rest back for the
    next step's gradient, so that nothing is lost, only late (Stich et al., https://arxiv.org/abs/1809.07599).
    """

    def __init__(self, fraction: float, collectives: Any = dist) -> None:
        self.fraction, self.collectives = fraction, collectives
        self.unsent: dict[torch.Tensor, torch.Tensor] = {}
        """What was not sent yet, by parameter: DDP rebuilds its buckets after the first step."""


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of each rank's largest elements; zero where no rank sent one."""
    buffer = bucket.buffer()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state.unsent:
            gradient.add_(state.unsent[parameter].view_as(gradient))
    k = max(1, math.ceil(state.fraction * buffer.numel()))
    indices = buffer.abs().topk(k, sorted=False).indices
    values = buffer[indices]
    buffer[indices] = 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state.unsent:
            state.unsent[parameter].copy_(gradient)
        else:
            state.unsent[parameter] = gradient.clone()
    ranks = dist.get_world_size()
    sent = indices.to(torch.int32)  # a bucket has fewer than 2**31 elements
    all_indices = [torch.empty_like(sent) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    gathers = [
        state.collectives.all_gather(all_indices, sent, async_op=True),
        state.collectives.all_gather(all_values, values, async_op=True),
    ]

    def add_up(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.zero_()
        for rank_indices, rank_values in zip(all_indices, all_values, strict=True):
            buffer.index_add_(0, rank_indices, rank_values / ranks)
        return buffer

    # Wait for both: gloo's threads may finish the second before the first.
    return torch.futures.collect_all([work.get_future() for work in gathers]).then(add_up)
