"""Switches mapped to what the engine needs before the Trainer is built, and read back from what trains.

values |= engine_values(values, promise)
"""

from __future__ import annotations

import os
from typing import Any

import torch

from toolkit.runs.arguments import ModelArguments
from toolkit.runs.learning_rate import WARMUP_SHARE, ScaledRate, scaled_rate
from toolkit.runs.switches import recomputes
from toolkit.train.comm_hooks import registered_hook
from toolkit.train.promise import Promise

Facts = dict[str, Any]


def engine_values(values: Facts, promise: Promise) -> Facts:
    """Arguments of the Trainer, changed so that one switch means the same under every engine."""
    if not recomputes(values):
        return {}
    offload = bool(values["activation_checkpointing_offload"])
    if promise.preset is not None and promise.preset.engine == "fsdp2":
        # accelerate's plugin reads these; the Trainer's own would gather each layer's weights once more in backward
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = str(offload).lower()
        return {"activation_checkpointing": False, "gradient_checkpointing": None}
    if not offload:
        return {}
    return {"activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}


def scaled_learning_rate(values: Facts) -> ScaledRate | None:
    """The rate for this run's global batch, if it is to be scaled."""
    if values["lr_scaling"] is None:
        return None
    micro, accumulated = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    return scaled_rate(
        float(values["learning_rate"]),
        rule=values["lr_scaling"],
        global_batch_size=int(micro) * int(accumulated) * int(os.environ.get("WORLD_SIZE", "1")),
        reference_batch_size=int(values["lr_reference_batch_size"]),
    )


def rate_values(rate: ScaledRate | None, given: Facts) -> Facts:
    """The scaled rate, and a warm-up to it where it is higher than the base and the user named none."""
    if rate is None:
        return {}
    warm = rate.learning_rate > rate.base_learning_rate and "warmup_steps" not in given
    return {"learning_rate": rate.learning_rate} | ({"warmup_steps": WARMUP_SHARE} if warm else {})


def rate_lines(rate: ScaledRate | None, training: Any) -> list[str]:
    """The arithmetic, for the log."""
    if rate is None:
        return []
    if not training.warmup_steps:
        return [f"{rate.sentence}, without warm-up"]
    warm = f"{training.warmup_steps:.0%} of the" if training.warmup_steps < 1 else f"{training.warmup_steps:.0f}"
    return [f"{rate.sentence}, after a warm-up of {warm} steps (`--warmup_steps` changes it)"]


def asked_facts(model: ModelArguments, training: Any, *, recompute: bool) -> Facts:
    """What the arguments ask for, to be found in the live objects."""
    asked: Facts = {
        "ddp_comm_hook": model.ddp_comm_hook,
        "activation_checkpointing_offload": model.activation_checkpointing_offload,
        "torch_compile": bool(training.torch_compile),
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "load_in_4bit": model.load_in_4bit,
    }
    if recompute:
        asked["activation_checkpointing"] = True
    if model.attn_implementation is not None:
        asked["attn_implementation"] = model.attn_implementation
    return asked


def read_switches(trainer: Any, plain: Any) -> Facts:
    """What is in force, from the modules that train."""
    hook = registered_hook(trainer.model_wrapped)
    return {
        "ddp_comm_hook": None if hook is None else hook.name,
        "activation_checkpointing_offload": _offloads_activations(plain),
        "torch_compile": _is_compiled(trainer.model_wrapped),
        "neftune_noise_alpha": _neftune(plain),
        "load_in_4bit": any(type(p).__name__ == "Params4bit" for p in plain.parameters()),
    }


def _offloads_activations(plain: Any) -> bool:
    """FSDP wraps the layer; the Trainer gives it a checkpoint function that saves on the host."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    if any(isinstance(module, OffloadWrapper) for module in plain.modules()):
        return True
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in plain.modules()]
    inner = {getattr(function, "func", function) for function in functions if function is not None}
    return bool(inner) and torch.utils.checkpoint.checkpoint not in inner


def _is_compiled(wrapped: Any) -> bool:
    """Whether any module was handed to the compiler, and the compiler made a graph of it."""
    from torch._dynamo.utils import counters

    return bool(counters["stats"]["unique_graphs"]) and any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in wrapped.modules()
    )


def _neftune(plain: Any) -> float | None:
    """The noise on the embedding's output, where its hook is registered."""
    embedding = plain.get_input_embeddings()
    hooked = any("neftune" in getattr(hook, "__name__", "") for hook in embedding._forward_hooks.values())
    return getattr(embedding, "neftune_noise_alpha", None) if hooked else None
