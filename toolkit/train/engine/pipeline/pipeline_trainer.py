"""A Trainer of a pipeline: the schedule runs all micro-batches of an optimizer step at once, the first time one is due.

Everything around that stays the Trainer's: the order of the rows, optimizer, learning rate, callbacks, evaluation, and
when a checkpoint is saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from toolkit.files.safe_loading import torch_load
from toolkit.record.checkpoints import STAGE_OPTIMIZER
from toolkit.train.checkpointing import SCHEDULER
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
from toolkit.train.engine.pipeline.pipeline_steps import PipelineSteps
from toolkit.train.trainer import SupervisedTrainer


class PipelineTrainer(SupervisedTrainer):
    """Trains the stages of `PipelineModel`: an optimizer step's accumulation steps are its micro-batches."""

    model: PipelineModel
    optimizer: Any
    lr_scheduler: Any
    saves_in_parts = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accelerator.prepare_data_loader = self._rows_of_pipeline
        self.steps = PipelineSteps(self.model, micro_batches=self.args.gradient_accumulation_steps)
        self.samples: list[Any] = []
        """The micro-batches of the step."""
        self.losses: list[torch.Tensor] = []
        """Their losses, from the first of them until each was returned."""

    def _rows_of_pipeline(self, loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
        """Deal rows to pipelines instead of ranks; everything else as accelerate does."""
        del device_placement
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

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.samples, num_items = super().get_batch_samples(*args, **kwargs)
        return self.samples, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of one micro-batch; the first trains all of the step."""
        del inputs
        if not self.losses:
            model.train()
            losses = torch.stack(self.steps.run(self.samples, num_items=num_items_in_batch))
            self._reduce_gradients()
            dist.all_reduce(losses, group=self.model.ranks.pipeline)  # zeros except on the rank of the last stage
            # The Trainer's losses of data-parallel ranks are shares of the step's tokens, times the number of ranks.
            self.losses = list(losses * self.model.ranks.layout.dp_replicate)
        return self.losses.pop(0)

    def _reduce_gradients(self) -> None:
        """Add up the two gradients of a tied weight, and those of all pipelines: losses are shares of all tokens."""
        ranks, tied = self.model.ranks, self.model.tied_weight
        if tied is not None:
            dist.all_reduce(tied.grad, group=ranks.ends)
        if ranks.layout.dp_replicate > 1:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            sent = [dist.all_reduce(gradient, group=ranks.replicas, async_op=True) for gradient in gradients]
            for work in sent:
                work.wait()

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

    @property
    def gradient_parts(self) -> int:
        """Ranks whose parameters together are those of the model."""
        return self.model.settings.ranks

    def gradient_copies(self, parameter: Any) -> int:
        tied = self.model.tied_weight
        return self.model.ranks.layout.dp_replicate * (2 if tied is not None and parameter is tied else 1)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write this rank's weights as one file of a model folder. Collective."""
        del _internal_call
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
