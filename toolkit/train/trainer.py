"""transformers' Trainer for the script's data, losses and checkpoints, built and observed for a run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.engines.tensors import compute_dtype, dtype_name, num_trainable_params
from toolkit.engines.zero_live import UniversalCheckpoint
from toolkit.engines.zero_process import offload_blocks
from toolkit.job.job_checks import profiled_steps
from toolkit.models.attention import needs_no_mask
from toolkit.models.optimizers import MUON
from toolkit.observe.batches import IGNORED
from toolkit.observe.early_stopping import EarlyStopping
from toolkit.observe.observer import observe
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.profiler import MemorySnapshot, Profiler
from toolkit.observe.timer import StepTimer
from toolkit.observe.verify.verification import Verification
from toolkit.record.folder import RunFolder
from toolkit.record.reading import RankReading, Values
from toolkit.train.active_run import ActiveRun
from toolkit.train.arguments import Arguments
from toolkit.train.checkpointing import StatesShardedAtLoad, load_converted
from toolkit.train.data import collation, streaming
from toolkit.train.data.dataset import Data, make_collator
from toolkit.train.engine.comm_hooks import CommunicationHook, hook_dtype, hook_name
from toolkit.train.engine.layers import compile_layers, keeps_attention, prepare_checkpoints, start_compiler
from toolkit.train.engine.muon import make_muon
from toolkit.train.engine.nvme_offload import NvmeOffload
from toolkit.train.model.chunked_loss import apply_loss, read_loss


def evaluation_figures(batches: Sequence[tuple[torch.Tensor, int]], device: Any) -> dict[str, float | int]:
    """Return `loss`, `perplexity` and `supervised_tokens` over all ranks, from each batch's mean loss and tokens.

    A batch of fill rows only has no supervised token, and a mean loss of NaN. Collective.
    """
    total = math.fsum(float(loss) * tokens for loss, tokens in batches if tokens)
    sums = torch.tensor([total, float(sum(tokens for _, tokens in batches))], dtype=torch.float64).to(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, tokens = float(sums[0] / sums[1]), int(sums[1])
    perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond that a float overflows
    return {"loss": loss, "perplexity": perplexity, "supervised_tokens": tokens}


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Evaluates after the last step, and writes each evaluation to run.json and the log."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        loss, perplexity, tokens = (metrics[f"eval_{name}"] for name in ("loss", "perplexity", "supervised_tokens"))
        recorded = (self.folder.read_run() or {}).get("evaluations", [])
        earlier = [row for row in recorded if row["step"] < state.global_step]
        row = {"step": state.global_step, "eval_loss": loss, "perplexity": perplexity, "supervised_tokens": tokens}
        self.folder.update_run(evaluations=[*earlier, row])
        line = f"evaluation at step {state.global_step}: loss {loss:.6f}, perplexity {perplexity:.4f}"
        print(f"{line} over {tokens:,} supervised tokens", flush=True)


class SupervisedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of token rows: streams, seeded groups of equal length, and evaluation by supervised token."""

    def __init__(self, *, run: ActiveRun, **kwargs: Any) -> None:
        super().__init__(args=run.arguments.training, **kwargs)
        self.run = run
        self.evaluated: list[tuple[torch.Tensor, int]] = []  # mean loss and supervised tokens of each batch

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator; its DDP keeps no gradient twice, on its own and in a bucket."""
        super().create_accelerator_and_postprocess()
        self.accelerator.ddp_handler.gradient_as_bucket_view = True

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        prepare_checkpoints(self.model_wrapped, selective=self.run.arguments.job.activation_checkpointing_selective)
        return prepared

    @property
    def counts_tokens(self) -> bool:
        """False on a rank that trains on the rows of another one: their tokens are counted there."""
        layout = self.run.arguments.layout
        return layout is None or self.run.rank % layout.ranks_per_batch == 0

    @property
    def saves_in_parts(self) -> bool:
        """True if `save_pretrained` of the model is collective, and writes what the ranks hold between them."""
        return bool(self.is_distributed_loading_by_transformers)

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, streaming.TokenStream):
            loader = super().get_train_dataloader()
            collation.keep_order(loader, global_batch_size=self.run.arguments.job.global_batch_size)
            return loader
        return streaming.stream_loader(self.train_dataset, self.data_collator, self.args, self.accelerator.device)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.train_dataset, streaming.TokenStream):
            epoch_iterator = streaming.record_lane_states(epoch_iterator, self.train_dataset.states)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _get_train_sampler(self, *args: Any) -> Any:
        sampler, seed = super()._get_train_sampler(*args), self.args.data_seed
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if seed is None else seed
        return collation.SeededLengthGroups(self.run.arguments.global_batch_size, sampler.lengths, seed=seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Return the Trainer's output with the loss over all supervised tokens instead of its mean of batch means."""
        self.evaluated = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = evaluation_figures(self.evaluated, self.args.device)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return one batch's mean loss, unscaled by the number of ranks; of this rank's part where rows are split."""
        split, inputs = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager(), split():
            if "shift_labels" in inputs:
                inputs.setdefault("labels", inputs["shift_labels"])
            counts = "shift_labels" in inputs or self.counts_tokens
            tokens = int((collation.next_labels(inputs) != IGNORED).sum()) if counts else 0
            loss = model(**inputs).loss.detach().float()
        self.evaluated.append((loss, tokens))
        return loss, None, None

    def read_methods(self, plain: Any) -> RankReading:
        """Read the communication hook, what checkpoints keep, and the loss; `plain` is the model without wrappers."""
        selective = keeps_attention(plain)
        hook = hook_name(self.model_wrapped)
        return RankReading.of(ddp_comm_hook=hook, activation_checkpointing_selective=selective) | read_loss(plain)

    def save_states(self, checkpoint: Path) -> None:
        """Write where this rank's stream is."""
        stream = self.train_dataset
        if isinstance(stream, streaming.TokenStream) and stream.states:
            streaming.write_lane_states(checkpoint, stream.states, rank=stream.rank, world_size=stream.world_size)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_converted(self, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        load_converted(self, Path(self.state.best_model_checkpoint))


class TrainerShardedAtLoad(StatesShardedAtLoad, SupervisedTrainer):
    """Trains a model that transformers sharded while it loaded it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What a Trainer is built from; a rehearsal gives other parts."""

    trainer: type[SupervisedTrainer] | None = None  # none: by how the model was loaded
    timer: type[StepTimer] = StepTimer
    verification: type[Verification] = Verification
    callbacks: Callable[[SupervisedTrainer], Sequence[TrainerCallback]] = lambda _: ()  # after the observer's


def build_trainer(
    run: ActiveRun, model: Any, tokenizer: Any, data: Data, parts: TrainerParts = TrainerParts()
) -> SupervisedTrainer:
    """Build the observed Trainer with its callbacks. Raises ToolkitError for a model that cannot be packed."""
    args, training = run.arguments, run.arguments.training
    if args.job.packing:
        collation.check_model_packs(model)
    run.progress.enter("engine")
    if args.job.compilation is not None:
        if training.device.type == "cpu":
            start_compiler(args.job.compilation)
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
        optimizer_cls_and_kwargs=(lambda: make_muon, {"args": training}) if training.optim == MUON else None,
    )
    apply_loss(trainer, args.job)
    trainer.remove_callback(PrinterCallback)  # the timer prints instead
    observer = observe(
        trainer,
        record=run,
        parts=observer_parts(run, trainer),
        untimed_steps=args.job.untimed_steps,
        complete_saves=True,
        saves_in_background=args.job.async_save and str(training.save_strategy) != "SaveStrategy.NO",
        stop_on_signal=run.stop_on_signal,
        timer=parts.timer,
        verification=parts.verification,
    )
    for callback in (*parts.callbacks(trainer), *callbacks(run, trainer, observer.timer)):
        trainer.add_callback(callback)
    if run.checkpoint is not None and isinstance(data.train, streaming.TokenStream):
        states = streaming.read_lane_states(run.checkpoint.path)
        if states is not None:  # continue; otherwise rows are tokenised again from the first
            data.train.resume(states, batches=run.checkpoint.step * training.gradient_accumulation_steps)
    return trainer


