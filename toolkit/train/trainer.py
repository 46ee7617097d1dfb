"""transformers' Trainer, with the meter told what each micro-step trained on.

Nothing of the training is changed: batches, losses and the gradient norm pass by and are written down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from toolkit.runs.checkpoints import saving_folder
from toolkit.train.batches import BATCH_FACTS
from toolkit.train.checkpointing import finish_checkpoint, leave_out_tied_weights
from toolkit.train.failure import Progress
from toolkit.train.meter import Meter


class MeasuredTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose collator adds the batch's facts under `BATCH_FACTS`."""

    def __init__(self, *args: Any, meter: Meter, progress: Progress, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter, self.progress = meter, progress
        self.manifest_facts: Callable[[], dict[str, Any]] = dict
        self.staging: Path | None = None
        """Where a checkpoint is being written; None while none is."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.meter.add_batch(inputs.pop(BATCH_FACTS, None))
        self.progress.phase, self.progress.micro_steps = "forward", self.progress.micro_steps + 1
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.progress.phase = "step"
        self.meter.add_loss(loss)
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("toolkit.data_wait"):
            return super().get_batch_samples(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.progress.phase = "backward"
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs.pop(BATCH_FACTS, None)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.enter("save")
        self.meter.flush(wait=True)  # no checkpoint without the rows of its steps
        if hasattr(self.model_wrapped, "zero_optimization_stage") and "module_state_dict" not in vars(
            self.model_wrapped
        ):
            leave_out_tied_weights(self.model_wrapped)
        self.staging = saving_folder(Path(self.args.output_dir), self.state.global_step)
        super()._save_checkpoint(model, trial)
        staging, self.staging = self.staging, None
        finish_checkpoint(self, staging, self.manifest_facts())
        self.progress.enter("train")

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self.staging is None else self.staging)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self.meter.add_grad_norm(grad_norm)
        return grad_norm
