"""Run somebody's script unchanged, and observe every `transformers.Trainer` that it trains.

A loop on accelerate alone has a line of its own (`toolkit.observe.accelerate_loop`), and joins this run's folder.

    ScriptRun(Words.read(["--require", "zero3", "dpo.py", "--its", "--own", "--arguments"])).run()

Methods of classes are wrapped, no instance is: a Trainer is observed while `train()` runs, each time into a record of
its own. The script has the `sys.argv`, `sys.path[0]` and working directory that Python would give it.
"""

import builtins
import contextlib
import functools
import inspect
import io
import os
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import is_initialized
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from toolkit.engines.fsdp2 import enable_fsdp_on_cpu
from toolkit.engines.zero_process import join_group_when_configured
from toolkit.errors import EXIT_DONE, EXIT_RUN_FAILED, RunFailed
from toolkit.observe.accelerate_loop import LoopedTraining, ObservedLoop, warn_of_unobserved_loops
from toolkit.observe.early_stopping import EarlyStopping
from toolkit.observe.failure_report import report_failure
from toolkit.observe.observed_run import copy_output_to
from toolkit.observe.observer import LINE_OF_A_LOOP, observe
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.progress import Progress
from toolkit.observe.signals import StopOnSignal
from toolkit.observe.words import Words
from toolkit.record import status
from toolkit.record.attempts import Reuse, check_start, start_attempt
from toolkit.record.folder import PREPARED_VARIABLE, RESUME_VARIABLE, WORLD_SIZE_VARIABLE, RunFolder, start_facts

_DESTROYED_GROUPS: list[Any] = []
RESUMES = "resume_from_checkpoint"


