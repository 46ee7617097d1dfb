"""Observe any `transformers.Trainer`, whoever wrote its script.

    trainer = Trainer(...)
    observe(trainer, folder="runs/mine")
    trainer.train()

Methods of the instance are wrapped until `train()` returns, and the loaders of accelerate meanwhile; everything else
comes from callbacks. The script sees the Trainer, its class and its batches as it would see them alone. The folder then
has a row for each step and rank, and what was really in effect.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from transformers import TrainerCallback

from toolkit.engines.seams import OBSERVED_METHODS, check_methods
from toolkit.engines.tensors import innermost_optimizer
from toolkit.errors import AttestationFailed, ToolkitError
from toolkit.observe.batches import (
    BatchFacts,
    CountBatch,
    ObservedCollator,
    counted_batches,
    facts_of,
    iterate_loader,
    label_shift_of,
    named_tensors,
    take_facts,
    tensor_facts,
)
from toolkit.observe.checkpoint_saver import BackgroundSaver, CheckpointSaver
from toolkit.observe.failure_report import report_failure
from toolkit.observe.hang_detection import Watchdog
from toolkit.observe.observed_run import ObservedRun, claim_folder, gather_from_ranks
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.profiler import DATA_WAIT_EVENT
from toolkit.observe.progress import STEP_PHASES, Progress
from toolkit.observe.signals import StopOnSignal
from toolkit.observe.timer import StepTimer, time_waits_in_forward
from toolkit.observe.trackers import tell_peaks
from toolkit.observe.verify.expected import optimizer_class
from toolkit.observe.verify.verification import Verification
from toolkit.presets.spec import PresetSpec
from toolkit.record.attempts import check_start
from toolkit.record.folder import RunFolder

LINE_OF_A_LOOP = "a line of its own observes it: `with toolkit.observe(accelerator=..., model=..., optimizer=...):`"
UNTIMED_STEPS = 2  # compilation and the growth of the allocator


@dataclass(kw_only=True, slots=True)
class Observer:
    """What observes one Trainer, or one loop, on this rank: both report the events of a step to it, in this order.

    begin_training               weights are digested; the clock starts
      before_loss, after_loss    each micro-batch: the graph of the first loss is read; backward begins
      end_backward               each micro-batch: between two, `verification` reads the gradients that wait
      grad_norm                  gradients are clipped
      before_optimizer_step      gradients and learning rates are read
      end_step                   its row is written; after the first step, ranks read and verify what is in effect

    Only the first step, a save and the end have collectives for it, or wait for the device.
    """

    progress: Progress
    timer: StepTimer
    verification: Verification
    saver: CheckpointSaver | None = None
    """Makes checkpoints complete or absent; None leaves the Trainer's saves as they are."""
    stop_on_signal: StopOnSignal | None = None
    completes: Callable[[], None] | None = None
    """Completes the record when `train()` returns; None where the script does that itself."""
    count: CountBatch | None = None  # counts the batches of the Trainer's loaders; None where its collator does
    facts: dict[int, BatchFacts | None] = field(default_factory=dict)
    """Those of the batches of the step in progress, by the identity of each."""
    undo: list[Callable[[], None]] = field(default_factory=list)  # takes what observes off the Trainer and its model
    times_waits: bool = False  # true once the timer is notified when forward waits for other ranks

    def begin_training(self, step: int) -> None:
        self.timer.begin_training(step)
        self.verification.begin_training(step)

    def before_loss(self, model: Any, inputs: Any) -> None:
        self.verification.replicas.synced = getattr(model, "require_backward_grad_sync", True)
        if not self.times_waits:
            self.undo += time_waits_in_forward(model, self.timer)
            self.times_waits = True
        self.verification.before_loss(inputs)

    def after_loss(self, loss: Any) -> None:
        self.verification.after_loss(loss)
        self.progress.phase = "backward"
        self.timer.enter_backward()

    def end_backward(self) -> None:
        self.progress.phase = "step"
        self.progress.record_memory("backward")

    def grad_norm(self, norm: Any) -> None:
        self.timer.step.grad_norm = norm
        self.verification.norms.add_grad_norm(norm)

    def before_optimizer_step(self) -> None:
        self.timer.before_optimizer_step()
        self.verification.before_optimizer_step()

    def end_step(self, number: int, *, is_saved: bool = False) -> None:
        self.timer.end_step(number, is_saved=is_saved)
        self.verification.end_step(number)

    @property
    def background(self) -> BackgroundSaver | None:
        return None if self.saver is None else self.saver.background

    def add_callback(self, trainer: Any, callback: TrainerCallback) -> None:
        trainer.add_callback(callback)
        self.undo.append(functools.partial(trainer.remove_callback, callback))

    def facts_of(self, batch: Any) -> BatchFacts | None:
        """Return the facts of a batch that is trained on, counted now where its loader is not accelerate's."""
        if id(batch) in self.facts:
            return self.facts.pop(id(batch))
        on_host = all(tensor.device.type == "cpu" for _, tensor in named_tensors(batch))
        return facts_of(self.count, batch) if self.count is not None and on_host else None

    def leave(self) -> None:
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Stand for `DataLoaderShard.__iter__`: yield what it yields, and keep the facts of what is trained on."""
        if self.count is None or self.progress.phase != "data":
            yield from iterate_loader(loader)
            return
        for batch, facts in counted_batches(loader, self.count):
            self.facts[id(batch)] = facts
            yield batch


def wrap_method(owner: Any, name: str, observed: Callable[..., Any]) -> Callable[[], None]:
    """Let `observed` stand for a method of one object, and return what restores it; it is given the method first.

    The object keeps its class, whose methods may call each other by `super(self.__class__, self)`.
    """
    original, was_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return observed(original, *args, **kwargs)

    setattr(owner, name, MethodType(method, owner))  # torch's schedulers wrap a method again
    return lambda: setattr(owner, name, original) if was_own else delattr(owner, name)


class TrainerHooks:
    """Methods that stand for the Trainer's of the same name. They note what passes, and change none of it."""

    def __init__(self, trainer: Any, observer: Observer) -> None:
        self.trainer, self.observer = trainer, observer
        self.items: Any = None  # labels of the step in progress, over all ranks, where the Trainer counts them

    def install(self) -> None:
        """Stand for the methods until the observer leaves. Raises ToolkitError where the Trainer lacks one."""
        check_methods(self.trainer)
        for name in OBSERVED_METHODS:
            self.observer.undo.append(wrap_method(self.trainer, name, getattr(self, name)))
        self.observer.undo.append(wrap_method(self.trainer.accelerator, "backward", self.backward))

    def train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observer, iterate = self.observer, DataLoaderShard.__iter__
        DataLoaderShard.__iter__ = lambda loader: observer.iterate(loader)
        try:
            output = train(*args, **kwargs)
            if observer.completes is not None:
                observer.completes()
            return output
        except BaseException as error:
            if observer.background is not None:
                observer.background.finish_after_failure()
            if observer.completes is not None:
                report_failure(error, observer.progress)
            raise
        finally:
            DataLoaderShard.__iter__ = iterate
            if observer.completes is not None:
                observer.leave()

    def get_batch_samples(self, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.observer.progress.phase = "data"
        self.observer.facts.clear()
        self.observer.timer.begin_data()
        with torch.profiler.record_function(DATA_WAIT_EVENT):
            return get(*args, **kwargs)

    def _get_num_items_in_batch(self, count: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timer = self.observer.timer
        timer.end_data()
        timer.begin_wait()  # tokens are counted over all ranks
        self.items = count(*args, **kwargs)
        timer.end_wait()
        return self.items

    def backward(self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        steps = getattr(self.trainer, "current_gradient_accumulation_steps", 1)
        self.observer.verification.before_backward(loss, steps, items=self.items, **kwargs)
        return backward(loss, *args, **kwargs)

    def training_step(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        observer, progress = self.observer, self.observer.progress
        if observer.background is not None:
            observer.background.raise_if_failed()
        observer.timer.add_batch(take_facts(inputs) or observer.facts_of(inputs))
        progress.phase, progress.micro_steps = "forward", progress.micro_steps + 1
        loss: torch.Tensor = step(model, inputs, *args, **kwargs)
        observer.end_backward()
        observer.timer.add_loss(loss)
        return loss

    def compute_loss(self, compute: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return compute(model, *args, **kwargs)
        self.observer.before_loss(model, args[0] if args else kwargs.get("inputs"))
        loss = compute(model, *args, **kwargs)
        self.observer.after_loss(loss)
        return loss

    def _get_grad_norm(self, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        grad_norm = get(*args, **kwargs)
        self.observer.grad_norm(grad_norm)
        return grad_norm

    def _maybe_log_save_evaluate(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        act, stops = functools.partial(act, *args, **kwargs), self.observer.stop_on_signal
        act() if stops is None else stops.evaluate_and_save(self.trainer, act)

    def evaluation_loop(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        progress = self.observer.progress
        before = progress.phase
        progress.enter("evaluate")
        output = evaluate(*args, **kwargs)
        progress.enter("train" if before in STEP_PHASES else before)
        return output

    def prediction_step(self, predict: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        take_facts(inputs)
        return predict(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        observer, entered = self.observer, time.monotonic()
        observer.progress.enter("save")
        observer.timer.flush(wait=True)  # no checkpoint without the rows of its steps
        if observer.saver is None:
            save(*args, **kwargs)
        else:
            observer.saver.save(lambda: save(*args, **kwargs), entered=entered)
        observer.progress.enter("train")

    def _get_output_dir(self, get: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        staging = None if self.observer.saver is None else self.observer.saver.staging
        return str(get(*args, **kwargs) if staging is None else staging)

    def _finalize_training(self, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.observer.verification.check_replicas(self.trainer.state.global_step)
        if self.observer.saver is not None and self.observer.background is not None:
            self.observer.progress.enter("save")
            self.observer.saver.finish()
            self.observer.progress.enter("train")
        tell_peaks(self.trainer, self.observer.timer)
        if (stops := self.observer.stop_on_signal) is not None and stops.stopped:
            # the Trainer would load its best checkpoint, and with `--save_total_limit 1` remove the one just saved
            trainer = self.trainer
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            stops.raise_stopped()
        return finalize(*args, **kwargs)


class StepEvents(TrainerCallback):  # type: ignore[misc]
    """Reports to an observer what a Trainer tells its callbacks."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.observer.timer.scales_loss = bool(args.fp16)
        self.observer.begin_training(state.global_step)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.observer.verification.end_accumulation_step()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.observer.before_optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        timer, lines = self.observer.timer, self.observer.timer.step_lines
        lines.every_step = args.logging_strategy == "steps" and args.logging_steps == 1
        lines.max_steps = state.max_steps  # known once the Trainer has counted the batches
        self.observer.end_step(state.global_step, is_saved=control.should_save)
        if lines.stop_after_steps is not None and state.global_step >= timer.resumed_step + lines.stop_after_steps:
            control.should_training_stop = True  # whatever the script asked for; its schedule stays as it is

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self.observer.timer.print_log(state.global_step, logs or {})
        self.observer.timer.restart_clock()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.observer.timer.restart_clock()

    on_evaluate = on_save

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.observer.timer.end_training()


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
    verification: type[Verification] = Verification,
    prepared: bool = False,
) -> Observer:
    """Observe a Trainer from its next `train()` on, and return what observes it. Every rank must call it.

    What is observed is written to `folder`; a script that opens its own `record` gives that instead, completes it and
    reports its failures. With `require`, a run that is not what the preset specifies ends with AttestationFailed; so
    does one with a `record`, which also ends where a loss or a gradient norm is not finite. `complete_saves` makes the
    Trainer's checkpoints complete or absent; `stop_on_signal` saves one more when a signal ends the run. `parts` is
    what the script knows of its run. Raises ToolkitError for a folder that holds a finished or a running run.
    """
    args: Any = getattr(trainer, "args", None)
    if not hasattr(args, "world_size"):
        raise ToolkitError(f"observe() was given {type(trainer).__name__}, expected a Trainer", hint=LINE_OF_A_LOOP)
    if parts is None:
        parts = ObserverParts(expected=replace(ExpectedRun.of_preset(require, args.world_size), of_script=True))
    parts = replace(parts, expected=with_optimizer(parts.expected, trainer))
    run = record or open_record(Path(folder or args.output_dir), args, require, prepared=prepared)
    step_timer = timer(
        run, parts, device=args.device, untimed_steps=untimed_steps, stops_if_diverged=record is not None
    )
    strict = require is not None or record is not None or bool(parts.expected.settings)
    verifier = verification(run, parts, step_timer, trainer=trainer, strict=strict)
    saver = CheckpointSaver(trainer, parts, verifier, in_background=saves_in_background) if complete_saves else None
    observer = Observer(
        progress=run.progress,
        timer=step_timer,
        verification=verifier,
        saver=saver,
        stop_on_signal=stop_on_signal,
    )
    if record is None:
        observer.completes = lambda: run.complete(untimed_steps=untimed_steps, saves=saver.saves if saver else ())
    if parts.batch_facts is not None:
        trainer.data_collator = ObservedCollator(trainer.data_collator, parts.batch_facts)
    else:
        observer.count = functools.partial(tensor_facts, label_shift=label_shift_of(trainer.model))
    trainer.observer = observer
    observer.undo.append(lambda: delattr(trainer, "observer"))
    TrainerHooks(trainer, observer).install()
    # the timer waits for the device where a signal decides to save
    for callback in (*([] if stop_on_signal is None else [stop_on_signal]), StepEvents(observer)):
        observer.add_callback(trainer, callback)
    return observer


def with_optimizer(expected: ExpectedRun, trainer: Any) -> ExpectedRun:
    """Return what is expected, with the optimizer that somebody's script has made or makes itself."""
    if not expected.of_script:
        return expected
    made = trainer.optimizer is not None or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None
    makes = made or not type(trainer).create_optimizer.__module__.startswith("transformers.")
    # an earlier training has left its optimizer, which may be an engine's
    is_given = trainer.optimizer is not None and trainer.state.global_step == 0
    given = optimizer_class(innermost_optimizer(trainer.optimizer)) if is_given else None
    return replace(expected, own_optimizer=makes, made_optimizer=given)


def open_record(path: Path, args: Any, preset: PresetSpec | None, *, prepared: bool = False) -> ObservedRun:
    """Open the run folder of a script that has none of its own, and start this rank's heartbeat. Collective.

    `prepared`: this program has made the folder its own already. Raises AttestationFailed where each rank is alone.
    """
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != args.world_size:
        raise AttestationFailed(
            f"{started} ranks were started, and each of them trains alone: world_size is {args.world_size}",
            hint="start it with `accelerate launch`, on CPUs after `ACCELERATE_USE_CPU=true`, or make the process group"
            " before the Trainer",
        )
    folder, progress, writes = RunFolder(path), Progress(), args.process_index == 0
    folder.flag, folder.overwrite = "folder =", ""  # an argument of `observe`, not of a command
    if not prepared:
        if writes:
            folder.check_free()
        check_start(folder)
        if writes:
            folder.hold()
    progress.attempt_id, nodes = claim_folder(path, writes=writes, gather=gather_from_ranks)
    name, files = (None, {}) if preset is None else (preset.name, preset.texts())
    rank, size = args.process_index, args.world_size
    run = ObservedRun(folder=folder, progress=progress, rank=rank, world_size=size, preset=name)
    numbers = ("seed", "max_steps", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps")
    spec = {key: getattr(args, key, None) for key in numbers}  # a loop on accelerate does not show all
    if hasattr(args, "train_batch_size"):
        spec["global_batch_size"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    saves = Path(getattr(args, "output_dir", path)).absolute()
    facts = {"preset": name, "preset_files": files, "checkpoints_folder": str(saves), "seed": args.seed, "spec": spec}
    run.open(prepared=prepared, nodes=nodes, **facts)
    Watchdog(progress, ranks=folder.path / "ranks", rank=run.rank).start()
    return run
