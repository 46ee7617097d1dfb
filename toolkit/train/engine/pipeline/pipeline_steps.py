"""One optimizer step's forward and backward passes, in the order of torch.distributed.pipelining's schedules.

torch's schedules receive every micro-batch of a step in the same buffers, so all are padded to the longest row among
them, and an incomplete step at the end of an epoch is filled up with rows that no label counts in. Neither changes a
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import pad

from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED
from toolkit.train.data.collation import SUPERVISED_POSITIONS
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
from toolkit.train.engine.pipeline.stage import Stage

Batch = dict[str, Any]
ROWS = ("input_ids", "attention_mask", "position_ids", "labels")


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


def _loss_itself(loss: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    """The last stage returns the loss: the logits are freed where they were made."""
    return loss


def in_one_shape(batches: Sequence[Batch], *, count: int) -> list[Batch]:
    """Return `count` micro-batches of the same number of rows and tokens."""
    rows = max(batch["input_ids"].shape[0] for batch in batches)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    padded = [_padded(batch, rows, tokens) for batch in batches]
    filler = {**padded[0], "labels": torch.full_like(padded[0]["labels"], IGNORED)}
    return [*padded, *(filler for _ in range(count - len(padded)))]


def _padded(batch: Batch, rows: int, tokens: int) -> Batch:
    """Pad with tokens that are a document of their own, as in the collator, and with copies of the first row."""
    held, width = batch["input_ids"].shape
    more = tokens - width
    inputs = {name: value for name, value in batch.items() if name not in (BATCH_FACTS, SUPERVISED_POSITIONS)}
    fills = {"labels": IGNORED, "attention_mask": 0, "input_ids": int(batch["input_ids"][0, -1])}
    for name in fills.keys() & inputs.keys():
        inputs[name] = pad(inputs[name], (0, more), value=fills[name])
    if "position_ids" in inputs:
        positions = inputs["position_ids"]
        own = torch.arange(more, device=positions.device).expand(len(positions), more)
        inputs["position_ids"] = torch.cat([positions, own], dim=1)
    if "cu_seq_lens_q" in inputs and more:
        starts, longest = inputs["cu_seq_lens_q"], max(int(inputs["max_length_q"]), more)
        starts = torch.cat([starts, starts.new_tensor([tokens])])
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    if held < rows:
        for name in inputs.keys() & set(ROWS):
            inputs[name] = torch.cat([inputs[name], inputs[name][:1].expand(rows - held, -1)])
        inputs["labels"][held:] = IGNORED
    return inputs
