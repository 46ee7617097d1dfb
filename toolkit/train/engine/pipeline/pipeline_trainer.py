"""The loop over a pipeline's optimizer steps, in the place of the Trainer's.

Everything around a step stays the Trainer's: the order of the rows, optimizer, schedule of the learning rate,
callbacks, evaluation, and when a checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from toolkit.files.safe_loading import torch_load
from toolkit.observe.batches import BATCH_FACTS
from toolkit.observe.observer import Observer
from toolkit.record.checkpoints import STAGE_OPTIMIZER
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel
from toolkit.train.engine.pipeline.pipeline_steps import PipelineSteps
from toolkit.train.trainer import SupervisedTrainer

SCHEDULER = "scheduler.pt"


class PipelineTrainer(SupervisedTrainer):
    """Trains the stages of `PipelineModel`: an optimizer step's accumulation steps are its micro-batches."""

    model: PipelineModel
    observer: Observer
    control: Any
    optimizer: Any
    lr_scheduler: Any
    saves_in_parts = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accelerator.prepare_data_loader = self._rows_of_pipeline
        self.steps = PipelineSteps(
            self.model, micro_batches=self.args.gradient_accumulation_steps, begin_forward=self._begin_forward
        )
        self.losses: list[torch.Tensor] = []
        """Losses of the step's micro-batches, known on the last rank until the norm is reduced."""

    def _rows_of_pipeline(self, loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
        """Deal rows to pipelines instead of ranks; everything else as accelerate does."""
        del device_placement
        accelerator, ranks = self.accelerator, self.model.ranks
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks.num_replicas,
            process_index=ranks.replica,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )

    def _begin_forward(self) -> None:
        progress = self.observer.progress
        progress.phase, progress.micro_steps = "forward", progress.micro_steps + 1

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the tokens of each pipeline's rows once: all of its ranks hold the same."""
        number = super()._get_num_items_in_batch(*args, **kwargs)
        return None if number is None else number / self.model.ranks.size

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) // self.model.ranks.size

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

    def _run_epoch(
        self,
        *,
        model: PipelineModel,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **when: Any,
    ) -> None:
        """Train the optimizer steps of an epoch. `steps_...` are the Trainer's names for accumulation steps."""
        resumes = resume_from_checkpoint is not None and epoch == epochs_trained
        skipped = steps_trained_in_current_epoch if resumes else 0
        batches = self._batches(train_dataloader, epoch, skipped)
        if resumes:
            self._load_rng_state(resume_from_checkpoint)
        accumulation = self.args.gradient_accumulation_steps
        for step in range(skipped // accumulation, num_update_steps_per_epoch):
            left = steps_in_epoch - step * accumulation
            grad_norm, learning_rate = self._train_step(model, batches, min(accumulation, left))
            self.state.epoch = epoch + min(1.0, (step + 1) * accumulation / steps_in_epoch)
            self.state.global_step += 1
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            at = {"epoch": epoch, "learning_rate": learning_rate, **when}
            self._maybe_log_save_evaluate(self._tr_loss, grad_norm, model, **at)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(self._tr_loss, None, model, epoch=epoch, **when)

    def _batches(self, loader: Any, epoch: int, skipped: int) -> Iterator[Any]:
        """Iterate over an epoch's batches in the Trainer's order, after those that are trained already."""
        loader = skip_first_batches(loader, skipped) if skipped else loader
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for each in (loader, sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        return iter(loader)

    def _train_step(self, model: PipelineModel, batches: Iterator[Any], count: int) -> tuple[Any, float]:
        """Train one optimizer step; return the gradient norm and the learning rate."""
        samples, num_items = self.get_batch_samples(batches, count, self.args.device)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        model.train()
        for sample in samples:
            self.observer.timer.add_batch(sample.get(BATCH_FACTS))
        self.losses = self.steps.run(samples, num_items=num_items)
        self.observer.progress.phase = "step"
        self.observer.timer.record_memory("backward")
        self._reduce_gradients()
        grad_norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        grad_norm = self._get_grad_norm(model, grad_norm)
        for loss in self.losses:
            self.observer.timer.add_loss(loss)
            self._tr_loss += loss
        self.losses = []
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        self.lr_scheduler.step()
        model.zero_grad()
        return grad_norm, learning_rate

    def _reduce_gradients(self) -> None:
        """Add up the two gradients of a tied weight, and those of all pipelines: losses are shares of all tokens."""
        ranks, tied = self.model.ranks, self.model.tied_weight
        if tied is not None:
            dist.all_reduce(tied.grad, group=ranks.ends)
        if ranks.num_replicas > 1:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            sent = [dist.all_reduce(gradient, group=ranks.replicas, async_op=True) for gradient in gradients]
            for work in sent:
                work.wait()

    def _grad_norm_of_all_stages(self) -> torch.Tensor:
        """Return the gradient norm of the whole model; the same reduction brings the losses to every rank."""
        copies = [stage.tied_copy for stage in self.model.stages]  # counted by the first stage
        counted = (p for p in self.model.parameters() if not any(p is copy for copy in copies))
        own = [p.grad for p in counted if p.grad is not None]
        square = get_total_norm(own).double() ** 2 if own else torch.zeros((), dtype=torch.float64)
        facts = torch.stack([square.to(self.args.device), *(loss.double() for loss in self.losses)])
        dist.all_reduce(facts, group=self.model.ranks.pipeline)
        # The Trainer's losses of data-parallel ranks are shares of the step's tokens, times the number of ranks.
        self.losses = [loss.float() * self.model.ranks.num_replicas for loss in facts[1:]]
        return facts[0].sqrt().float()

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        norm = self._grad_norm_of_all_stages()
        clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, self._grad_norm_of_all_stages() if grad_norm is None else grad_norm)

    @property
    def gradient_parts(self) -> int:
        """Ranks whose parameters together are those of the model."""
        return int(self.model.ranks.size)

    def gradient_copies(self, parameter: Any) -> int:
        tied = self.model.tied_weight
        return self.model.ranks.num_replicas * (2 if tied is not None and parameter is tied else 1)

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
        if checkpoint is None:
            return
        states = torch_load(Path(checkpoint) / STAGE_OPTIMIZER.format(rank=self.model.ranks.rank))
        self.optimizer.load_state_dict(states)
        self.lr_scheduler.load_state_dict(torch_load(Path(checkpoint) / SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The stages were loaded from the checkpoint already."""

    def _load_best_model(self) -> None:
        self.model.load(str(self.state.best_model_checkpoint), "main", self.args.device)
