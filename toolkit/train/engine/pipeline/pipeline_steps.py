"""One optimizer step's forward and backward passes, in the order of torch.distributed.pipelining's schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED
from toolkit.train.engine.pipeline.micro_batches import Batch, in_one_shape
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
from toolkit.train.engine.pipeline.stage import Stage


class PipelineSteps:
    """Runs the micro-batches of an optimizer step through the stages, and adds up their gradients."""

    def __init__(self, model: PipelineModel, *, micro_batches: int, begin_forward: Callable[[], None]) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.shape: tuple[int, ...] = ()
        self.schedule: Any = None
        for stage in model.stages:
            stage.begin_forward = begin_forward

    def run(self, batches: list[Batch], *, num_items: Any) -> list[torch.Tensor]:
        """Return each micro-batch's share of the step's loss, on the rank of the last stage; zeros on the others.

        `num_items` are the supervised tokens of the step, by which all losses are divided.
        """
        shaped = in_one_shape(batches, count=self.micro_batches)
        if shaped[0]["input_ids"].shape != self.shape:
            self._build(shaped[0]["input_ids"].shape)
        for stage in self.model.stages:
            stage.micro_batches = [_options(stage, batch, num_items) for batch in shaped]
        device = self.model.device
        numbers, losses = torch.arange(self.micro_batches), list[torch.Tensor]()
        first = [torch.cat([batch["input_ids"] for batch in shaped])] if self.model.stages[0].is_first else []
        try:
            self.schedule.step(*first, target=numbers, losses=losses, return_outputs=False, micro_batch=numbers)
        except RuntimeError as error:  # torch puts its own in front of what a stage's forward raises
            raise error.__cause__ or error from None
        found = [loss.detach() for loss in losses[: len(batches)]]
        return found or [torch.zeros((), device=device) for _ in batches]

    def _build(self, shape: tuple[int, ...]) -> None:
        """Make the schedule and its buffers: they are of one shape."""
        self.schedule = None  # frees the buffers of the shape before
        stages = [self._stage(stage, shape) for stage in self.model.stages]
        settings = self.model.settings
        options = {"n_microbatches": self.micro_batches, "loss_fn": _loss_itself, "scale_grads": False}
        if settings.schedule == INTERLEAVED:
            self.schedule = ScheduleInterleaved1F1B(stages, **options)
        else:
            kind = ScheduleGPipe if settings.schedule == GPIPE else Schedule1F1B
            self.schedule = kind(stages[0], **options)
        self.shape = shape
        self.model.schedule_in_effect = type(self.schedule).__name__

    def _stage(self, stage: Stage, shape: tuple[int, ...]) -> PipelineStage:
        """Describe what a stage takes and returns, so that torch need not run it to find out.

        The residual stream is fp32 between layers, under autocast too, as in one process.
        """
        width = self.model.config.get_text_config().hidden_size
        hidden = torch.empty((*shape, width), device="meta", requires_grad=True)
        tokens, loss = torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
        return PipelineStage(
            stage,
            stage.number,
            self.model.settings.stages,
            self.model.device,
            input_args=tokens if stage.is_first else hidden,
            output_args=loss.requires_grad_() if stage.is_last else hidden,
            group=self.model.ranks.pipeline,
        )


def _options(stage: Stage, batch: Batch, num_items: Any) -> Batch:
    options = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    return options | ({"labels": batch["labels"], "num_items_in_batch": num_items} if stage.is_last else {})


def _loss_itself(loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The last stage returns the loss: the logits are freed where they were made."""
    del number
    return loss
