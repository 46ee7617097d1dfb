"""Bytes, dtypes and digests of live tensors under any engine: DTensors, ZeRO-3 shards, 4-bit weights."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# `module.` comes last: it is part of the names before it.
_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: a DTensor's shard, or the tensor itself."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def uncompiled(module: Any) -> Any:
    """Return the module inside `torch.compile`'s wrapper; FSDP2 shards the wrapper itself, which is kept."""
    from torch.distributed.fsdp import FSDPModule

    return module if isinstance(module, FSDPModule) else getattr(module, "_orig_mod", module)


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that this rank holds of the tensors, each storage region once, with 4-bit weights' constants."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        for part in (*_plain(local(tensor)), *_quantization_constants(tensor)):
            size = part.numel() * part.element_size()
            if size:
                seen[part.data_ptr(), size] = size
    return sum(seen.values())


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a subclass that only looks like a tensor, as torchao's quantized states do."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]


def _quantization_constants(tensor: Any) -> list[torch.Tensor]:
    """Scales, their own scales and code tables, which bitsandbytes keeps beside a 4-bit weight."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return []
    second = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *second]


def optimizer_state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps per parameter, without scalar step counters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0]


def class_name(optimizer: Any) -> str:
    """Return the package and the class of an optimizer inside accelerate's: `torch.AdamW`."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def is_paged(optimizer: Any) -> bool:
    """Return True if the states of bitsandbytes' optimizer inside accelerate's may leave the GPU page by page."""
    return bool(getattr(getattr(optimizer, "optimizer", optimizer), "is_paged", False))


def dtype_names(tensors: Iterable[Any]) -> str | None:
    """Return `float32`, or several sorted names joined by `+`; None without tensors."""
    dtypes = {part.dtype for tensor in tensors for part in _plain(local(tensor))}
    return "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or None


def frozen_weights(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters that are not trained, without 4-bit weights, which no dtype describes."""
    return [p for p in parameters if not p.requires_grad and not hasattr(p, "quant_state")]


def device_types(tensors: Iterable[Any]) -> set[str]:
    """Return the device types (`cpu`, `cuda`) of the tensors that are not empty."""
    return {local(tensor).device.type for tensor in tensors if local(tensor).numel()}


def full_size(parameter: Any) -> int:
    """Return the elements of the unsharded parameter, also under ZeRO-3 and where two 4-bit elements share a byte."""
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:
        return math.prod(quantized.shape)
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the unsharded parameter."""
    return tuple(getattr(parameter, "ds_shape", None) or parameter.shape)


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that engines and wrappers add.

    >>> clean_name("module._orig_mod.model.norm.weight")
    'model.norm.weight'
    """
    for part in _WRAPPER_PREFIXES:
        name = name.replace(part, "")
    return name


def weights_sha256(model: Any, dtype: torch.dtype) -> str:
    """Return the SHA-256 of all unsharded parameters in name order, rounded to the compute dtype.

    Gathers one parameter at a time, so every rank must call it.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted((clean_name(name), p) for name, p in model.named_parameters()):
        with _gathered(parameter) as full:
            flat = full.detach().to(dtype=dtype, device="cpu").contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


@contextlib.contextmanager
def _gathered(parameter: Any) -> Iterator[torch.Tensor]:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    elif hasattr(parameter, "full_tensor"):
        yield parameter.full_tensor()
    else:
        yield parameter.data
