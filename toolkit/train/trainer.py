"""transformers' Trainer for the script's data, losses and checkpoints, and how it is built and observed for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.job.job_checks import profiled_steps
from toolkit.models.optimizers import MUON
from toolkit.observe.attest.attestation import Attestation
from toolkit.observe.batches import IGNORED
from toolkit.observe.early_stopping import EarlyStopping
from toolkit.observe.observer import Observer, observe
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.profiler import MemorySnapshot, Profiler
from toolkit.observe.timer import StepTimer
from toolkit.train.active_run import ActiveRun
from toolkit.train.at_load_states import StatesShardedAtLoad
from toolkit.train.data.collation import batch_facts, next_labels
from toolkit.train.data.dataset import Data, make_collator
from toolkit.train.data.document_isolation import verify_packing
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
from toolkit.train.engine.pipeline.read_pipeline import read_pipeline
from toolkit.train.evaluation import EvaluatedTokens, Evaluations
from toolkit.train.expected_readings import expected_methods, hook_dtype, read_methods
from toolkit.train.model.chunked_loss import apply_loss
from toolkit.train.resume import UniversalCheckpoint, is_universal, load_converted


class SupervisedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of token rows: streams, seeded groups of equal length, and evaluation by supervised token."""

    def __init__(self, *, run: ActiveRun, **kwargs: Any) -> None:
        super().__init__(args=run.arguments.training, **kwargs)
        self.run = run
        self.evaluated = EvaluatedTokens()
        streamed = isinstance(self.train_dataset, TokenStream)
        self.lane_states: LaneStates = self.train_dataset.own_states() if streamed else {}
        """Position of each lane of this rank in a stream, after what has been trained on."""

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, TokenStream):
            loader = super().get_train_dataloader()
            keep_order(loader, global_batch_size=self.run.arguments.job.global_batch_size)
            return loader
        return stream_loader(self.train_dataset, self.data_collator, self.args, self.accelerator.device)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.train_dataset, TokenStream):
            epoch_iterator = record_lane_states(epoch_iterator, self.lane_states)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return SeededLengthGroups(self.run.arguments.global_batch_size, sampler.lengths, seed=seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Return the Trainer's output with the loss over all supervised tokens instead of its mean of batch means."""
        self.evaluated = EvaluatedTokens()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = self.evaluated.over_all_ranks(self.args.device)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return one batch's mean loss, unscaled by the number of ranks; of this rank's part where rows are split."""
        split, inputs = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager(), split():
            if "shift_labels" in inputs:
                inputs.setdefault("labels", inputs["shift_labels"])
            counts = "shift_labels" in inputs or counts_tokens(self.run)
            tokens = int((next_labels(inputs) != IGNORED).sum()) if counts else 0
            loss = model(**inputs).loss.detach().float()
        self.evaluated.add(loss, tokens)
        return loss, None, None

    @property
    def saves_in_parts(self) -> bool:
        """True if `save_pretrained` of the model is collective, and writes what the ranks hold between them."""
        return bool(self.is_distributed_loading_by_transformers)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
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


class TrainerShardedAtLoad(StatesShardedAtLoad, SupervisedTrainer):
    """Trains a model that transformers sharded while it loaded it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What a Trainer is built from; a rehearsal gives other parts."""

    trainer: type[SupervisedTrainer] | None = None
    """None: by how the model was loaded."""
    timer: type[StepTimer] = StepTimer
    attestation: type[Attestation] = Attestation
    callbacks: Callable[[SupervisedTrainer], Sequence[TrainerCallback]] = lambda _: ()
    """More callbacks, after the attestation."""


def build_trainer(
    run: ActiveRun, model: Any, tokenizer: Any, data: Data, parts: TrainerParts = TrainerParts()
) -> SupervisedTrainer:
    """Build the Trainer, observed and with all its callbacks, and position a stream where the run resumes.

    Raises ToolkitError for a model that cannot be trained on packed rows.
    """
    args, training = run.arguments, run.arguments.training
    if args.job.packing:
        check_model_packs(model)
    run.progress.enter("engine")
    if args.job.compilation is not None:
        full = args.job.packing or data.stats.truncated_rows == data.stats.rows
        compile_layers(model, args.job.compilation, lengths_vary=not full)
    kind = parts.trainer or (SupervisedTrainer if run.layout_at_load is None else TrainerShardedAtLoad)
    trainer = kind(
        run=run,
        model=model,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        data_collator=make_collator(tokenizer, model, packing=args.job.packing, layout=args.layout),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(muon_factory, {"args": training}) if training.optim == MUON else None,
    )
    apply_loss(trainer, args.job)
    trainer.remove_callback(PrinterCallback)  # the timer prints instead
    trainer.add_callback(run.stop_on_signal)  # before the timer, which waits for the device where this decides to save
    observer = observe(
        trainer,
        record=run,
        parts=observer_parts(run, trainer),
        untimed_steps=args.job.untimed_steps,
        complete_saves=True,
        saves_in_background=args.job.async_save and str(training.save_strategy) != "SaveStrategy.NO",
        timer=parts.timer,
        attestation=parts.attestation,
    )
    for callback in (*parts.callbacks(trainer), *callbacks(run, trainer, observer)):
        trainer.add_callback(callback)
    if run.checkpoint is not None:
        resume_stream(data.train, run.checkpoint.path, step=run.checkpoint.step, training=training)
    return trainer


def counts_tokens(run: ActiveRun) -> bool:
    """Return False on a rank that trains on the rows of another one: their tokens are counted there."""
    layout = run.arguments.layout
    return layout is None or run.rank % layout.ranks_per_batch == 0


def observer_parts(run: ActiveRun, trainer: SupervisedTrainer) -> ObserverParts:
    """Return what the script knows of the run: the readings that its arguments determine, and its own readers."""
    args, launch = run.arguments, run.launch

    def save_states(checkpoint: Path) -> None:
        if trainer.lane_states:
            rank, world_size = trainer.args.process_index, trainer.args.world_size
            write_lane_states(checkpoint, trainer.lane_states, rank=rank, world_size=world_size)

    return ObserverParts(
        expected=ExpectedRun(
            preset=launch.preset,
            world_size=launch.world_size,
            dp_shard_size=launch.dp_shard_size,
            layout=args.layout,
            layout_at_load=run.layout_at_load,
            settings=expected_methods(args),
        ),
        read=(read_methods, read_pipeline),
        read_before_training=verify_packing,
        reduce_dtype=hook_dtype,
        batch_facts=batch_facts,
        counts_tokens=counts_tokens(run),
        compiles=args.job.compilation is not None,
        collates_on_each_rank=True,
        manifest=lambda: {
            "layout": None if args.layout is None else args.layout.degrees(),
            "pipeline_chunks": None if args.pipeline is None else args.pipeline.chunks,
            "data_parallel_size": args.data_parallel_size,
            "global_batch_size": args.global_batch_size,
            "streaming_buffer_size": getattr(trainer.train_dataset, "buffer_size", 0),
            "dataset_weights": list(args.job.dataset_weights),
        },
        save_states=save_states,
    )


def callbacks(run: ActiveRun, trainer: SupervisedTrainer, observer: Observer) -> list[TrainerCallback]:
    """Return the callbacks that the arguments switch on. The Trainer calls them in this order, after the observer's."""
    model, timer, evaluates = run.arguments.job, observer.timer, trainer.eval_dataset is not None
    found: list[TrainerCallback] = [Evaluations(run.folder)] if evaluates else []
    if model.ddp_comm_hook is not None:
        found.append(CommunicationHook(run, trainer))
    if offload_blocks(run.arguments.training):
        found.append(NvmeOffload(run))
    # After the timer: at a step's end it records whether that step was profiled, and then these decide about the next.
    if model.profile_steps is not None:
        first, last = profiled_steps(model.profile_steps)
        found.append(Profiler(run, timer, first=first, last=last))
    if model.memory_snapshot:
        found.append(MemorySnapshot(run))
    # After the timer too: it decides by the times of the finished steps.
    within, minutes = model.stop_when_steps_within, model.stop_after_minutes
    if within is not None or minutes is not None:
        found.append(EarlyStopping(run, timer, within=within, minutes=minutes, evaluates=evaluates))
    if is_universal(run.checkpoint):
        found.append(UniversalCheckpoint(trainer))
    return found
