"""Detect activation checkpointing in the first step: a module's forward that runs while autograd is in backward.

A flag on a module only shows that checkpointing was requested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_layers import GradientCheckpointingLayer

_OUTSIDE_BACKWARD = -1  # torch's graph task id when autograd is idle


class RecomputeDetector:
    """Hooks every module's forward between `start` and `stop`; `detected` is None if it was never started."""

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
    flagged = _flagged_modules(model)
    if detected is None or not any(p.requires_grad for module in flagged for p in module.parameters()):
        return bool(flagged) or bool(detected)
    return detected


def _flagged_modules(model: Any) -> list[Any]:
    """Layers first: FSDP2 makes subclasses of what it shards, so a class name is no evidence."""
    flagged = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) is True or isinstance(module, CheckpointWrapper)
    ]
    layers = [module for module in flagged if isinstance(module, (GradientCheckpointingLayer, CheckpointWrapper))]
    return layers or flagged
