"""DDP's gradient-communication hooks: torch's own and top-k, registered, counted and read back.

    hook = register_hook(ddp_model, arguments)    # before the first backward
    hook.step_bytes                               # of the step under way

Counted are the bytes of the tensors that the hook hands to `all_reduce` and `all_gather` on this rank, with their
dtypes. Each hook's module sees torch.distributed through a counter, so nothing else of the run is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from toolkit.errors import ToolkitError
from toolkit.runs.arguments import ModelArguments
from toolkit.train import top_k_hook

HOOK_MODULES = (default_hooks, powerSGD_hook, quantization_hooks, top_k_hook)


class CountingDist:
    """torch.distributed with the payload of its collectives counted; everything else passes by."""

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
    """A gather's work whose future holds one stacked tensor, as NCCL's does and torch's int8 hook expects it."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        self.work, self.tensors = work, tensors

    def get_future(self) -> Any:
        return self.work.get_future().then(lambda _: [torch.stack(self.tensors)])


class HookInForce:
    """One registered hook and what it has sent so far on this rank."""

    def __init__(self, name: str, hook: Callable[[Any, Any], Any], counter: CountingDist) -> None:
        self.name, self.hook, self.counter = name, hook, counter
        self.calls, self.uncompressed_bytes = 0, 0
        self.steps: list[tuple[int, int, float]] = []
        """Per optimizer step: bytes handed over, bytes of the buckets, bytes that a ring sends."""
        self._before = (0, 0, 0.0)
        self.__name__ = self.__qualname__ = f"toolkit:{name}"

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        self.calls += 1
        self.uncompressed_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        return self.hook(state, bucket)

    def end_step(self) -> None:
        """The optimizer step is over: keep what it sent."""
        now = (self.counter.bytes, self.uncompressed_bytes, self.counter.ring_bytes)
        sent, whole, ring = (after - before for after, before in zip(now, self._before, strict=True))
        self.steps.append((int(sent), int(whole), ring))
        self._before = now

    @property
    def step_bytes(self) -> int:
        """Bytes handed over in the last finished step."""
        return self.steps[-1][0]

    def facts(self) -> dict[str, Any]:
        """What run.json says; one step is the last one, after any uncompressed beginning."""
        sent, whole, ring = self.steps[-1]
        return {
            "name": self.name,
            "steps": len(self.steps),
            "communication_bytes_per_step": sent,
            "uncompressed_bytes_per_step": whole,
            "ring_bytes_per_step": round(ring),
            "communication_bytes": sum(step[0] for step in self.steps),
            "uncompressed_bytes": sum(step[1] for step in self.steps),
            "dtypes": sorted(self.counter.dtypes),
        }


def register_hook(wrapped: Any, arguments: ModelArguments) -> HookInForce | None:
    """Register the hook that was asked for on the live DDP model; None where none was."""
    if arguments.ddp_comm_hook is None:
        return None
    if not isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        raise ToolkitError(
            f"--ddp_comm_hook: the model is wrapped in {type(wrapped).__name__}, not in DistributedDataParallel",
            hint="`--preset ddp`, with two processes or more",
        )
    counter = CountingDist()
    for module in HOOK_MODULES:
        setattr(module, "dist", counter)  # noqa: B010  (mypy)
    state, function = _hook(arguments)
    hook = HookInForce(arguments.ddp_comm_hook, function, counter)
    wrapped.register_comm_hook(state, hook)
    return hook


def registered_hook(wrapped: Any) -> HookInForce | None:
    """The hook that the live DDP model calls, if it was called at all."""
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ()) if isinstance(hook, HookInForce)]
    return hooks[0] if hooks and hooks[0].calls else None


def _hook(arguments: ModelArguments) -> tuple[Any, Callable[[Any, Any], Any]]:
    """State and function, as DDP takes them."""
    functions = {
        "allreduce": default_hooks.allreduce_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "fp16": default_hooks.fp16_compress_hook,
        # per channel of 512: per tensor, one outlier decides the scale of a whole bucket
        "int8": quantization_hooks.quantization_perchannel_hook,
    }
    name = str(arguments.ddp_comm_hook)
    if name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=arguments.ddp_comm_hook_power_sgd_rank,
            start_powerSGD_iter=arguments.ddp_comm_hook_power_sgd_start,
        )
        return state, powerSGD_hook.powerSGD_hook
    if name == "top_k":
        return top_k_hook.TopK(arguments.ddp_comm_hook_top_k_fraction), top_k_hook.top_k_hook
    return None, partial(functions[name])
