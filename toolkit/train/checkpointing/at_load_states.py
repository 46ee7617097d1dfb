"""Optimizer and scheduler states of a model that was sharded at load, saved and resumed on the same or another mesh.

transformers 5.23 refuses to resume such a model in the Trainer, but has helpers for torch's distributed checkpoints
that do it. Weights come back through `from_pretrained(checkpoint, distributed_config=...)`, so on any mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import torch_load
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER

SCHEDULER = "scheduler.pt"


def drop_empty_groups(optimizer: Any) -> None:
    """Remove parameter groups without parameters, which torch's distributed checkpoints cannot load: LoRA has one."""
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def save_states(trainer: Any, folder: Path) -> None:
    """Write the states of all ranks. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    save_optimizer_distributed(*_model_and_optimizer(trainer), str(folder / AT_LOAD_OPTIMIZER))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER)


def load_states(trainer: Any, folder: Path) -> None:
    """Read the states into the live optimizer and scheduler. Collective.

    Raises ToolkitError where another mesh has other parameter groups, and they had different learning rates.
    """
    load_optimizer_distributed(*_model_and_optimizer(trainer), str(folder / AT_LOAD_OPTIMIZER))
    saved, own = torch_load(folder / SCHEDULER), trainer.lr_scheduler.state_dict()
    groups = len(own["base_lrs"])
    if len(saved["base_lrs"]) != groups:  # a group per mesh: experts and adapters have their own
        if len(set(saved["base_lrs"])) > 1 or len(set(saved["_last_lr"])) > 1:
            raise ToolkitError(
                f"{folder}: {len(saved['base_lrs'])} parameter groups with different learning rates, and {groups} now",
                hint="resume with the degrees of parallelism that wrote the checkpoint",
            )
        saved |= {name: saved[name][:1] * groups for name in ("base_lrs", "_last_lr")}
        saved["lr_lambdas"] = own["lr_lambdas"]
    trainer.lr_scheduler.load_state_dict(saved)


def _model_and_optimizer(trainer: Any) -> tuple[Any, Any]:
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's around torch's
        optimizer = optimizer.optimizer
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), optimizer
