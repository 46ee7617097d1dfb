"""transformers' Trainer with a step timer and complete-or-absent checkpoints, and how it is built for a run.

Training itself is unchanged: batches, losses and the gradient norm are recorded as they pass.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.models.optimizers import MUON
from toolkit.record.checkpoints import checkpoint_files, saving_folder
from toolkit.train.active_run import ActiveRun
from toolkit.train.attest.attestation import Attestation
from toolkit.train.attest.read_fsdp2 import is_shard
from toolkit.train.attest.readings import RankReading
from toolkit.train.attest.training_methods import expected_methods
from toolkit.train.checkpointing.at_load_states import drop_empty_groups, load_states, save_states
from toolkit.train.checkpointing.background_save import BackgroundSaver, SaveRecord
from toolkit.train.checkpointing.manifest import (
    describe_checkpoint,
    fingerprint,
    leave_out_tied_weights,
    manifest_facts,
)
from toolkit.train.checkpointing.resume import UniversalCheckpoint, is_universal, load_converted
from toolkit.train.data.collation import BATCH_FACTS, IGNORED
from toolkit.train.data.dataset import Data, make_collator
from toolkit.train.data.packing import check_model_packs
from toolkit.train.data.row_order import SeededLengthGroups, keep_order
from toolkit.train.data.stream_loader import (
    LaneStates,
    record_lane_states,
    resume_stream,
    stream_loader,
    write_lane_states,
)
from toolkit.train.data.streaming import TokenStream
from toolkit.train.engine.comm_hooks import CommunicationHook
from toolkit.train.engine.compiled_layers import compile_layers
from toolkit.train.engine.muon import muon_factory
from toolkit.train.engine.nvme_offload import NvmeOffload, offload_blocks
from toolkit.train.health.progress import STEP_PHASES
from toolkit.train.metrics.early_stopping import EarlyStopping
from toolkit.train.metrics.evaluation import EvaluatedTokens, Evaluations
from toolkit.train.metrics.profiler import MemorySnapshot, Profiler
from toolkit.train.metrics.step_breakdown import DATA_WAIT_EVENT
from toolkit.train.metrics.timer import StepTimer, time_waits_in_forward
from toolkit.train.model.chunked_loss import apply_loss


class MeasuredTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose collator adds the batch's facts under `BATCH_FACTS`."""

    def __init__(self, *, run: ActiveRun, timer: StepTimer, **kwargs: Any) -> None:
        args = run.arguments.training
        if args.optim == MUON:
            kwargs["optimizer_cls_and_kwargs"] = (muon_factory, {"args": args})
        save_only_model, args.save_only_model = args.save_only_model, args.save_only_model or run.layout_at_load
        super().__init__(args=args, **kwargs)  # it refuses to resume a model sharded at load, which we do
        args.save_only_model = save_only_model
        self.run, self.timer, self.progress = run, timer, run.progress
        self.times_waits = False
        """True once the timer is notified when forward waits for other ranks."""
        self.staging: Path | None = None
        """Where a checkpoint is being written; None while none is."""
        self.evaluated = EvaluatedTokens()
        streamed = isinstance(self.train_dataset, TokenStream)
        self.lane_states: LaneStates = self.train_dataset.own_states() if streamed else {}
        """Position of each lane of this rank in a stream, after what has been trained on."""
        self.first_batches: list[str] = []
        """Digests of the batches of this rank's first optimizer step."""
        self.saves: list[SaveRecord] = []
        """Each save of this run, for run.json; rank 0's have their sizes."""
        saves_in_background = run.arguments.job.async_save and str(args.save_strategy) != "SaveStrategy.NO"
        timeout = timedelta(seconds=args.ddp_timeout)
        self.background = BackgroundSaver(self.model, timeout=timeout) if saves_in_background else None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self.background is not None:
            self.background.raise_if_failed()
        facts = inputs.pop(BATCH_FACTS, None)
        self.timer.add_batch(facts)
        if facts is not None and self.state.global_step == self._initial_global_step:
            self.first_batches.append(facts.sha256)
        self.progress.phase, self.progress.micro_steps = "forward", self.progress.micro_steps + 1
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.progress.phase = "step"
        self._record_memory("backward")
        self.timer.add_loss(loss)
        return loss

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, TokenStream):
            loader = super().get_train_dataloader()
            keep_order(loader, global_batch_size=self.run.arguments.job.global_batch_size)
            return loader
        return stream_loader(self.train_dataset, self.data_collator, self.args, self.accelerator.device)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        self.progress.phase = "data"
        self.timer.begin_data()
        if isinstance(self.train_dataset, TokenStream):
            epoch_iterator = record_lane_states(epoch_iterator, self.lane_states)
        with torch.profiler.record_function(DATA_WAIT_EVENT):
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.timer.end_data()
        self.timer.begin_wait()  # tokens are counted over all ranks
        number = super()._get_num_items_in_batch(*args, **kwargs)
        self.timer.end_wait()
        return number

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self.times_waits:
            time_waits_in_forward(model, self.timer)
            self.times_waits = True
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self._record_memory("forward")
        self.progress.phase = "backward"
        self.timer.enter_backward()
        return loss

    def _record_memory(self, phase: str) -> None:
        if self.progress.memory_by_phase is not None:
            self.progress.memory_by_phase.record(phase)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        batch = self.run.arguments.global_batch_size
        return SeededLengthGroups(batch, sampler.lengths, seed=seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Return the Trainer's output with the loss over all supervised tokens instead of its mean of batch means."""
        before, self.evaluated = self.progress.phase, EvaluatedTokens()
        self.progress.enter("evaluate")
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = self.evaluated.over_all_ranks(self.args.device)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        self.progress.enter("train" if before in STEP_PHASES else before)
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return one batch's mean loss, unscaled by the number of ranks; of this rank's part where rows are split."""
        facts = inputs.pop(BATCH_FACTS)
        split, inputs = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager(), split():
            tokens = facts.supervised_tokens if self.timer.counts_tokens else 0
            if "shift_labels" in inputs:
                inputs.setdefault("labels", inputs["shift_labels"])
                tokens = int((inputs["shift_labels"] != IGNORED).sum())
            loss = model(**inputs).loss.detach().float()
        self.evaluated.add(loss, tokens)
        return loss, None, None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.enter("save")
        entered = time.monotonic()
        waited = 0.0 if self.background is None else self.background.wait()
        self.timer.flush(wait=True)  # no checkpoint without the rows of its steps
        preset, reading = self.run.launch.preset, self.reading
        assert reading is not None
        # First: it raises where the weights are lost, and those are not written.
        facts = manifest_facts(self, reading, preset=None if preset is None else preset.name)
        record = SaveRecord(kind="checkpoint", step=self.state.global_step, waited_seconds=waited)
        self._write_checkpoint(model, trial, facts, record)
        self.saves.append(record)
        record.stall_seconds += time.monotonic() - entered
        self.progress.enter("train")

    def _write_checkpoint(self, model: Any, trial: Any, facts: dict[str, Any], record: SaveRecord) -> None:
        """Write the checkpoint with the manifest `facts`, or begin to."""
        began, wrapped = time.monotonic(), self.model_wrapped
        if hasattr(wrapped, "zero_optimization_stage") and "module_state_dict" not in vars(wrapped):
            leave_out_tied_weights(wrapped)
        self.staging = saving_folder(Path(self.args.output_dir), self.state.global_step)
        with contextlib.nullcontext() if self.background is None else self.background.deferred_writes():
            super()._save_checkpoint(model, trial)
        if self.lane_states:
            written = self.staging / f"checkpoint-{self.state.global_step}"
            write_lane_states(written, self.lane_states, rank=self.args.process_index, world_size=self.args.world_size)
        staging, self.staging = self.staging, None
        saved = describe_checkpoint(self, staging, facts)
        if self.background is not None:
            self.background.start(saved, record, began=began)
            return
        saved.complete()
        if self.args.process_index == 0:
            record.complete(checkpoint_files(saved.checkpoint), began=began, writing_began=began)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            if self.background is not None:
                self.background.finish_after_failure()
            raise

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.background is not None:  # the best checkpoint may be loaded, and older ones removed
            self.progress.enter("save")
            waited = self.background.wait()
            if self.saves:
                self.saves[-1].stall_seconds += waited
            self.progress.enter("train")
        return super()._finalize_training(*args, **kwargs)

    @property
    def reading(self) -> RankReading | None:
        """What this rank read back of itself after its first step; None before."""
        callbacks = self.callback_handler.callbacks
        return next(callback.reading for callback in callbacks if isinstance(callback, Attestation))

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the live model's logits for fixed tokens. Collective; raises Diverged where they are not finite."""
        return fingerprint(self, self.reading)

    @property
    def saves_in_parts(self) -> bool:
        """True if `save_pretrained` of the model is collective, and writes what the ranks hold between them."""
        return bool(self.is_distributed_loading_by_transformers)

    def gradient_copies(self, parameter: Any) -> int:
        """Return the ranks that hold the same part of a parameter's gradient, where layers are split; otherwise 1."""
        layout = self.run.layout_at_load
        if layout is None or layout.tp == layout.ep == 1:
            return 1
        gradient = parameter.grad
        placements = getattr(gradient, "placements", ())
        sizes = zip(placements, map(int, gradient.device_mesh.shape), strict=True) if placements else ()
        shards = math.prod(size for placement, size in sizes if is_shard(placement))
        return int(dist.get_world_size()) // shards

    def note_save(self, kind: str, files: Iterable[Path], began: float) -> None:
        """Record how long a save took and the bytes of its files; rank 0 counts what all ranks wrote."""
        record = SaveRecord(kind=kind, step=self.state.global_step, stall_seconds=time.monotonic() - began)
        record.complete(files, began=began, writing_began=began)
        self.saves.append(record)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.is_distributed_loading_by_transformers:
            drop_empty_groups(optimizer)
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_distributed_loading_by_transformers:
            save_states(self, Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_distributed_loading_by_transformers:
            load_states(self, Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:  # its weights were loaded with the model
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self._load_converted(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_converted(Path(self.state.best_model_checkpoint))

    def _load_converted(self, folder: Path) -> None:
        plain = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        whole = not (self.is_fsdp_enabled or self.is_deepspeed_enabled or hasattr(plain, "peft_config"))
        if whole:
            load_converted(plain, folder)

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self.staging is None else self.staging)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self.timer.add_grad_norm(grad_norm)
        return grad_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What a Trainer is built from; a rehearsal gives other parts."""

    trainer: type[MeasuredTrainer] = MeasuredTrainer
    timer: type[StepTimer] = StepTimer
    attestation: type[Attestation] = Attestation
    callbacks: Callable[[MeasuredTrainer], Sequence[TrainerCallback]] = lambda _: ()
    """More callbacks, after the attestation."""


def build_trainer(
    run: ActiveRun, model: Any, tokenizer: Any, data: Data, parts: TrainerParts = TrainerParts()
) -> MeasuredTrainer:
    """Build the Trainer with all its callbacks, and position a stream where the run resumes.

    Raises ToolkitError for a model that cannot be trained on packed rows.
    """
    args, training = run.arguments, run.arguments.training
    if args.job.packing:
        check_model_packs(model)
    run.progress.enter("engine")
    if args.job.compilation is not None:
        full = args.job.packing or data.stats.truncated_rows == data.stats.rows
        compile_layers(model, args.job.compilation, lengths_vary=not full)
    timer = parts.timer(
        run.folder.rank_rows(run.rank),
        rank=run.rank,
        device=training.device,
        progress=run.progress,
        untimed_steps=args.job.untimed_steps,
        resumed_step=run.resumed_step,
        begin_training=run.begin_rows,
        compiles=args.job.compilation is not None,
        counts_tokens=args.layout is None or run.rank % args.layout.ranks_per_batch == 0,
        world_size=None if run.single_process else training.world_size,
    )
    trainer = parts.trainer(
        run=run,
        timer=timer,
        model=model,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        data_collator=make_collator(tokenizer, model, packing=args.job.packing, layout=args.layout),
        processing_class=tokenizer,
    )
    apply_loss(trainer, args.job)
    trainer.remove_callback(PrinterCallback)  # the timer prints instead
    for callback in _callbacks(run, trainer, parts):
        trainer.add_callback(callback)
    if run.checkpoint is not None:
        resume_stream(data.train, run.checkpoint.path, step=run.checkpoint.step, training=training)
    return trainer


def _callbacks(run: ActiveRun, trainer: MeasuredTrainer, parts: TrainerParts) -> list[TrainerCallback]:
    """Return the run's callbacks. The Trainer calls them in this order at every event."""
    model, timer = run.arguments.job, trainer.timer
    callbacks = [
        run.stop_on_signal,  # before the timer, which waits for the device where this decides to save
        timer,  # before all that spends time between steps
        parts.attestation(
            run.folder.attestation_json,
            run.launch,
            trainer=trainer,
            progress=run.progress,
            expected_settings=expected_methods(run.arguments),
            on_done=timer.restart_clock,  # reading back is no part of a step
        ),
        *parts.callbacks(trainer),
    ]
    if trainer.eval_dataset is not None:
        callbacks.append(Evaluations(run.folder))
    if model.ddp_comm_hook is not None:
        callbacks.append(CommunicationHook(run, trainer))
    if offload_blocks(run.arguments.training):
        callbacks.append(NvmeOffload(run))
    # After the timer: at a step's end it records whether that step was profiled, and then these decide about the next.
    if model.profile_steps is not None:
        callbacks.append(Profiler(run, timer, model.profile_steps))
    if model.memory_snapshot:
        callbacks.append(MemorySnapshot(run))
    # After the timer too: it decides by the times of the finished steps.
    if model.stop_when_steps_within is not None or model.stop_after_minutes is not None:
        callbacks.append(
            EarlyStopping(
                run,
                timer,
                within=model.stop_when_steps_within,
                minutes=model.stop_after_minutes,
                evaluates=trainer.eval_dataset is not None,
            )
        )
    if is_universal(run.checkpoint):
        callbacks.append(UniversalCheckpoint(trainer))
    return callbacks