def observer_parts(run: ActiveRun, trainer: SupervisedTrainer) -> ObserverParts:
    """Return what the script knows of the run: the readings that its arguments determine, and its own readers."""
    args, launch, model = run.arguments, run.launch, trainer.model
    all_stages = getattr(model, "num_params_of_all_stages", None)  # a pipeline trains all of its parameters
    trained_at_load = num_trainable_params(model) if all_stages is None else all_stages()
    return ObserverParts(
        expected=ExpectedRun(
            preset=launch.preset,
            world_size=launch.world_size,
            dp_shard_size=launch.dp_shard_size,
            layout=args.layout,
            layout_at_load=run.layout_at_load,
            settings=expected_readings(args) | {"num_trainable_params": trained_at_load},
        ),
        read=(lambda _, plain: trainer.read_methods(plain),),
        read_before_training=collation.verify_packing,
        reduce_dtype=hook_dtype,
        batch_facts=collation.batch_facts,
        counts_tokens=trainer.counts_tokens,
        compiles=args.job.compilation is not None,
        manifest=lambda: {
            "layout": None if args.layout is None else args.layout.degrees(),
            "pipeline_chunks": None if args.pipeline is None else args.pipeline.chunks,
            "data_parallel_size": args.data_parallel_size,
            "global_batch_size": args.global_batch_size,
            "streaming_buffer_size": getattr(trainer.train_dataset, "buffer_size", 0),
            "dataset_weights": list(args.job.dataset_weights),
        },
        save_states=trainer.save_states,
    )


