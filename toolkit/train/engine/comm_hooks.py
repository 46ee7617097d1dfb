"""DDP's gradient communication hooks: torch's own and top-k compression, counted and read back.

Each hook's module sees torch.distributed through a counter of the bytes and dtypes that it sends on this rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from transformers import TrainerCallback

from toolkit.engines.tensors import dtype_name, uncompiled
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.observe.observed_run import ObservedRun

PLAIN_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    # per channel of 512: per tensor, one outlier decides the scale of a whole bucket
    "int8": quantization_hooks.quantization_perchannel_hook,
}


class CommunicationHook(TrainerCallback):  # type: ignore[misc]
    """Registers `--ddp_comm_hook` once DDP wraps the model, and records in run.json the bytes that it sent."""

    def __init__(self, run: ObservedRun, trainer: Any, arguments: ModelArguments) -> None:
        self.run, self.trainer, self.arguments = run, trainer, arguments
        self.hook: CountedHook | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook on the live model. Raises ToolkitError where DDP does not wrap it."""
        wrapped, job = uncompiled(self.trainer.model_wrapped), self.arguments
        if not isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            raise ToolkitError(
                f"--ddp_comm_hook: the model is wrapped in {type(wrapped).__name__}, not in DistributedDataParallel",
                hint="`--preset ddp`, with two processes or more",
            )
        self.hook, state = CountedHook(str(job.ddp_comm_hook)), None
        for module in (default_hooks, powerSGD_hook, quantization_hooks):
            setattr(module, "dist", self.hook)  # noqa: B010  (mypy)
        if self.hook.name == "power_sgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=job.ddp_comm_hook_power_sgd_rank,
                start_powerSGD_iter=job.ddp_comm_hook_power_sgd_start,
            )
            self.hook.hook = powerSGD_hook.powerSGD_hook
        elif self.hook.name == "top_k":
            self.hook.hook = TopK(job.ddp_comm_hook_top_k_fraction, self.hook)
        wrapped.register_comm_hook(state, self.hook)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.hook is not None
        self.hook.at_step_ends.append(self.hook.bytes.copy())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Record the bytes of each step, which are the last step's, after any uncompressed start."""
        assert self.hook is not None
        if self.run.writes and self.hook.calls:
            before, after = self.hook.at_step_ends[-2:]
            facts = {"name": self.hook.name, "steps": len(self.hook.at_step_ends) - 1}
            facts |= {f"{part}_bytes_per_step": after[part] - before[part] for part in after}
            facts |= {f"{part}_bytes": after[part] for part in ("communication", "uncompressed")}
            self.run.folder.update_run(ddp_comm_hook=facts | {"dtypes": sorted(self.hook.dtypes)})


class CountedHook:
    """A registered hook, and the torch.distributed that it sees: the payload of its collectives is counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hook: Callable[[Any, Any], Any] = partial(PLAIN_HOOKS.get(name, default_hooks.allreduce_hook))
        self.calls, self.dtypes = 0, set[str]()
        self.bytes: Counter[str] = Counter()
        """Passed to collectives, in the buckets, and sent in a ring, so far on this rank."""
        self.at_step_ends: list[Counter[str]] = [Counter()]
        self.__name__ = self.__qualname__ = f"toolkit:{name}"

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        self.calls += 1
        self.bytes["uncompressed"] += bucket.buffer().nbytes
        return self.hook(state, bucket)

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
        self.bytes["communication"] += tensor.nbytes
        self.bytes["ring"] += round(ring_share * tensor.nbytes)
        self.dtypes.add(dtype_name(tensor.dtype))


class _Gathered:
    """The work of a gather whose future holds one stacked tensor, as NCCL's does and torch's int8 hook expects."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        self.work, self.tensors = work, tensors

    def get_future(self) -> Any:
        return self.work.get_future().then(lambda _: [torch.stack(self.tensors)])


def registered_hook(wrapped: Any) -> CountedHook | None:
    """Return the hook that the live DDP model has called; None where none was called."""
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ()) if isinstance(hook, CountedHook)]
    return hooks[0] if hooks and hooks[0].calls else None


def hook_name(wrapped: Any) -> str | None:
    """Return the name of the hook that the live DDP model has called, or of one that a library registered."""
    hook = registered_hook(wrapped)
    others = [each for each, _ in getattr(wrapped, "_comm_hooks", ()) if not isinstance(each, CountedHook)]
    return hook.name if hook else others[0].__qualname__ if others else None


def hook_dtype(wrapped: Any) -> str | None:
    """Return the dtypes that DDP's communication hook has sent; None without a hook."""
    hook = registered_hook(wrapped)
    return None if hook is None else "+".join(sorted(hook.dtypes))


class TopK:
    """Top-k compression with error feedback, as a hook of DDP.

    Each rank sends the `fraction` of a bucket's elements that is largest in magnitude and holds the rest back for the
    next step's gradient, so that nothing is lost, only late (Stich et al., https://arxiv.org/abs/1809.07599).
    """

    def __init__(self, fraction: float, collectives: Any) -> None:
        self.fraction, self.collectives = fraction, collectives
        self.unsent: dict[torch.Tensor, torch.Tensor] = {}
        """What was not sent yet, by parameter: DDP rebuilds its buckets after the first step."""

    def __call__(self, _state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the mean over ranks of each rank's largest elements; zero where no rank sent one."""
        buffer = bucket.buffer()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self.unsent:
                gradient.add_(self.unsent[parameter].view_as(gradient))
        k = max(1, math.ceil(self.fraction * buffer.numel()))
        indices = buffer.abs().topk(k, sorted=False).indices
        values = buffer[indices]
        buffer[indices] = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.unsent[parameter] = gradient.clone()
        ranks = dist.get_world_size()
        sent = indices.to(torch.int32)  # a bucket has fewer than 2**31 elements
        all_indices = [torch.empty_like(sent) for _ in range(ranks)]
        all_values = [torch.empty_like(values) for _ in range(ranks)]
        pairs = ((all_indices, sent), (all_values, values))
        gathers = [self.collectives.all_gather(*pair, async_op=True).get_future() for pair in pairs]

        def add_up(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            buffer.zero_()
            for rank_indices, rank_values in zip(all_indices, all_values, strict=True):
                buffer.index_add_(0, rank_indices, rank_values / ranks)
            return buffer

        # Wait for both: gloo's threads may finish the second before the first.
        return torch.futures.collect_all(gathers).then(add_up)
