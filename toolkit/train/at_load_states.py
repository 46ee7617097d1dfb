"""Optimizer and scheduler states of a model that was sharded at load, saved and resumed on the same or another mesh.

transformers 5.23 refuses to resume such a model in the Trainer, but has helpers for torch's distributed checkpoints
that do it. Weights come back through `from_pretrained(checkpoint, distributed_config=...)`, so on any mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import torch_load
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER

SCHEDULER = "scheduler.pt"


class StatesShardedAtLoad(Trainer):  # type: ignore[misc]
    """A part of a Trainer: saves and loads the states of such a model. Its weights were loaded with the model."""

    def __init__(self, *, run: Any, **kwargs: Any) -> None:
        training = run.arguments.training
        save_only_model, training.save_only_model = training.save_only_model, True
        super().__init__(run=run, **kwargs)  # transformers refuses to resume a model sharded at load, which we do
        training.save_only_model = save_only_model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer without empty groups: torch's distributed checkpoints cannot load them; LoRA has one."""
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_states(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_states(self, Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass


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
