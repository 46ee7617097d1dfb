"""Bytes, dtypes and digests of live tensors, whatever engine holds them."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# The last is a part of others.
WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, or the tensor itself."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def uncompiled(module: Any) -> Any:
    """What `torch.compile` was given. FSDP2 shards the compiler's wrapper itself, which stays outermost there."""
    from torch.distributed.fsdp import FSDPModule

    return module if isinstance(module, FSDPModule) else getattr(module, "_orig_mod", module)


def local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of what this rank holds of the tensors, 4-bit ones with their constants, each storage region once."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        for part in (local(tensor), *constants(tensor)):
            size = part.numel() * part.element_size()
            if size:
                seen[part.data_ptr(), size] = size
    return sum(seen.values())


def constants(tensor: Any) -> list[torch.Tensor]:
    """What bitsandbytes unpacks a 4-bit weight with: scales, the scales' own scales, and tables; nothing of others."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return []
    second = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *second]


def dtype_names(tensors: Iterable[Any]) -> str | None:
    """`float32`, or several names joined by `+`; None without tensors."""
    names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return "+".join(names) or None


def device_types(tensors: Iterable[Any]) -> set[str]:
    """`cpu`, `cuda`, ... of the tensors that hold something."""
    return {local(tensor).device.type for tensor in tensors if local(tensor).numel()}


def full_size(parameter: Any) -> int:
    """Elements of the whole parameter, also where ZeRO-3 keeps only a shard of it, or two 4-bit ones fill a byte."""
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:
        return math.prod(quantized.shape)
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", None) or parameter.shape)


def clean_name(name: str) -> str:
    """A parameter's name without what engines and wrappers put in front of its parts."""
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def weights_sha256(model: Any, dtype: torch.dtype) -> str:
    """SHA-256 of all whole parameters in name order, rounded to the compute dtype.

    Gathers one parameter at a time, so every rank must call it.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted((clean_name(name), p) for name, p in model.named_parameters()):
        with _whole(parameter) as whole:
            flat = whole.detach().to(dtype=dtype, device="cpu").contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


@contextlib.contextmanager
def _whole(parameter: Any) -> Iterator[torch.Tensor]:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    elif hasattr(parameter, "full_tensor"):
        yield parameter.full_tensor()
    else:
        yield parameter.data
