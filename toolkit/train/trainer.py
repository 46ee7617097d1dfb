"""transformers' Trainer, with the meter told what each micro-step trained on.

Nothing of the training is changed: batches, losses and the gradient norm pass by and are written down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.runs.checkpoints import files_of, saving_folder
from toolkit.train.batches import BATCH_FACTS
from toolkit.train.checkpointing import finish_checkpoint, leave_out_tied_weights
from toolkit.train.evaluation import EvaluatedTokens
from toolkit.train.failure import Progress
from toolkit.train.meter import Meter, watch_waits
from toolkit.train.sampling import SeededLengthGroups
from toolkit.train.stream_loading import States, noting, stream_loader, write_lanes
from toolkit.train.streaming import TokenStream


class MeasuredTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose collator adds the batch's facts under `BATCH_FACTS`."""

    def __init__(self, *args: Any, meter: Meter, progress: Progress, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter, self.progress = meter, progress
        self.manifest_facts: Callable[[], dict[str, Any]] = dict
        self.live_answer: Callable[[], dict[str, Any] | None] = lambda: None
        self.watched = bool(self.args.torch_compile)
        """Whether the meter knows when the model's forward waits for other ranks, or hooks would break its graph."""
        self.staging: Path | None = None
        """Where a checkpoint is being written; None while none is."""
        self.evaluated = EvaluatedTokens()
        streamed = isinstance(self.train_dataset, TokenStream)
        self.lane_states: States = self.train_dataset.own_states() if streamed else {}
        """Of a stream: where each lane of this rank stands behind what is trained on."""
        self.saves: list[dict[str, Any]] = []
        """Each save of this run, for run.json; of rank 0."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.meter.add_batch(inputs.pop(BATCH_FACTS, None))
        self.progress.phase, self.progress.micro_steps = "forward", self.progress.micro_steps + 1
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.progress.phase = "step"
        self._climb("backward")
        self.meter.add_loss(loss)
        return loss

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, TokenStream):
            return super().get_train_dataloader()
        return stream_loader(self.train_dataset, self.data_collator, self.args, self.accelerator.device)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        self.progress.phase = "data"
        if isinstance(self.train_dataset, TokenStream):
            epoch_iterator = noting(epoch_iterator, self.lane_states)
        with torch.profiler.record_function("toolkit.data_wait"):
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.meter.wait()  # tokens are counted over all ranks
        number = super()._get_num_items_in_batch(*args, **kwargs)
        self.meter.go_on()
        return number

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self.watched:
            watch_waits(model, self.meter)
            self.watched = True
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self._climb("forward")
        self.progress.phase = "backward"
        self.meter.enter_backward()
        return loss

    def _climb(self, rung: str) -> None:
        if self.progress.ladder is not None:
            self.progress.ladder.climb(rung)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return SeededLengthGroups(batch, sampler.lengths, seed=seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The Trainer's loop, with the loss over all supervised tokens instead of its mean of batch means."""
        self.progress.phase, self.evaluated = "evaluate", EvaluatedTokens()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = self.evaluated.over_all_ranks(self.args.device)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """One batch's mean loss, unscaled by the number of ranks."""
        facts = inputs.pop(BATCH_FACTS)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**self._prepare_inputs(inputs)).loss.detach().float()
        self.evaluated.add(loss, facts.supervised_tokens)
        return loss, None, None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.enter("save")
        self.meter.flush(wait=True)  # no checkpoint without the rows of its steps
        facts = self.manifest_facts()  # first: weights that are lost are not written
        started = time.monotonic()
        if hasattr(self.model_wrapped, "zero_optimization_stage") and "module_state_dict" not in vars(
            self.model_wrapped
        ):
            leave_out_tied_weights(self.model_wrapped)
        self.staging = saving_folder(Path(self.args.output_dir), self.state.global_step)
        super()._save_checkpoint(model, trial)
        if self.lane_states:
            written = self.staging / f"checkpoint-{self.state.global_step}"
            write_lanes(written, self.lane_states, rank=self.args.process_index, world_size=self.args.world_size)
        staging, self.staging = self.staging, None
        finish_checkpoint(self, staging, facts)
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.note_save("checkpoint", files_of(checkpoint), started)
        self.progress.enter("train")

    def note_save(self, kind: str, files: Iterable[Path], started: float) -> None:
        """How long a save took, and the bytes of its files; rank 0 counts what all ranks wrote."""
        if self.args.process_index == 0:
            size = sum(path.stat().st_size for path in files)
            seconds = time.monotonic() - started
            self.saves.append({"kind": kind, "step": self.state.global_step, "seconds": seconds, "bytes": size})

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self.staging is None else self.staging)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self.meter.add_grad_norm(grad_norm)
        return grad_norm
