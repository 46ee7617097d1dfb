"""What only the first step shows: layers that are recomputed in backward, and gradients between accumulation steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.job.accumulation import SHARDED, WHOLE
from toolkit.observe.attest.read_deepspeed import accumulated_gradients
from toolkit.observe.attest.read_fsdp2 import is_fsdp2, is_replicated_over_data_parallelism, unsharded_gradients
from toolkit.observe.attest.readings import Values
from toolkit.observe.attest.tensors import local_bytes, uncompiled

_OUTSIDE_BACKWARD = -1  # torch's graph task id when autograd is idle


class RecomputeDetector:
    """Detects a module's forward that runs while autograd is in backward, in any module between `start` and `stop`.

    A flag on a module only shows that checkpointing was requested. `detected` is None if it was never started.
    """

    def __init__(self) -> None:
        self.detected: bool | None = None

    def start(self) -> None:
        self.detected = False
        self.hook = register_module_forward_pre_hook(self._on_forward)

    def stop(self) -> None:
        if self.detected is not None:
            self.hook.remove()

    def _on_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != _OUTSIDE_BACKWARD:
            self.detected = True


def uses_activation_checkpointing(model: Any, detected: bool | None) -> bool:
    """Return the detector's answer, or the flags if it did not run or no flagged module has trained weights."""
    flagged = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) is True or isinstance(module, CheckpointWrapper)
    ]
    # Layers first: FSDP2 makes subclasses of what it shards, so a class name is no evidence.
    layers = [module for module in flagged if isinstance(module, (GradientCheckpointingLayer, CheckpointWrapper))]
    if detected is None or not any(p.requires_grad for module in layers or flagged for p in module.parameters()):
        return bool(flagged) or bool(detected)
    return detected


def read_accumulated(trainer: Any) -> Values:
    """Read the gradients that wait for the next accumulation step: `sharded`, `whole`, or both names joined by `+`."""
    wrapped = uncompiled(trainer.model_wrapped)
    stage = int(wrapped.zero_optimization_stage()) if hasattr(wrapped, "zero_optimization_stage") else 0
    own = [p.grad for p in wrapped.parameters() if p.grad is not None]
    shards, whole = (accumulated_gradients(wrapped) if stage >= 2 else []), own
    if is_fsdp2(wrapped):
        shards = [gradient for gradient in own if not is_replicated_over_data_parallelism(gradient)]
        whole = [gradient for gradient in own if is_replicated_over_data_parallelism(gradient)]
        whole += unsharded_gradients(wrapped)
    names = "+".join(name for name, tensors in ((SHARDED, shards), (WHOLE, whole)) if tensors)
    return {"accumulate": names or None, "accumulated_gradient_bytes": local_bytes([*shards, *whole])}
