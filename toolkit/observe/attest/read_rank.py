"""Read what is in effect on this rank from the objects that train, never from the configuration that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from toolkit.observe.attest.first_step import uses_activation_checkpointing
from toolkit.observe.attest.read_deepspeed import deepspeed_gradients, read_deepspeed, zero3_parameters
from toolkit.observe.attest.read_fsdp2 import fsdp2_reduce_dtype, is_fsdp2, read_fsdp2
from toolkit.observe.attest.read_layout import read_layout
from toolkit.observe.attest.readings import RankReading, Values
from toolkit.observe.attest.tensors import (
    class_name,
    constant_bytes,
    dtype_names,
    frozen_weights,
    full_size,
    is_paged,
    local_bytes,
    num_params,
    optimizer_state_tensors,
    quantized_modules,
    uncompiled,
)
from toolkit.observe.compiler_events import CompilerEvents, compiled_modules

_WRAPPERS = {torch.nn.parallel.DistributedDataParallel: "ddp", torch.nn.DataParallel: "data_parallel"}


def read_rank(
    trainer: Any,
    gradients: RankReading,
    *,
    readers: Sequence[Callable[[Any, Any], Values]] = (),
    recompute_detected: bool | None,
) -> RankReading:
    """Read one rank after its first optimizer step, except for packing, byte limits and digests.

    `readers` are the script's own, called with the Trainer and the model without wrappers; they override what is here.
    """
    wrapped = uncompiled(trainer.model_wrapped)
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    parameters = list(plain.parameters())
    engine = read_engine(trainer, wrapped, parameters)
    compiled = compiled_modules(plain)
    reading = {
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
        "device": str(trainer.args.device),
        "wrapper": type(wrapped).__name__,
        **engine,
        **gradients,
        **read_4bit(plain),
        "parameter_bytes": engine["parameter_bytes"] + constant_bytes(plain),
        "num_params": num_params(plain),
        "num_trainable_params": sum(full_size(p) for p in parameters if p.requires_grad),
        "activation_checkpointing": uses_activation_checkpointing(plain, recompute_detected),
        "activation_checkpointing_offload": _offloads_activations(plain),
        "seed": torch.initial_seed(),
        # given to the compiler, and the compiler made a graph of it
        "torch_compile": bool(CompilerEvents.read().graphs and compiled),
        "compiled_modules": compiled,
        "graph_breaks": CompilerEvents.read().graph_breaks.total(),
        "neftune_noise_alpha": _neftune(plain),
        "load_in_4bit": bool(quantized_modules(plain)),
        "attn_implementation": getattr(getattr(plain, "config", None), "_attn_implementation", None),
        **read_layout(trainer, plain),
    }
    for read in readers:
        reading |= read(trainer, plain)
    return cast("RankReading", reading)


def _offloads_activations(plain: Any) -> bool:
    """FSDP wraps the layer; the Trainer gives the layer a checkpoint function that saves to host memory."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    if any(isinstance(module, OffloadWrapper) for module in plain.modules()):
        return True
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in plain.modules()]
    inner = {getattr(function, "func", function) for function in functions if function is not None}
    return bool(inner) and torch.utils.checkpoint.checkpoint not in inner


def _neftune(plain: Any) -> float | None:
    """Return the noise on the embedding's output, where its hook is registered."""
    embedding = plain.get_input_embeddings() if hasattr(plain, "get_input_embeddings") else None
    hooks = getattr(embedding, "_forward_hooks", {})  # a later stage of a pipeline has no embedding
    hooked = any("neftune" in getattr(hook, "__name__", "") for hook in hooks.values())
    return getattr(embedding, "neftune_noise_alpha", None) if hooked else None


def read_4bit(plain: Any) -> Values:
    """Read the 4-bit weights: the bytes that this rank holds of them and of their constants, and their storage."""
    weights = [module.weight for module in quantized_modules(plain)]
    held = zero3_parameters(weights) if weights and hasattr(weights[0], "ds_id") else weights
    return {
        "quantized_bytes": local_bytes(held) if weights else None,
        "quantization_constant_bytes": constant_bytes(plain) if weights else None,
        "quantized_storage_dtype": dtype_names(weights),
    }


def read_engine(trainer: Any, wrapped: Any, parameters: list[Any]) -> RankReading:
    """Read the engine that wraps the model."""
    if hasattr(wrapped, "zero_optimization_stage"):
        reading, optimizer = read_deepspeed(wrapped, parameters), wrapped.optimizer.optimizer
    else:
        read = read_fsdp2 if is_fsdp2(wrapped) else read_torch
        reading, optimizer = read(trainer, wrapped, parameters), trainer.optimizer
        reading["gradient_clipping"] = trainer.args.max_grad_norm
    reading["optimizer_class"], reading["optimizer_paged"] = class_name(optimizer), is_paged(optimizer)
    reading["frozen_dtype"] = dtype_names(frozen_weights(wrapped))
    return reading


def read_torch(trainer: Any, wrapped: Any, parameters: list[Any]) -> RankReading:
    """Read DDP, or a model that nothing shards: the parameter is its own fp32 master weight."""
    states = optimizer_state_tensors(trainer.optimizer)
    trained = [p for p in parameters if p.requires_grad]
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
    return {
        "engine": next((engine for kind, engine in _WRAPPERS.items() if isinstance(wrapped, kind)), "none"),
        "sharding": "replicate",
        "parameter_bytes": local_bytes(parameters),
        "optimizer_bytes": local_bytes(states),
        "compute_dtype": precision or dtype_names(trained),
        "master_dtype": dtype_names(trained),
        "optimizer_dtype": dtype_names(states),
        "offload_optimizer": None,
        "offload_param": None,
    }


def read_gradients(trainer: Any, sent_dtype: Callable[[Any], str | None] = lambda _: None) -> RankReading:
    """Read the reduced gradients that this rank holds before the optimizer step.

    `sent_dtype` returns the dtype that ranks exchange where the script itself sends the wrapped model's gradients.
    """
    wrapped = uncompiled(trainer.model_wrapped)
    reduce_dtype: str | None
    if hasattr(wrapped, "zero_optimization_stage"):
        tensors = deepspeed_gradients(wrapped)
        reduce_dtype = str(wrapped.communication_data_type).removeprefix("torch.")
    else:
        tensors = [p.grad for p in wrapped.parameters() if p.grad is not None]
        own = fsdp2_reduce_dtype(wrapped) if is_fsdp2(wrapped) else dtype_names(tensors)
        reduce_dtype = sent_dtype(wrapped) or own
    return {
        "gradient_bytes": local_bytes(tensors),
        "gradient_dtype": dtype_names(tensors),
        "reduce_dtype": reduce_dtype,
    }
