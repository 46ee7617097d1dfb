"""What torch 2.13 needs to run FSDP2 on fake tensors, and to tell what it allocates; undone afterwards.

with on_fake_tensors(memory, engine="fsdp2"):
    ...
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers import masking_utils
from transformers.integrations import moe

from toolkit.train.rehearsal.live_memory import LiveMemory


@contextlib.contextmanager
def on_fake_tensors(memory: LiveMemory, *, engine: str) -> Iterator[None]:
    """What is made inside has shapes only, and is counted."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_a_gpu_keeps())
        if engine == "fsdp2":
            for owner, name, context in _around(memory):
                stack.enter_context(_replaced(owner, name, _inside(context, getattr(owner, name))))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(memory)
        yield


@contextlib.contextmanager
def as_a_gpu_keeps() -> Iterator[None]:
    """Operators keep for the backward what a GPU's keep, and nothing looks into values that are not there."""
    attention = torch.nn.functional.scaled_dot_product_attention
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch.nn.Module, "_apply", _apply_without_swapping))
        stack.enter_context(_replaced(masking_utils, "find_packed_sequence_indices", _one_document_a_row))
        of_a_gpu = functools.partial(_attention_of_a_gpu, attention)
        stack.enter_context(_replaced(torch.nn.functional, "scaled_dot_product_attention", of_a_gpu))
        stack.enter_context(_replaced(torch.nn.functional, "dropout", _dropout_of_a_gpu))
        stack.enter_context(_replaced(moe, "_can_use_grouped_mm", _takes_bf16_alone))
        yield


def _around(memory: LiveMemory) -> list[tuple[Any, str, Callable[[], Any]]]:
    """What FSDP2 allocates to gather and to reduce is tagged; meshes hold ranks whose values are asked for.

    DTensor tries each operation once on tensors of the whole shape, to learn the result's: nothing of that is real.
    """
    return [
        (FSDPParamGroup, "unshard", lambda: memory.tagged("gathered")),
        (FSDPParamGroup, "wait_for_unshard", lambda: memory.tagged("gathered")),
        (FSDPParamGroup, "post_backward", lambda: memory.tagged("reduction")),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", memory.unseen),
        (_fully_shard, "_init_default_mesh", unset_fake_temporarily),
        (DeviceMesh, "__getitem__", unset_fake_temporarily),
        (DeviceMesh, "_flatten", unset_fake_temporarily),
    ]


def _inside(context: Callable[[], Any], function: Any) -> Any:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return inside


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _attention_of_a_gpu(attention: Any, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    """A CPU's flash attention has no dropout, and no values of another width than keys: all scores would be there. A
    GPU's kernels keep the seed alone, and take such values."""
    del dropout_p
    query, key, value = args[:3]
    if query.shape[1] == value.shape[1] and query.shape[-1] != value.shape[-1]:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        return _FusedAttention.apply(*(_computed_with(part) for part in (query, key, value)), mask)
    return attention(*args, **kwargs)


def _computed_with(tensor: Any) -> Any:
    """As autocast would hand it to the kernel."""
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


class _FusedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Query, key, value, output and a number a head and row; a mask in the query's dtype. There are no values."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        numbers = query.new_empty(rows, heads, length, dtype=torch.float32)
        bias = () if mask is None else (mask.to(query.dtype),)
        ctx.save_for_backward(query, key, value, output, numbers, *bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        del gradient
        return *(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None


def _dropout_of_a_gpu(tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A GPU keeps a mask of one byte an element; a CPU keeps noise in the tensor's own dtype."""
    del inplace
    return torch.native_dropout(tensor, p, True)[0] if training and p else tensor


def _takes_bf16_alone(tensor: Any, weight: Any, offs: Any) -> bool:
    """torch's rule for the shapes of grouped products refuses fp32, which its kernels take; transformers' own does not,
    and keeps the same tensors."""
    del tensor, offs
    return bool(weight.dtype == torch.bfloat16)


def _one_document_a_row(position_ids: torch.Tensor) -> None:
    """transformers would look for packed documents in the values, and make a mask where it cannot."""
    del position_ids


def _apply_without_swapping(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` would swap each fake parameter for its copy, and cannot where moving it changed nothing."""
    for part in module.modules() if recurse else [module]:
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                applied = fn(parameter)
            if applied is not parameter:
                part._parameters[key] = torch.nn.Parameter(applied, parameter.requires_grad)
        part._buffers.update({key: fn(buffer) for key, buffer in part._buffers.items() if buffer is not None})
    return module
