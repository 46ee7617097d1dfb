"""Observe any `transformers.Trainer`, whoever wrote its script.

    trainer = Trainer(...)
    observe(trainer, folder="runs/mine")
    trainer.train()

The instance gets a class with `ObservedTrainer` before its own, so overrides of its own class still run; its collator
is wrapped, because batches are on the CPU there; everything else comes from callbacks. The folder then has a row for
each step and rank, and what was really in effect.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from toolkit.errors import AttestationFailed
from toolkit.observe.attest.attestation import Attestation
from toolkit.observe.attest.expected import optimizer_class
from toolkit.observe.attest.tensors import innermost_optimizer
from toolkit.observe.batches import ObservedCollator, label_shift_of, take_facts, tensor_facts
from toolkit.observe.checkpoint_saver import BackgroundSaver, CheckpointSaver
from toolkit.observe.failure_report import report_failure
from toolkit.observe.hang_detection import Watchdog
from toolkit.observe.observed_run import ObservedRun, claim_folder, gather_from_ranks
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.profiler import DATA_WAIT_EVENT
from toolkit.observe.progress import STEP_PHASES, Progress
from toolkit.observe.signals import StopOnSignal
from toolkit.observe.timer import StepTimer, time_waits_in_forward
from toolkit.presets.spec import PresetSpec
from toolkit.record.attempts import check_start
from toolkit.record.folder import RunFolder

UNTIMED_STEPS = 2  # compilation and the growth of the allocator


@dataclass(kw_only=True, slots=True)
class Observer:
    """What observes one Trainer on this rank."""

    progress: Progress
    timer: StepTimer
    attestation: Attestation
    saver: CheckpointSaver | None  # makes checkpoints complete or absent; None leaves the Trainer's saves as they are
    stop_on_signal: StopOnSignal | None = None
    completes: Callable[[], None] | None = None
    """Completes the record when `train()` returns; None where the script does that itself."""
    times_waits: bool = False  # true once the timer is notified when forward waits for other ranks

    @property
    def background(self) -> BackgroundSaver | None:
        return None if self.saver is None else self.saver.background


class ObservedTrainer(Trainer):  # type: ignore[misc]
    """Stands before the Trainer's own class. It notes what passes, and changes none of it."""

    observer: Observer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        observer = self.observer
        try:
            output = super().train(*args, **kwargs)
            if observer.completes is not None:
                observer.completes()
            return output
        except BaseException as error:
            if observer.background is not None:
                observer.background.finish_after_failure()
            if observer.completes is not None:
                report_failure(error, observer.progress)
            raise

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.observer.progress.phase = "data"
        self.observer.timer.begin_data()
        with torch.profiler.record_function(DATA_WAIT_EVENT):
            return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        timer = self.observer.timer
        timer.end_data()
        timer.begin_wait()  # tokens are counted over all ranks
        number = super()._get_num_items_in_batch(*args, **kwargs)
        timer.end_wait()
        return number

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        observer, progress = self.observer, self.observer.progress
        if observer.background is not None:
            observer.background.raise_if_failed()
        observer.timer.add_batch(take_facts(inputs))
        progress.phase, progress.micro_steps = "forward", progress.micro_steps + 1
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        progress.phase = "step"
        progress.record_memory("backward")
        observer.timer.add_loss(loss)
        return loss

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, *args, **kwargs)
        observer = self.observer
        observer.attestation.replicas.note_sync(model)
        if not observer.times_waits:
            time_waits_in_forward(model, observer.timer)
            observer.times_waits = True
        loss = super().compute_loss(model, *args, **kwargs)
        observer.progress.phase = "backward"
        observer.timer.enter_backward()
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        grad_norm = super()._get_grad_norm(*args, **kwargs)
        self.observer.timer.step.grad_norm = grad_norm
        self.observer.attestation.norms.add_grad_norm(grad_norm)
        return grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        act = functools.partial(super()._maybe_log_save_evaluate, *args, **kwargs)
        stops = self.observer.stop_on_signal
        act() if stops is None else stops.evaluate_and_save(self, act)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        progress = self.observer.progress
        before = progress.phase
        progress.enter("evaluate")
        output = super().evaluation_loop(*args, **kwargs)
        progress.enter("train" if before in STEP_PHASES else before)
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        take_facts(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        observer, entered = self.observer, time.monotonic()
        observer.progress.enter("save")
        observer.timer.flush(wait=True)  # no checkpoint without the rows of its steps
        save = super()._save_checkpoint
        if observer.saver is None:
            save(*args, **kwargs)
        else:
            observer.saver.save(lambda: save(*args, **kwargs), entered=entered)
        observer.progress.enter("train")

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        staging = None if self.observer.saver is None else self.observer.saver.staging
        return str(super()._get_output_dir(*args, **kwargs) if staging is None else staging)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.observer.attestation.check_replicas(self.state)
        if self.observer.saver is not None and self.observer.background is not None:
            self.observer.progress.enter("save")
            self.observer.saver.finish()
            self.observer.progress.enter("train")
        if (stops := self.observer.stop_on_signal) is not None and stops.stopped:
            # the Trainer would load its best checkpoint, and with `--save_total_limit 1` remove the one just saved
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            stops.raise_stopped()
        return super()._finalize_training(*args, **kwargs)


def observe(
    trainer: Any,
    folder: str | Path | None = None,
    *,
    record: ObservedRun | None = None,
    require: PresetSpec | None = None,
    parts: ObserverParts | None = None,
    untimed_steps: int = UNTIMED_STEPS,
    complete_saves: bool = False,
    saves_in_background: bool = False,
    stop_on_signal: StopOnSignal | None = None,
    timer: type[StepTimer] = StepTimer,
    attestation: type[Attestation] = Attestation,
    prepared: bool = False,
) -> Observer:
    """Observe a Trainer from its next `train()` on, and return what observes it. Every rank must call it.

    What is observed is written to `folder`; a script that opens its own `record` gives that instead, completes it and
    reports its failures. With `require`, a run that is not what the preset specifies ends with AttestationFailed; so
    does one with a `record`, which also ends where a loss or a gradient norm is not finite. `complete_saves` makes the
    Trainer's checkpoints complete or absent; `stop_on_signal` saves one more when a signal ends the run. `parts` is
    what the script knows of its run. Raises ToolkitError for a folder that holds a finished or a running run.
    """
    args, own = trainer.args, type(trainer)
    if parts is None:
        parts = ObserverParts(expected=ExpectedRun.of_preset(require, args.world_size))
    if record is None:
        made = trainer.optimizer is not None or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None
        makes = made or own.create_optimizer is not Trainer.create_optimizer
        given = None if trainer.optimizer is None else optimizer_class(innermost_optimizer(trainer.optimizer))
        own_parts: dict[str, Any] = {"own_optimizer": makes, "made_optimizer": given, "may_leave_unused": True}
        parts = replace(parts, expected=replace(parts.expected, **own_parts))
    run = record or open_record(Path(folder or args.output_dir), args, require, prepared=prepared)
    step_timer = timer(
        run, parts, device=args.device, untimed_steps=untimed_steps, stops_if_diverged=record is not None
    )
    strict = require is not None or record is not None or bool(parts.expected.settings)
    verification = attestation(run, parts, step_timer, trainer=trainer, strict=strict)
    saver = CheckpointSaver(trainer, parts, verification, in_background=saves_in_background) if complete_saves else None
    observer = Observer(
        progress=run.progress,
        timer=step_timer,
        attestation=verification,
        saver=saver,
        stop_on_signal=stop_on_signal,
    )
    if record is None:
        observer.completes = lambda: run.complete(untimed_steps=untimed_steps, saves=saver.saves if saver else ())
    trainer.observer = observer
    trainer.__class__ = type(f"Observed{own.__name__}", (ObservedTrainer, own), {})
    # accelerate may send the batches of an iterable data set to other ranks, and sends tensors only
    if not isinstance(trainer.train_dataset, IterableDataset) or parts.collates_on_each_rank:
        count = parts.batch_facts or functools.partial(tensor_facts, label_shift=label_shift_of(trainer.model))
        trainer.data_collator = ObservedCollator(trainer.data_collator, count)
    # the timer waits for the device where a signal decides to save
    for callback in (*([] if stop_on_signal is None else [stop_on_signal]), step_timer, verification):
        trainer.add_callback(callback)
    return observer


def open_record(path: Path, args: Any, preset: PresetSpec | None, *, prepared: bool = False) -> ObservedRun:
    """Open the run folder of a script that has none of its own, and start this rank's heartbeat. Collective.

    `prepared`: this program has made the folder its own already. Raises AttestationFailed where each rank is alone.
    """
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != args.world_size:
        raise AttestationFailed(
            f"{started} ranks were started, and each of them trains alone: world_size is {args.world_size}",
            hint="make the process group before the Trainer, or start the script with `accelerate launch`",
        )
    folder, progress, writes = RunFolder(path), Progress(), args.process_index == 0
    if not prepared:
        if writes:
            folder.check_free()
        check_start(folder)
        if writes:
            folder.hold()
    progress.attempt_id, nodes = claim_folder(path, writes=writes, gather=gather_from_ranks)
    run = ObservedRun(folder=folder, progress=progress, rank=args.process_index, world_size=args.world_size)
    name, files = (None, {}) if preset is None else (preset.name, preset.texts())
    numbers = ("seed", "max_steps", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps")
    spec = {key: getattr(args, key, None) for key in numbers}  # a loop on accelerate does not show all
    if hasattr(args, "train_batch_size"):
        spec["global_batch_size"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    saves = Path(getattr(args, "output_dir", path)).absolute()
    facts = {"preset": name, "preset_files": files, "checkpoints_folder": str(saves), "seed": args.seed, "spec": spec}
    run.open(prepared=prepared, nodes=nodes, **facts)
    Watchdog(progress, ranks=folder.path / "ranks", rank=run.rank).start()
    return run
