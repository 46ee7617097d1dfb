"""The live half of an engine: found by what wraps the model, never by the configuration that made it."""

from typing import Any

from toolkit.engines import tensors, zero_live
from toolkit.engines.torch_live import Fsdp2Live, TorchLive, is_fsdp2


def live_engine(wrapped: Any) -> TorchLive:
    """Return what reads the model that the Trainer, or a loop, has wrapped."""
    inner = tensors.uncompiled(wrapped)
    if hasattr(inner, "zero_optimization_stage"):  # a DeepSpeed engine
        return zero_live.ZeroLive(inner)
    return Fsdp2Live(inner) if is_fsdp2(inner) else TorchLive(inner)


def is_loaded_by_plugin(trainer: Any) -> bool:
    """Return True if one of accelerate's plugins divides the Trainer's model, and loads its checkpoints."""
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def held_tensors(parameters: list[Any]) -> list[Any]:
    """Return what this rank holds of parameters of any engine: ZeRO-3's are empty, and their shards beside them."""
    return zero_live.zero3_parameters(parameters) if any(map(zero_live.is_zero3, parameters)) else parameters