def expected_readings(arguments: Arguments) -> Values:
    """Return the values that every rank must read under these arguments."""
    job, training, pipeline = arguments.job, arguments.training, arguments.pipeline
    always: Values = {
        "seed": training.seed,
        "ddp_comm_hook": job.ddp_comm_hook,
        "activation_checkpointing_offload": job.activation_checkpointing_offload,
        "activation_checkpointing_selective": job.activation_checkpointing_selective,
        "torch_compile": job.compilation is not None,
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "load_in_4bit": job.load_in_4bit,
        "quantized_storage_dtype": dtype_name(compute_dtype(training)) if job.load_in_4bit else None,
    }
    freezes = job.is_lora or job.freeze or job.train_only
    where_given: Values = {  # unless None
        "frozen_dtype": dtype_name(compute_dtype(training)) if freezes else None,
        "loss": None if job.loss == "auto" else job.loss,
        "loss_chunk_tokens": job.loss_chunk_tokens if job.loss == "chunked" else None,
        "activation_checkpointing": True if job.uses_activation_checkpointing else None,
        "accumulate": job.accumulate,
        "attn_implementation": job.attn_implementation,
        "packing_mask_bytes": 0 if job.packing and needs_no_mask(job.attn_implementation) else None,
    }
    if pipeline is not None:
        where_given |= {"pipeline_schedule": pipeline.schedule, "pipeline_stages": pipeline.stages}
        where_given["micro_batches"] = training.gradient_accumulation_steps
        where_given["activation_dtype"] = "float32"  # the residual stream between layers, under autocast too
    return always | {name: value for name, value in where_given.items() if value is not None}


def callbacks(run: ActiveRun, trainer: SupervisedTrainer, timer: StepTimer) -> Iterator[TrainerCallback]:
    """Yield the callbacks that the arguments switch on. The Trainer calls them in this order, after the observer's."""
    job, evaluates = run.arguments.job, trainer.eval_dataset is not None
    if evaluates:
        yield Evaluations(run.folder)
    if job.ddp_comm_hook is not None:
        yield CommunicationHook(trainer, job)
    if blocks := offload_blocks(run.arguments.training):
        yield NvmeOffload(run, blocks)
    # After the timer: at a step's end it records whether that step was profiled, and then these decide about the next.
    if job.profile_steps is not None:
        first, last = profiled_steps(job.profile_steps)
        yield Profiler(run, timer, first=first, last=last)
    if job.memory_snapshot:
        yield MemorySnapshot(run)
    # After the timer too: it decides by the times of the finished steps.
    within, minutes = job.stop_when_steps_within, job.stop_after_minutes
    if within is not None or minutes is not None:
        yield EarlyStopping(run, timer, within=within, minutes=minutes, evaluates=evaluates)
    if run.checkpoint is not None and run.checkpoint.manifest is not None and run.checkpoint.manifest.universal:
        yield UniversalCheckpoint(trainer)