class ScriptRun:
    """The script in this process: one rank, or all of it."""

    def __init__(self, words: Words) -> None:
        self.words, self.folder, self.progress = words, RunFolder(words.output_dir), Progress()
        self.folder.flag, self.folder.overwrite = "--output-dir", "--overwrite"
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.trainers = self.trainings = 0
        self.watched: set[Any] = set()
        """Classes of Trainers whose `train` is observed."""
        self.training: set[int] = set()
        """The Trainers that train now, by identity."""
        self.writes = self.rank == 0
        self.stops: StopOnSignal | None = None
        if words.stop_on_signal:
            self.stops = StopOnSignal(self.progress, self.folder, rank=self.rank, world_size=self.ranks)

    def run(self) -> int:
        """Run the script, and return its exit code; 1 where nothing was observed. Raises ToolkitError before it."""
        write_whole_lines()
        self._open_folder()
        if self.stops is not None:
            self.stops.listen()
        self._form_group()
        if self.words.trial:
            confine_training_arguments(self.folder.path)
        self._watch_trainers()
        code, told = EXIT_DONE, None
        try:
            self._start()
        except SystemExit as leaving:
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr, flush=True)
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            told = f"the script called sys.exit({leaving.code})" if code else None
        except BaseException as error:
            return self._failed(error)
        if self.writes or told is not None:  # a launcher ends rank 0 before it can tell why another rank has left
            code = self._close_folder(code, told)
        return code

    def _form_group(self) -> None:
        make_cpu_group(self.ranks)

    def _open_folder(self) -> None:
        """Let rank 0 write run.json before there is a process group. Raises ToolkitError for a folder in use."""
        reuse: Reuse = "overwrite" if self.words.overwrite else "resume" if self.words.resume else "never"
        if PREPARED_VARIABLE not in os.environ:
            check_start(self.folder, reuse)
        self.progress.output_dir = self.folder.path
        if self.rank != 0 or PREPARED_VARIABLE in os.environ:
            return
        self.folder.check_free()
        start_attempt(self.folder, reuse)
        self.folder.hold()
        copy_output_to(self.folder.log)
        script = {"script": self.words.target, "world_size": self.ranks, "argv": self.words.shown()}
        self.folder.update_run(status=status.RUNNING, exit_code=None, plan=None, **start_facts(), **script)

    def _start(self) -> None:
        words = self.words
        sys.argv[:] = [words.target, *words.arguments]
        if words.is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(words.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(words.target).resolve().parent)
            keep_apart(Path(sys.path[0]))
            runpy.run_path(words.target, run_name="__main__")

    def _failed(self, error: BaseException) -> int:
        """Report what the script raised, unless its Trainer or its loop has."""
        if ObservedLoop.current is not None:
            ObservedLoop.current.release()
        if isinstance(error, KeyboardInterrupt) or not self.folder.failure_json.exists():
            return report_failure(error, self.progress)
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        return int((self.folder.read_run() or {}).get("exit_code") or EXIT_RUN_FAILED)

    def _close_folder(self, code: int, told: str | None) -> int:
        done, hint = (self.folder.read_run() or {}).get("status") == status.COMPLETED, None
        if not self.trainings and told is None:
            made = "no Trainer was made" if not self.trainers else "a Trainer was made, and train() was not called"
            told, code = f"{made}; nothing was observed", code or EXIT_RUN_FAILED
            alone = "a loop without accelerate is not observed: run it by itself, or put it on accelerate"
            hint = f"a loop on accelerate alone: {LINE_OF_A_LOOP}" if is_initialized() else alone
        if told is not None or not done:
            message = told or "the script ended while its Trainer trained"
            report_failure(RunFailed(message, hint=hint), self.progress)  # as the launcher and a comparison read it
            self.folder.update_run(status=status.FAILED, exit_code=code, message=message)
        return code

    # -- its Trainers

    def _watch_trainers(self) -> None:
        make = Trainer.__init__
        script = self

        @functools.wraps(make)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            given = kwargs.get("args", args[1] if len(args) > 1 else None)
            if script.words.trial and given is not None:  # the script may have changed them since
                confine(given, script.folder.path)
            make(trainer, *args, **kwargs)
            script.trainers += 1
            script._watch_class(next(each for each in type(trainer).__mro__ if "train" in vars(each)))

        Trainer.__init__ = init
        ObservedLoop.launched = self._join_loop
        warn_of_unobserved_loops(lambda: bool(self.training), rank=self.rank)

    def _watch_class(self, owner: Any) -> None:
        """Observe each training of a class; within one, `train` is the class's own."""
        train = owner.train
        if owner in self.watched:
            return
        self.watched.add(owner)

        @functools.wraps(train)
        def observed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if id(trainer) in self.training:
                return train(trainer, *args, **kwargs)
            self.training.add(id(trainer))
            try:
                return self._train(trainer, *args, **kwargs)
            finally:
                self.training.discard(id(trainer))

        owner.train = observed

    def _train(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        takes = inspect.signature(type(trainer).train)
        self._observe(trainer)
        if (RESUME_VARIABLE in os.environ or self.words.resume) and self.trainings == 1:
            args, kwargs = self._resumed(trainer, takes, args, kwargs)
        output = trainer.train(*args, **kwargs)
        if self.words.trial:  # what follows would save, evaluate, or train something else
            raise SystemExit(EXIT_DONE)
        return output

    def _resumed(self, trainer: Any, takes: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """Return the arguments of `train` with the checkpoint to resume from; warn where a restart would have none."""
        settings, names = trainer.args, takes.parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        cannot = "its `train` takes no `resume_from_checkpoint`" * (RESUMES not in names and not takes_any)
        cannot = cannot or "nothing is saved (`save_strategy`)" * (str(settings.save_strategy) == "SaveStrategy.NO")
        if (
            cannot := cannot or "no optimizer states are (`save_only_model`)" * settings.save_only_model
        ) and self.writes:
            print(f"warning: a restart of this script begins at step 0: {cannot}", flush=True)
        resumes = self.words.resume and Path(settings.output_dir).is_dir()
        newest = get_last_checkpoint(settings.output_dir) if resumes else None
        if checkpoint := os.environ.get(RESUME_VARIABLE) or newest:
            trainer.add_callback(AfterResume(self.folder, checkpoint))
            if RESUMES in names:
                bound = takes.bind_partial(trainer, *args, **kwargs)
                bound.arguments[RESUMES] = checkpoint
                return bound.args[1:], bound.kwargs
            if takes_any:
                return ((checkpoint, *args[1:]), kwargs) if args else (args, kwargs | {RESUMES: checkpoint})
        return args, kwargs

    def _observe(self, trainer: Any) -> None:
        path, first = self._next_folder()
        args, words = trainer.args, self.words
        observer = observe(
            trainer,
            path,
            require=words.require_preset,
            parts=ObserverParts(expected=self._expected(args.world_size)),
            untimed_steps=words.untimed_steps,
            complete_saves=words.complete_saves,
            stop_on_signal=self.stops,
            prepared=first,
        )
        observer.timer.step_lines.stop_after_steps = words.stop_after_steps
        within, minutes = words.stop_when_steps_within, words.stop_after_minutes
        if within is not None or minutes is not None:
            timer = observer.timer
            early = EarlyStopping(timer.run, timer, within=within, minutes=minutes, evaluates=False)
            observer.add_callback(trainer, early)
        if words.trial:
            observer.add_callback(trainer, StepsAlone())
        if self.stops is not None:
            self.stops.folder = RunFolder(path)
            self.stops.follow(observer.progress)

    def _next_folder(self) -> tuple[Path, bool]:
        self.trainings += 1
        first = self.trainings == 1
        return (self.folder.path if first else self.folder.path / f"training-{self.trainings}"), first

    def _expected(self, world_size: int) -> ExpectedRun:
        world_size = int(os.environ.get(WORLD_SIZE_VARIABLE, world_size))  # that `toolkit train` started
        expected = ExpectedRun.of_preset(self.words.require_preset, world_size)
        required, allowed = self.words.require_settings, self.words.allow
        return replace(expected, world_size=world_size, settings=required, allowed=allowed, of_script=True)

    def _join_loop(self, training: LoopedTraining) -> LoopedTraining:
        """Let a loop on accelerate join the run; what the script's own line requires counts where no option does."""
        path, first = self._next_folder()
        if RESUME_VARIABLE in os.environ and self.writes:
            print("warning: a restart of a loop on accelerate begins where the loop itself begins", flush=True)
        expected = self._expected(training.world_size)
        if expected.preset is None and not expected.settings:
            expected = training.expected
        stop, untimed = self.words.stop_after_steps, self.words.untimed_steps
        joined = replace(training, folder=path, prepared=first, expected=expected)
        return replace(joined, stop_after_steps=stop, untimed_steps=untimed)


def write_whole_lines() -> None:
    """Write a line and its end at once, as to a terminal: another rank or thread prints in between otherwise."""
    for stream in (sys.stdout, sys.stderr):
        # `toolkit train` starts ranks with PYTHONUNBUFFERED
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def keep_apart(folder: Path) -> None:
    """Let a script import the `toolkit` that lies beside it, and this package import itself."""
    beside, package = folder / "toolkit", Path(__file__).parents[1]
    if beside.resolve() == package.resolve() or not (beside.is_dir() or beside.with_suffix(".py").exists()):
        return

    def taken() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "toolkit"}

    plain, ours, lock, inside = builtins.__import__, taken(), threading.RLock(), list[str]()

    def import_apart(name: str, globals: Any = None, *how: Any, **named: Any) -> Any:
        is_ours = str((globals or {}).get("__file__", "")).startswith(f"{package}{os.sep}")
        if not is_ours or name.partition(".")[0] != "toolkit":
            return plain(name, globals, *how, **named)
        with lock:
            if inside:
                return plain(name, globals, *how, **named)
            theirs = taken()
            sys.modules.update(ours)
            inside.append(name)
            try:
                return plain(name, globals, *how, **named)
            finally:
                inside.clear()
                ours.update(taken())
                sys.modules.update(theirs)

    builtins.__import__ = import_apart


# -- a trial of a comparison: the script's first training alone, which leaves nothing outside of its folder


def confine_training_arguments(run_folder: Path) -> None:
    """Confine all `TrainingArguments` that are made from now on, before the script sees them; subclasses too."""
    make = TrainingArguments.__post_init__

    @functools.wraps(make)
    def post_init(args: Any) -> None:
        confine(args, run_folder)
        make(args)

    TrainingArguments.__post_init__ = post_init


def confine(args: Any, run_folder: Path) -> None:
    """Give training arguments the trial's folder, and switch off what reaches beyond it."""
    args.output_dir = str(run_folder.absolute() / "trainer_output")
    args.report_to, args.push_to_hub, args.eval_on_start = [], False, False


class StepsAlone(TrainerCallback):  # type: ignore[misc]
    """Keeps the Trainer from saving and evaluating; its arguments stay: callbacks of a script may require them."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_evaluate = False

    on_epoch_end = on_step_end


class AfterResume(TrainerCallback):  # type: ignore[misc]
    """Says after the first step where the training resumed, and what was lost: not before it is known."""

    def __init__(self, folder: RunFolder, checkpoint: str) -> None:
        self.folder, self.checkpoint = folder, checkpoint

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not (self.checkpoint and state.is_world_process_zero):
            return
        resumed, lost, restarts = state.global_step - 1, "", (self.folder.read_run() or {}).get("restarts", [])
        if restarts:
            lost_steps = restarts[-1]["resumed_from_step"] + restarts[-1]["lost_steps"] - resumed
            restarts[-1] |= {"resumed_from_step": resumed, "lost_steps": lost_steps}
            self.folder.update_run(restarts=restarts)
            lost = f" ({lost_steps} steps lost)"
        fails = "" if self.checkpoint.endswith(f"-{resumed}") else f"warning: {self.checkpoint} was not loaded: "
        print(f"{fails}resumed after step {resumed}{lost}", flush=True)
        self.checkpoint = ""


def make_cpu_group(ranks: int) -> None:
    """Let the ranks of a script form a group on CPUs, under FSDP2 too: accelerate makes none there by itself.

    It is made where the script makes it on GPUs, with its arguments, its first `Accelerator`, or by itself.
    """
    if torch.cuda.is_available() or ranks < 2:
        return
    from accelerate import PartialState

    enable_fsdp_on_cpu(for_any_script=True)
    join_group_when_configured()
    make, destroy = PartialState.__init__, dist.destroy_process_group

    @functools.wraps(make)
    def init(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        del cpu
        make(self, cpu=True, **kwargs)

    @functools.wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        """torch 2.13 holds the GIL while gloo's threads end, which may wait for it: they end with the process."""
        _DESTROYED_GROUPS.append(group or dist.group.WORLD)
        destroy(group)

    PartialState.__init__, dist.destroy_process_group = init, keep_and_destroy
