"""Training methods that arguments switch on: the expected readings, and those of the live objects."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.models.attention import needs_no_mask
from toolkit.train.arguments import Arguments
from toolkit.train.attest.read_pipeline import expected_pipeline
from toolkit.train.attest.readings import Values
from toolkit.train.dtypes import compute_dtype, dtype_name
from toolkit.train.engine.comm_hooks import registered_hook
from toolkit.train.engine.compiled_layers import CompilerEvents, compiled_modules
from toolkit.train.model.chunked_loss import read_loss
from toolkit.train.model.four_bit import quantized_modules


def expected_methods(arguments: Arguments) -> Values:
    """Return the values that every rank must read under these arguments."""
    model, training = arguments.job, arguments.training
    expected: Values = {
        "ddp_comm_hook": model.ddp_comm_hook,
        "activation_checkpointing_offload": model.activation_checkpointing_offload,
        "torch_compile": arguments.job.compilation is not None,
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "load_in_4bit": model.load_in_4bit,
        "quantized_storage_dtype": dtype_name(compute_dtype(training)) if model.load_in_4bit else None,
    }
    expected |= expected_pipeline(arguments)
    if model.loss != "auto":
        expected["loss"] = model.loss
    if model.loss == "chunked":
        expected["loss_chunk_tokens"] = model.loss_chunk_tokens
    if arguments.job.uses_activation_checkpointing:
        expected["activation_checkpointing"] = True
    if model.accumulate is not None:
        expected["accumulate"] = model.accumulate
    if model.attn_implementation is not None:
        expected["attn_implementation"] = model.attn_implementation
    if arguments.job.packing and needs_no_mask(model.attn_implementation):
        expected["packing_mask_bytes"] = 0
    return expected


def read_methods(trainer: Any, plain: Any) -> Values:
    """Read the methods in effect from the live modules; `plain` is the model without wrappers."""
    hook = registered_hook(trainer.model_wrapped)
    return {
        "ddp_comm_hook": None if hook is None else hook.name,
        "activation_checkpointing_offload": _offloads_activations(plain),
        "torch_compile": _is_compiled(plain),
        "compiled_modules": compiled_modules(plain),
        "graph_breaks": CompilerEvents.read().graph_breaks.total(),
        "neftune_noise_alpha": _neftune(plain),
        "load_in_4bit": bool(quantized_modules(plain)),
        **read_loss(plain),
    }


def _offloads_activations(plain: Any) -> bool:
    """FSDP wraps the layer; the Trainer gives the layer a checkpoint function that saves to host memory."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    if any(isinstance(module, OffloadWrapper) for module in plain.modules()):
        return True
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in plain.modules()]
    inner = {getattr(function, "func", function) for function in functions if function is not None}
    return bool(inner) and torch.utils.checkpoint.checkpoint not in inner


def _is_compiled(plain: Any) -> bool:
    """Return True if a module was given to the compiler and the compiler made a graph of it."""
    return bool(CompilerEvents.read().graphs and compiled_modules(plain))


def _neftune(plain: Any) -> float | None:
    """Return the noise on the embedding's output, where its hook is registered."""
    embedding = plain.get_input_embeddings()
    hooks = getattr(embedding, "_forward_hooks", {})  # a later stage of a pipeline has no embedding
    hooked = any("neftune" in getattr(hook, "__name__", "") for hook in hooks.values())
    return getattr(embedding, "neftune_noise_alpha", None) if hooked else None
