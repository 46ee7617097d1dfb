"""Bytes and dtypes of live tensors under any engine: DTensors, ZeRO-3 shards, 4-bit weights."""

import math
from collections.abc import Iterable
from typing import Any

import torch

# `module.` comes last: it is part of the names before it.
_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def compute_dtype(training: Any) -> torch.dtype:
    """Return the dtype of forward and backward of `TrainingArguments`."""
    return {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[training.mixed_precision]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as they are stored, on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def without_adapters(model: Any) -> Any:
    """Return the model that peft wraps, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def quantized_modules(model: Any) -> list[Any]:
    """Return the linear layers whose weight is in 4 bits; they keep its constants as `quant_state`."""
    return [module for module in model.modules() if getattr(module, "quant_state", None) is not None]


def constants(state: Any) -> list[torch.Tensor]:
    """Return the constants that decode a 4-bit weight: scales, their own scales, and code tables."""
    second = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *second]


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: a DTensor's shard, or the tensor itself."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def local_values(tensor: Any) -> torch.Tensor:
    """Return the values that this rank holds of a tensor: of a sparse gradient, those of each row that it has, once."""
    held = local(tensor)
    return held.coalesce().values() if held.is_sparse else held


def uncompiled(module: Any) -> Any:
    """Return the module inside `torch.compile`'s wrapper; FSDP2 shards the wrapper itself, which is kept."""
    from torch.distributed.fsdp import FSDPModule

    return module if isinstance(module, FSDPModule) else getattr(module, "_orig_mod", module)


def compiled_modules(model: Any) -> int:
    """Return how many modules of a wrapped model run compiled: in place, or in the compiler's wrapper."""
    return sum(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules())


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that this rank holds of the tensors, each storage region once."""
    parts = (part for tensor in tensors for part in _plain(local(tensor)))
    return sum(size for _, size in {(part.data_ptr(), part.numel() * part.element_size()) for part in parts})


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside one that only looks like a tensor, as torchao's quantized states do; a sparse one's values."""
    if tensor.is_sparse:
        return [local_values(tensor)]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's and DeepSpeed's wrappers."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def optimizer_state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps per parameter, without scalar step counters."""
    states = [value for state in innermost_optimizer(optimizer).state.values() for value in state.values()]
    states = [getattr(value, "ortho_matrix", value) for value in states]  # GaLore's and APOLLO's projections
    return [value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0]


def dtype_names(tensors: Iterable[Any]) -> str | None:
    """Return `float32`, or several sorted names joined by `+`; None without tensors."""
    dtypes = {part.dtype for tensor in tensors for part in _plain(local(tensor))}
    return "+".join(sorted(map(dtype_name, dtypes))) or None


def frozen_weights(model: Any) -> list[Any]:
    """Return the parameters that are not trained, without 4-bit weights, whose dtype is that of their storage."""
    in_4bit = {id(module.weight) for module in quantized_modules(model)}
    return [p for p in model.parameters() if not p.requires_grad and id(p) not in in_4bit]


def device_types(tensors: Iterable[Any]) -> set[str]:
    """Return the device types (`cpu`, `cuda`) of the tensors that are not empty."""
    return {local(tensor).device.type for tensor in tensors if local(tensor).numel()}


def full_size(parameter: Any) -> int:
    """Return the elements of the unsharded parameter, also under ZeRO-3; a 4-bit weight has those of its storage."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def num_params(model: Any) -> int:
    """Return the parameters of the unsharded model, 4-bit ones before they were packed. Collective for a pipeline."""
    if hasattr(model, "num_params_of_all_stages"):
        return int(model.num_params_of_all_stages())
    in_4bit = quantized_modules(model)
    hidden: int = sum(math.prod(module.quant_state.shape) - full_size(module.weight) for module in in_4bit)
    return sum(map(full_size, model.parameters())) + hidden


def num_trainable_params(model: Any) -> int:
    return sum(full_size(p) for p in model.parameters() if p.requires_grad)


def num_optimizer_params(optimizer: Any, parameters: Iterable[Any]) -> int | None:
    """Return how many trained parameters an optimizer holds; None for the one element of a layer-wise stand-in."""
    held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    if sum(p.numel() for p in held) <= 1:
        return None
    return sum(full_size(p) for p in parameters if p.requires_grad and id(p) in set(map(id, held)))


def constant_bytes(model: Any) -> int:
    """Return the bytes of the constants that decode the 4-bit weights: whole on every rank."""
    return local_bytes(tensor for module in quantized_modules(model) for tensor in constants(module.quant_state))


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that engines and wrappers add.

    >>> clean_name("module._orig_mod.model.norm.weight")
    'model.norm.weight'
    """
    for part in _WRAPPER_PREFIXES:
        name = name.replace(part, "")
    return name
