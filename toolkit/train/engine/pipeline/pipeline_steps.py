"""One optimizer step's forward and backward passes, in the order of torch.distributed.pipelining's schedules.

torch's schedules receive every micro-batch of a step in the same buffers, so all are padded to the longest row among
them, and an incomplete step at the end of an epoch is filled up with rows that no label counts in. Neither changes a
loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import pad

from toolkit.observe.attest.differences import Values
from toolkit.observe.attest.tensors import dtype_names
from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.parallel.layout import DIMENSIONS
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B
from toolkit.train.data.collation import SUPERVISED_POSITIONS
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel, Stage

Batch = dict[str, Any]
ROWS = ("input_ids", "attention_mask", "position_ids", "labels")
SCHEDULES = {GPIPE: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B, INTERLEAVED: ScheduleInterleaved1F1B}


class PipelineSteps:
    """Runs the micro-batches of an optimizer step through the stages, and adds up their gradients."""

    def __init__(self, model: PipelineModel, *, micro_batches: int) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.shape: tuple[int, ...] = ()
        self.schedule: Any = None

    def run(self, batches: list[Batch], *, num_items: Any) -> list[torch.Tensor]:
        """Return each micro-batch's share of the step's loss, on the rank of the last stage; zeros on the others.

        `num_items` are the supervised tokens of the step, by which all losses are divided.
        """
        shaped = in_one_shape(batches, count=self.micro_batches)
        if shaped[0]["input_ids"].shape != self.shape:
            self._build(shaped[0]["input_ids"].shape)
        for stage in self.model.stages:
            own = {"num_items_in_batch": num_items} if stage.is_last else {}
            dropped = {"input_ids"} if stage.is_last else {"input_ids", "labels"}
            stage.micro_batches = [{n: v for n, v in batch.items() if n not in dropped} | own for batch in shaped]
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
        # The last stage returns the loss: the logits are freed where they were made.
        options = {"n_microbatches": self.micro_batches, "loss_fn": lambda loss, _: loss, "scale_grads": False}
        kind = SCHEDULES[settings.schedule]
        self.schedule = kind(stages if settings.schedule == INTERLEAVED else stages[0], **options)
        self.shape = shape

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


def read_pipeline(trainer: Any, model: Any) -> Values:
    """Read this rank's live stages, and the schedule that has run them; nothing of another model."""
    if not isinstance(model, PipelineModel):
        return {}
    schedule, mesh = trainer.steps.schedule, model.ranks.mesh
    stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    # The buffers in which a stage receives activations, or else their gradients.
    infos = [info for stage in stages for info in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())]
    received = [each.buffer for info in infos for each in info if each.buffer is not None]
    degrees = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
    names = {kind: name for name, kind in SCHEDULES.items()}
    return {
        "engine": "pipeline",
        "num_trainable_params": model.num_params_of_all_stages(),  # all of them are trained
        "layout": {name: degrees.get(name, 1) for name in DIMENSIONS},
        "batch_group": [int(rank) for rank in dist.get_process_group_ranks(model.ranks.pipeline)],
        "pipeline_schedule": names.get(type(schedule), type(schedule).__name__),
        "pipeline_stages": schedule._num_stages,
        "micro_batches": schedule._n_microbatches,
        "activation_dtype": dtype_names(received),
        "stages": [stage.stage_index for stage in stages],
        "layers": [int(name) for stage in model.stages for name, _ in stage.decoder.model.layers.named_children()],
        "tied_copy_bytes": sum(stage.tied_copy.nbytes for stage in model.stages if stage.tied_copy is not None),
    }
