"""Observe a training loop on accelerate alone, without a Trainer.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with observe(accelerator=accelerator, model=model, optimizer=optimizer, folder="runs/mine"):
        for batch in loader:
            ...  # forward, accelerator.backward(loss), accelerator.clip_grad_norm_, optimizer.step()

An optimizer step is a call of `optimizer.step` for which accelerate synchronises gradients. Batches of the prepared
loaders are counted as they are made, and belong to the step in which the model's forward sees their tensors. What the
loop does by itself (`loss.backward()`, batches of its own) is None in the rows.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.multiprocessing.reductions import StorageWeakRef

from toolkit.engines.live_engine import live_engine
from toolkit.errors import ToolkitError
from toolkit.observe.batches import (
    BatchFacts,
    counted_batches,
    iterate_loader,
    label_shift_of,
    named_tensors,
    tensor_facts,
)
from toolkit.observe.failure_report import report_failure
from toolkit.observe.observer import LINE_OF_A_LOOP, UNTIMED_STEPS, Observer, open_record, wrap_method
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.timer import StepTimer, time_waits_in_forward
from toolkit.observe.verify.verification import Verification
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.record import status

STAYS_IN_EVAL = "warning: from step {} on the model trains in eval mode, without dropout: `model.train()` ends it"
_LATE_BATCHES = 64  # that a loop may fetch before it trains on them


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopedTraining:
    """What a loop is verified against, and how it is recorded."""

    folder: Path
    world_size: int
    expected: ExpectedRun
    untimed_steps: int = UNTIMED_STEPS
    stop_after_steps: int | None = None
    prepared: bool = False  # the launcher has made the run folder this run's own


@dataclass(kw_only=True, slots=True, eq=False)
class _Batch:
    facts: BatchFacts
    storages: set[StorageWeakRef]  # of its tensors; a new one never equals one that is gone
    evaluated: bool = False  # a forward that is not trained on has seen it


class ObservedLoop:
    """Observes one loop until `close`, or the end of its `with` block. `observe_loop` makes it.

    `accelerator`, `model`, `model_wrapped`, `optimizer` and `args` are what the verification reads of a Trainer too.
    """

    current: ClassVar[ObservedLoop | None] = None  # the loop that is observed in this process
    opened: ClassVar[Counter[Path]] = Counter()
    """How often this process has observed a loop into each folder: each one after the first has a folder below it."""
    launched: ClassVar[Callable[[LoopedTraining], LoopedTraining] | None] = None
    """What `python -m toolkit.observe` makes of a loop's own wishes, where it runs the script."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, training: LoopedTraining) -> None:
        self.accelerator, self.model_wrapped, self.optimizer = accelerator, model, optimizer
        self.model = accelerator.unwrap_model(model, keep_torch_compile=False)
        self.training, self.step = training, 0
        self.args = SimpleNamespace(
            process_index=accelerator.process_index,
            world_size=accelerator.num_processes,
            device=accelerator.device,
            mixed_precision=accelerator.mixed_precision,
            fp16=accelerator.mixed_precision == "fp16",
            seed=torch.initial_seed(),
            learning_rate=optimizer.param_groups[0]["lr"],
            gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
            max_grad_norm=None,  # until the loop has clipped the gradients of the model
        )
        preset = training.expected.preset
        self.run = open_record(training.folder, self.args, preset, prepared=training.prepared)
        parts = ObserverParts(expected=replace(training.expected, own_optimizer=True, of_script=True))
        timer = StepTimer(
            self.run, parts, device=self.args.device, untimed_steps=training.untimed_steps, stops_if_diverged=False
        )
        timer.step_lines.stop_after_steps, timer.scales_loss = training.stop_after_steps, self.args.fp16
        strict = preset is not None or bool(training.expected.settings)
        self.observer = Observer(
            progress=self.run.progress,
            timer=timer,
            verification=Verification(self.run, parts, timer, trainer=self, strict=strict),
        )
        self.count = functools.partial(tensor_facts, label_shift=label_shift_of(self.model))
        self.batches: deque[_Batch] = deque(maxlen=_LATE_BATCHES)  # which no forward has trained on
        self.forwarded: list[BatchFacts] = []
        self.trains_in_mode: bool | None = None  # `model.training` in the loop's first forward
        self.modes: set[bool] = set()  # those of the forwards that may be trained on since the last backward
        self.between_steps, self.clock_restarted = True, False
        self.reduces_itself = live_engine(model).reduces_itself
        self.parameters = {id(p) for p in model.parameters() if p.requires_grad}
        hook = model.register_forward_pre_hook(self._on_forward, prepend=True, with_kwargs=True)
        self.observer.undo += [hook.remove, *time_waits_in_forward(model, timer)]
        self.observer.times_waits = True
        methods = ("backward", "clip_grad_norm_", "save_state", "end_training")
        observed = [(accelerator, name, getattr(self, f"_{name}")) for name in methods]
        observed.append((optimizer, "step", self._step))
        if self.reduces_itself:  # its backward takes the step too
            observed.append((model, "step", self._engine_step))
        self.observer.undo += [wrap_method(*each) for each in observed]
        ObservedLoop.current, DataLoaderShard.__iter__ = self, _iterate_observed
        atexit.register(self._left_open)
        self.observer.begin_training(self.step)

    # -- what passes in a step

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a prepared loader, note their facts, and time how long the loop waits for them."""
        batches, timer = counted_batches(loader, self.count), self.observer.timer
        if not self.step and self.model_wrapped.training:
            self.args.per_device_train_batch_size = getattr(loader.batch_sampler, "batch_size", None)
        while True:
            if self.between_steps:
                timer.restart_clock()
                self.clock_restarted = True
            if self.run.progress.phase != "evaluate":
                self.run.progress.phase = "data"
            timer.begin_data()
            counted = next(batches, None)
            timer.end_data()
            if counted is None:
                return
            batch, facts = counted
            if facts is not None:
                self.batches.append(_Batch(facts=facts, storages=_storages(batch)))
            yield batch

    def _on_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        progress = self.run.progress
        if self.trains_in_mode is None and torch.is_grad_enabled():
            self.trains_in_mode = module.training
        self.modes |= {module.training} if torch.is_grad_enabled() else set()
        seen = self._seen_batches((args, kwargs))
        if not torch.is_grad_enabled() or module.training != self.trains_in_mode:
            for batch in seen:
                batch.evaluated = True
            self._leave_step("evaluate")
            return
        self.observer.before_loss(module, kwargs)
        if progress.phase == "evaluate":
            progress.enter("train")
        if self.between_steps and not self.clock_restarted:
            self.observer.timer.restart_clock()
        self.between_steps = self.clock_restarted = False
        for batch in seen:
            self.batches.remove(batch)
            self.forwarded.append(batch.facts)
        if not (seen or self.step or self.forwarded):  # of a loader that is not prepared
            self.observer.timer.first_batches.append(self.count((), (args, kwargs)).sha256)
        progress.phase, progress.micro_steps = "forward", progress.micro_steps + 1

    def _seen_batches(self, value: Any) -> list[_Batch]:
        """The batches that a forward sees: by their storages, or else the only new one, copied by `.to()` or a cast."""
        storages = _storages(value)
        new = [batch for batch in self.batches if not batch.evaluated]
        return [batch for batch in self.batches if batch.storages & storages] or new * (len(new) == 1)

    def _leave_step(self, phase: str) -> None:
        if self.run.progress.phase != phase:
            self.run.progress.enter(phase)
        self.between_steps, self.clock_restarted = True, False

    def _backward(self, backward: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> None:
        if self.modes == {not self.trains_in_mode}:
            self.trains_in_mode = not self.trains_in_mode
            was_on = self.observer.verification.forwards.dropouts  # of the first step
            if self.run.writes and not self.trains_in_mode and True in was_on:
                was_on.clear()
                print(f"{STAYS_IN_EVAL.format(self.step + 1)}\n", end="", flush=True)
        self.modes.clear()
        self.observer.after_loss(loss)
        self.observer.verification.before_backward(loss, self.accelerator.gradient_accumulation_steps)
        self.observer.timer.add_loss(loss.detach() / self.accelerator.gradient_accumulation_steps)
        self._add_batches()
        backward(loss, **kwargs)
        self.observer.end_backward()
        if not self.accelerator.sync_gradients:
            self.observer.verification.end_accumulation_step()

    def _add_batches(self) -> None:
        for facts in self.forwarded:
            self.observer.timer.add_batch(facts)
        self.forwarded.clear()

    def _clip_grad_norm_(self, clip: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        clipped = [parameters] if torch.is_tensor(parameters) else list(parameters)
        norm = clip(clipped, max_norm, norm_type)
        if norm_type == 2 and {id(p) for p in clipped if p.requires_grad} == self.parameters:
            self.args.max_grad_norm = float(max_norm)
            self.observer.grad_norm(norm)
        return norm

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip as the loop does: the verification tries it on a gradient of its own."""
        return type(self.accelerator).clip_grad_norm_(self.accelerator, model.parameters(), self.args.max_grad_norm)

    def _engine_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.progress.record_memory("backward")
        self.observer.timer.before_optimizer_step()
        return step(*args, **kwargs)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.accelerator.sync_gradients:
            return step(*args, **kwargs)
        self.run.progress.phase = "step"
        self._add_batches()
        if self.reduces_itself:
            self.observer.verification.replicas.note_rates()
        else:
            self.observer.before_optimizer_step()
        result = step(*args, **kwargs)
        self.step += 1
        self.observer.end_step(self.step)
        self.run.progress.phase = "train"
        if self.step == self.training.stop_after_steps:
            self.close()
            raise SystemExit(0)
        return result

    def _save_state(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.observer.timer.flush(wait=True)  # no checkpoint without the rows of its steps
        self._leave_step("save")
        saved = save(*args, **kwargs)
        self.run.progress.enter("train")
        return saved

    def _end_training(self, end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.close()  # the process group ends with it
        return end(*args, **kwargs)

    # -- the end

    def close(self) -> None:
        """Complete the record, and leave the loop as it was. Collective."""
        if ObservedLoop.current is self:
            self.release()
            self.observer.timer.end_training()
            self.observer.verification.check_replicas(self.step)
            self.run.complete(untimed_steps=self.training.untimed_steps)

    def release(self) -> None:
        self.observer.leave()
        ObservedLoop.current, DataLoaderShard.__iter__ = None, iterate_loader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif ObservedLoop.current is self:
            self.release()
            if isinstance(error, SystemExit):
                self._write_failure(f"the script called sys.exit({error.code})")
            else:
                report_failure(error, self.run.progress)

    def _left_open(self) -> None:
        """At the end of the process, without `with` and `close`: other ranks may be gone."""
        if ObservedLoop.current is self:
            raised = getattr(sys, "last_value", None)
            hint = "the loop ended without `observer.close()`: use `with observe(...):`"
            self._write_failure(hint if raised is None else f"{type(raised).__name__}: {raised}")

    def _write_failure(self, message: str) -> None:
        if self.run.writes:
            print(f"error: {message}", file=sys.stderr, flush=True)
            self.run.folder.update_run(status=status.FAILED, exit_code=1, message=message)


def observe_loop(
    *,
    accelerator: Any,
    model: Any = None,
    optimizer: Any = None,
    folder: str | Path | None = None,
    require: PresetSpec | str | None = None,
    untimed_steps: int = UNTIMED_STEPS,
) -> ObservedLoop:
    """Observe a loop on accelerate from here on. Every rank must call it, after `accelerator.prepare`.

    The folder is by default `runs/` and the script's name; under `python -m toolkit.observe` it is always its own. With
    `require`, a run that is not what the preset specifies ends with AttestationFailed after its first optimizer step.
    Raises ToolkitError for objects that are not prepared, and for a folder that holds a finished or a running run.
    """
    for name, given in (("model", model), ("optimizer", optimizer)):
        if not getattr(given, "_is_accelerate_prepared", False):
            raise ToolkitError(
                f"observe(accelerator=..., {name}=...): this {name} is not one that the accelerator has prepared",
                hint="pass `model=` and `optimizer=` as `accelerator.prepare` returned them",
            )
    if ObservedLoop.current is not None:
        raise ToolkitError("a loop is observed already", hint="close its observer first: `observer.close()`")
    preset, ranks = load_preset(require) if isinstance(require, str) else require, accelerator.num_processes
    path = Path(folder or Path("runs") / (Path(sys.argv[0]).stem or "loop"))
    ObservedLoop.opened[path] += 1
    if (number := ObservedLoop.opened[path]) > 1:  # a fold of a cross validation
        path /= f"training-{number}"
    expected = ExpectedRun.of_preset(preset, ranks)
    training = LoopedTraining(folder=path, world_size=ranks, expected=expected, untimed_steps=untimed_steps)
    if ObservedLoop.launched is not None:
        training = ObservedLoop.launched(training)
    return ObservedLoop(accelerator, model, optimizer, training)


def warn_of_unobserved_loops(trains: Callable[[], bool], *, rank: int) -> None:
    """Print a line at the first backward of a loop on accelerate that nothing observes, where no Trainer `trains`."""
    backward = Accelerator.backward

    @functools.wraps(backward)
    def warned(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if not trains():
            Accelerator.backward = backward
            if ObservedLoop.current is None and rank == 0:
                line = f"warning: this loop on accelerate is not observed; {LINE_OF_A_LOOP}"
                print(line, file=sys.stderr, flush=True)
        return backward(accelerator, *args, **kwargs)

    Accelerator.backward = warned


def _storages(value: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(tensor.untyped_storage()) for _, tensor in named_tensors(value)}


def _iterate_observed(loader: Any) -> Iterator[Any]:
    """Stand for `DataLoaderShard.__iter__`: loaders may be prepared, or made by `skip_first_batches`, later."""
    loop = ObservedLoop.current
    yield from iterate_loader(loader) if loop is None else loop.iterate(loader)
