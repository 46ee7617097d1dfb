"""A Trainer of a pipeline: one of torch's schedules runs all micro-batches of a step, when the first of them is due.

torch's schedules receive every micro-batch of a step in the same buffers, so all are padded to the longest row among
them, and an incomplete step at the end of an epoch is filled up with rows that no label counts in. Neither changes a
loss. Everything around the step stays the Trainer's: the order of the rows, optimizer, learning rate, callbacks,
evaluation, and when a checkpoint is saved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import pad
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from toolkit.engines.safe_loading import torch_load
from toolkit.engines.tensors import dtype_names
from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.parallel.layout import DIMENSIONS
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B
from toolkit.record.checkpoints import STAGE_OPTIMIZER
from toolkit.record.reading import RankReading
from toolkit.train.checkpointing import SCHEDULER
from toolkit.train.data.collation import SUPERVISED_POSITIONS
from toolkit.train.engine.pipeline_model import PipelineModel
from toolkit.train.trainer import SupervisedTrainer

Batch = dict[str, Any]
SCHEDULES = {GPIPE: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B, INTERLEAVED: ScheduleInterleaved1F1B}


def schedule_name(schedule: Any) -> str:
    """Return the name of a live schedule, by its class's own name and not by the table that it was made from.

    >>> schedule_name(object.__new__(ScheduleInterleaved1F1B))
    'interleaved_1f1b'
    """
    name = type(schedule).__name__.removeprefix("Schedule").lower()
    return INTERLEAVED if name == "interleaved1f1b" else name


def in_one_shape(batches: Sequence[Batch], *, count: int) -> list[Batch]:
    """Return `count` micro-batches of the same number of rows and tokens."""
    rows, tokens = (max(batch["input_ids"].shape[dimension] for batch in batches) for dimension in (0, 1))
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
        for name in inputs.keys() & {"input_ids", "attention_mask", "position_ids", "labels"}:
            inputs[name] = torch.cat([inputs[name], inputs[name][:1].expand(rows - held, -1)])
        inputs["labels"][held:] = IGNORED
    return inputs


class PipelineTrainer(SupervisedTrainer):
    """Trains the stages of `PipelineModel`: an optimizer step's accumulation steps are its micro-batches."""

    model: PipelineModel
    optimizer: Any
    lr_scheduler: Any
    saves_in_parts = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accelerator.prepare_data_loader = self._rows_of_pipeline
        self.schedule: Any = None
        self.shape: tuple[int, ...] = ()  # rows and tokens of the schedule's buffers
        self.gradient_parts = self.model.settings.ranks  # ranks whose parameters together are those of the model
        self.samples: list[Any] = []  # the micro-batches of the step
        self.losses: list[torch.Tensor] = []  # their losses, from the first of them until each was returned

    def _rows_of_pipeline(self, loader: Any, **_: Any) -> Any:
        """Deal rows to pipelines instead of ranks; everything else as accelerate does."""
        accelerator, ranks = self.accelerator, self.model.ranks
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks.layout.dp_replicate,
            process_index=ranks.replica,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            data_seed=accelerator.dataloader_config.data_seed,
            **{name: getattr(accelerator, name) for name in ("even_batches", "use_seedable_sampler", "non_blocking")},
        )

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the tokens of each pipeline's rows once: all of its ranks hold the same."""
        number = super()._get_num_items_in_batch(*args, **kwargs)
        return None if number is None else number / self.model.settings.ranks

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) // self.model.settings.ranks

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.samples, num_items = super().get_batch_samples(*args, **kwargs)
        return self.samples, num_items

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """The Trainer would wrap the stages in DDP, as if all ranks held the same weights."""
        self.optimizer, self.lr_scheduler = None, None
        self.create_optimizer()
        self.model_wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of one micro-batch; the first trains all of the step."""
        if not self.losses:
            model.train()
            losses, ranks = torch.stack(self._run_step(self.samples, num_items_in_batch)), self.model.ranks
            if self.model.tied_weight is not None:  # the first and the last rank have each its gradient
                dist.all_reduce(self.model.tied_weight.grad, group=ranks.ends)
            if ranks.layout.dp_replicate > 1:  # summed, since losses are shares of all tokens
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                for work in [dist.all_reduce(gradient, group=ranks.replicas, async_op=True) for gradient in gradients]:
                    work.wait()
            dist.all_reduce(losses, group=ranks.pipeline)  # zeros except on the rank of the last stage
            # The Trainer's losses of data-parallel ranks are shares of the step's tokens, times the number of ranks.
            self.losses = list(losses * ranks.layout.dp_replicate)
        return self.losses.pop(0)

    def _run_step(self, batches: list[Batch], num_items: Any) -> list[torch.Tensor]:
        """Return each micro-batch's share of the loss per token of `num_items`; zeros but on the last stage's rank."""
        shaped = in_one_shape(batches, count=self.args.gradient_accumulation_steps)
        if shaped[0]["input_ids"].shape != self.shape:
            self._build(shaped[0]["input_ids"].shape)
        for stage in self.model.stages:
            own = {"num_items_in_batch": num_items} if stage.is_last else {}
            dropped = {"input_ids"} if stage.is_last else {"input_ids", "labels"}
            stage.micro_batches = [{n: v for n, v in batch.items() if n not in dropped} | own for batch in shaped]
        numbers, losses = torch.arange(self.args.gradient_accumulation_steps), list[torch.Tensor]()
        first = [torch.cat([batch["input_ids"] for batch in shaped])] if self.model.stages[0].is_first else []
        try:
            self.schedule.step(*first, target=numbers, losses=losses, return_outputs=False, micro_batch=numbers)
        except RuntimeError as error:  # torch puts its own in front of what a stage's forward raises
            raise error.__cause__ or error from None
        found = [loss.detach() for loss in losses[: len(batches)]]
        return found or [torch.zeros((), device=self.model.device) for _ in batches]

    def _build(self, shape: tuple[int, ...]) -> None:
        self.schedule = None  # frees the buffers of the shape before
        width, name = self.model.config.get_text_config().hidden_size, self.model.settings.schedule
        tokens, loss = torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
        hidden = torch.empty((*shape, width), device="meta", requires_grad=True)  # fp32, under autocast too
        stages = [
            PipelineStage(  # with what it takes and returns, so that torch need not run it to find out
                stage,
                stage.number,
                self.model.settings.stages,
                self.model.device,
                input_args=tokens if stage.is_first else hidden,
                output_args=loss.requires_grad_() if stage.is_last else hidden,
                group=self.model.ranks.pipeline,
            )
            for stage in self.model.stages
        ]
        self.schedule = SCHEDULES[name](
            stages if name == INTERLEAVED else stages[0],
            n_microbatches=self.args.gradient_accumulation_steps,
            loss_fn=lambda loss, _: loss,  # the last stage returns it: the logits are freed where they were made
            scale_grads=False,
        )
        self.shape = shape

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        norm = self._grad_norm_of_all_stages()
        clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, self._grad_norm_of_all_stages() if grad_norm is None else grad_norm)

    def _grad_norm_of_all_stages(self) -> torch.Tensor:
        own = [weight.grad for weight in self.model.own_weights().values() if weight.grad is not None]
        square = get_total_norm(own).double() ** 2 if own else torch.zeros((), dtype=torch.float64)
        square = square.to(self.args.device)
        dist.all_reduce(square, group=self.model.ranks.pipeline)
        return square.sqrt().float()

    def gradient_copies(self, parameter: Any) -> int:
        tied = self.model.tied_weight
        return self.model.ranks.layout.dp_replicate * (2 if tied is not None and parameter is tied else 1)

    def read_methods(self, plain: Any) -> RankReading:
        """Read this rank's live stages too, and the schedule that has run them."""
        schedule, mesh = self.schedule, plain.ranks.mesh
        stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
        # The buffers in which a stage receives activations, or else their gradients.
        infos = [info for stage in stages for info in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())]
        # Before torch 2.12 the first stage's own inputs are listed too, without a buffer.
        buffers = [getattr(received, "buffer", None) for info in infos for received in info]
        received = [buffer for buffer in buffers if buffer is not None]
        degrees = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
        return super().read_methods(plain) | RankReading.of(
            engine="pipeline",
            num_trainable_params=plain.num_params_of_all_stages(),  # all of them are trained
            layout={name: degrees.get(name, 1) for name in DIMENSIONS},
            batch_group=[int(rank) for rank in dist.get_process_group_ranks(plain.ranks.pipeline)],
            pipeline_schedule=schedule_name(schedule),
            pipeline_stages=schedule._num_stages,
            micro_batches=schedule._n_microbatches,
            activation_dtype=dtype_names(received),
            stages=[stage.stage_index for stage in stages],
            layers=[int(name) for stage in plain.stages for name, _ in stage.decoder.model.layers.named_children()],
            tied_copy_bytes=sum(stage.tied_copy.nbytes for stage in plain.stages if stage.tied_copy is not None),
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write this rank's weights as one file of a model folder. Collective."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder, is_main_process=self.args.process_index == 0)
        if self.args.process_index == 0:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, ranks = Path(output_dir), self.model.ranks
        if ranks.replica == 0:
            torch.save(self.optimizer.state_dict(), folder / STAGE_OPTIMIZER.format(rank=ranks.rank))
        if self.args.process_index == 0:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            states = torch_load(Path(checkpoint) / STAGE_OPTIMIZER.format(rank=self.model.ranks.rank))
            self.optimizer.load_state_dict(states)
            self.lr_scheduler.load_state_dict(torch_load(Path(checkpoint) / SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The stages were loaded from the checkpoint already."""

    def _load_best_model(self) -> None:
        self.model.load(str(self.state.best_model_checkpoint), "main", self.args.device)
