"""Whether activations are recomputed: a module whose forward runs while autograd is in backward.

A flag on a module says what was asked for; the first step shows what is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_layers import GradientCheckpointingLayer

OUTSIDE_BACKWARD = -1


class Recomputation:
    """Watches the first step; `seen` is None as long as nobody looked."""

    def __init__(self) -> None:
        self.seen: bool | None = None

    def watch(self) -> None:
        """Look at every module's forward, until `close`."""
        self.seen = False
        self.hook = register_module_forward_pre_hook(self._look)

    def close(self) -> None:
        if self.seen is not None:
            self.hook.remove()

    def _look(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != OUTSIDE_BACKWARD:
            self.seen = True


def recomputes_activations(plain: Any, seen: bool | None) -> bool:
    """What the first step showed; the flags where nobody looked, and where no trained weight asks for it."""
    flagged = flagged_modules(plain)
    if seen is None or not any(p.requires_grad for module in flagged for p in module.parameters()):
        return bool(flagged) or bool(seen)
    return seen


def flagged_modules(plain: Any) -> list[Any]:
    """Modules that say they recompute: layers, or what stands for them. FSDP2 makes subclasses of what it shards."""
    flagged = [
        module
        for module in plain.modules()
        if getattr(module, "gradient_checkpointing", False) is True or isinstance(module, CheckpointWrapper)
    ]
    layers = [module for module in flagged if isinstance(module, (GradientCheckpointingLayer, CheckpointWrapper))]
    return layers or flagged
