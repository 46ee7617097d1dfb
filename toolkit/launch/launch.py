"""A training run from its options to its final status: checks, the command, the launch, restarts.

    prepared = prepare_run(options, on_message=print)     # every check that needs no rank
    result = train(prepared, plan=None, on_message=print)

The failing rank writes failure.json itself; `toolkit.launch.process` works out the rest.
"""

import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.node import count_oom_kills
from toolkit.job.job import Job
from toolkit.launch.command import LaunchCommand, command_of
from toolkit.launch.nvme import NvmeDisk, check_nvme, swap_folder
from toolkit.launch.options import TrainOptions
from toolkit.launch.preflight import (
    check_libraries,
    check_output,
    check_process_count,
    check_run,
    device_of,
    reuse_folder,
)
from toolkit.launch.process import ProcessResult, RunResult, record_result, run_command
from toolkit.launch.resume import (
    TrainingRun,
    check_resume_settings,
    check_same_layout,
    checkpoint_to_resume,
    convert_checkpoint,
    converts,
    remove_converted,
)
from toolkit.launch.terminal import OutputFilter
from toolkit.observe.script_file import (
    bf16_switched_off,
    cannot_resume,
    check_script,
    check_script_preset,
    check_trl_on_cpu,
    script_name,
)
from toolkit.observe.words import read_setting
from toolkit.presets.preset import load_preset
from toolkit.record import status
from toolkit.record.attempts import Reuse, check_start, restart_record, start_attempt
from toolkit.record.checkpoints import latest_complete
from toolkit.record.folder import RunFolder, start_facts
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import drop_rows_after
from toolkit.record.timeline import ENDED, LAUNCH, RESTART, add_moment, read_goodput


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that passed every check that needs no torch, with the command that starts it."""

    options: TrainOptions
    run: TrainingRun
    nvme: NvmeDisk | None
    converted: Path | None  # the copy of the checkpoint that another preset or number of processes wrote
    command: LaunchCommand

    def as_row(self) -> dict[str, Any]:
        """Return what `toolkit train --dry-run --json` prints; the command has no secrets."""
        return {
            "preset": self.run.preset.name,
            "num_processes": self.run.num_processes,
            "output_dir": str(self.run.output_dir),
            "warnings": list(self.run.warnings),
            "command": self.command.shown,
        }


def prepare_run(options: TrainOptions, *, on_message: Callable[[str], None]) -> PreparedRun:
    """Check the options, convert a checkpoint if needed, and build the command. Raises ToolkitError for a problem."""
    preset = load_preset(options.preset)
    check_libraries(preset, runs_script=options.runs_script)
    processes = options.world_size(preset)
    gpus = None if options.gpu is None else processes
    run = TrainingRun(
        preset=preset,
        job=Job() if options.runs_script else Job.from_argv(options.training_arguments),
        num_processes=processes,
        device=device_of(on_cpu=options.on_cpu, ranks_per_gpu=options.ranks_per_gpu, gpus=gpus),
        is_here=options.gpu is None,
        starts=not options.dry_run,
        nvme_path=options.nvme_path,
    )
    if options.runs_script:
        return _prepare_script(options, run, on_message)
    run = check_run(run)
    check_output(run.job, run.preset.traits)
    nvme = check_nvme(run)
    checkpoint, converted = checkpoint_to_resume(run.job), None
    if checkpoint is not None:
        groups, batch = run.data_parallel_size, run.global_batch_size
        check_resume_settings(checkpoint, run.job, global_batch_size=batch, data_parallel_size=groups)
        is_converted = converts(checkpoint, run)
        if is_converted and options.dry_run:
            on_message(f"{checkpoint.path} would be converted for {preset.name} on {run.num_processes} processes first")
        elif is_converted:
            converted = convert_checkpoint(checkpoint, run, on_message=on_message)
    command = command_of(options, preset, nvme_path=None if nvme is None else nvme.path, resume_from=converted)
    return PreparedRun(options=options, run=run, nvme=nvme, converted=converted, command=command)


def _prepare_script(options: TrainOptions, run: TrainingRun, on_message: Callable[[str], None]) -> PreparedRun:
    preset = run.preset
    check_process_count(run)
    check_script_preset(preset)
    file = check_script(options.script, options.module)
    for option, words in {"--require": options.require, "--allow": options.allow}.items():
        for word in words:
            read_setting(option, word)
    if options.max_restarts and file is not None and (why := cannot_resume(file, options.training_arguments)):
        on_message(
            f"warning: a restart of this script begins at step 0: {why}\n"
            "  hint: let it save its state and load it, or leave `--max-restarts` out"
        )
    if options.on_cpu:
        check_trl_on_cpu(str(options.module), options.training_arguments)
    flag, wins = bf16_switched_off(options.training_arguments), preset.traits.launcher_decides_precision
    if flag is not None and wins and (precision := preset.mixed_precision) != "no":
        on_message(
            f"warning: `{flag}` has no effect: mixed precision is the preset's, {precision} under {preset.name!r}"
        )
    name = script_name(options.script, options.module)
    path = options.output_dir or _unused_folder(name)
    folder = RunFolder(path)
    folder.flag, folder.overwrite = "--output-dir", ""
    folder.check_free()
    check_start(folder, "resume" if options.resume else "never")
    folder.check_writable()
    run = replace(run, job=Job(output_dir=str(folder.path)))
    resume_from = _script_checkpoint(folder, run) if options.resume else None
    command = command_of(replace(options, output_dir=folder.path), preset, resume_from=resume_from)
    return PreparedRun(options=options, run=run, nvme=None, converted=None, command=command)


def _script_checkpoint(folder: RunFolder, run: TrainingRun) -> Path:
    ended = (folder.read_run() or {}).get("status") == status.COMPLETED or (folder.path / "training-2").exists()
    if ended or (checkpoint := latest_complete(folder.checkpoints)) is None:
        why = "its first training has ended" if ended else "no complete checkpoint is there"
        hint = f"leave `--resume` out, and name another folder: `{folder.flag} DIR`"
        raise ToolkitError(f"the run in {folder.path} cannot be resumed: {why}", hint=hint)
    check_same_layout(checkpoint, run)
    return checkpoint.path


def _unused_folder(name: str) -> Path:
    for number in itertools.count(1):
        folder = RunFolder(Path("runs") / (name if number == 1 else f"{name}-{number}"))
        with contextlib.suppress(ToolkitError):
            folder.check_free()
            check_start(folder)
            break
    return folder.path


def train(prepared: PreparedRun, *, plan: dict[str, Any] | None, on_message: Callable[[str], None]) -> RunResult:
    """Print the command and run it. `plan` is recorded in run.json."""
    on_message(prepared.command.shown)
    try:
        return run_training(
            prepared.command,
            options=prepared.options,
            output_dir=prepared.run.output_dir,
            nvme=prepared.nvme,
            plan=plan,
            on_line=on_message,
            reuse="resume" if prepared.options.resume else reuse_folder(prepared.run.job),
            resumes=prepared.run.job.resumes,
        )
    finally:
        if prepared.converted is not None:  # the next resume starts from a checkpoint of the run again
            remove_converted(prepared.run.output_dir)


def run_training(
    command: LaunchCommand,
    *,
    options: TrainOptions,
    output_dir: Path,
    on_line: Callable[[str], None],
    nvme: NvmeDisk | None = None,
    plan: dict[str, Any] | None = None,
    reuse: Reuse = "never",
    resumes: bool = False,
) -> RunResult:
    """Train in `output_dir`, with restarts; `resumes` if a checkpoint is named. Raises ToolkitError for the folder."""
    folder = RunFolder(output_dir)
    with contextlib.ExitStack() as at_the_end:
        if (lock := folder.hold()) is not None:
            at_the_end.callback(os.close, lock)
        started, restarts = time.monotonic(), Restarts(folder, options.max_restarts)
        attempt = command
        start_attempt(folder, reuse)
        add_moment(folder.timeline, LAUNCH)
        folder.update_run(
            status=status.RUNNING,
            exit_code=None,
            launcher_pid=os.getpid(),
            **start_facts(),
            preset=command.preset.name,
            preset_files=command.preset.texts(),
            world_size=command.num_processes,
            training_arguments=command.training_argv,
            plan=plan,
            command=command.shown,
            **({} if nvme is None else {"nvme": nvme.facts()}),
            **({} if command.resume_command is None else {"resume_command": command.resume_command}),
        )
        while True:
            left = options.timeout_minutes and options.timeout_minutes * 60 - (time.monotonic() - started)
            result, process_result = _run_attempt(
                folder, attempt, on_line, lock, timeout_seconds=left, stop_minutes=options.stop_minutes
            )
            if (restart := restarts.prepare_next(result, process_result)) is None:
                break
            on_line(restart)
            # A checkpoint that the job names counts until the run has one of its own.
            starts_over = resumes and latest_complete(folder.path) is None
            attempt = command.again(resumes=not starts_over, checkpoint=restarts.checkpoint)
            folder.update_run(status=status.RUNNING, exit_code=None, launcher_pid=os.getpid(), command=attempt.shown)
        add_moment(folder.timeline, ENDED)
        goodput = None if result.status == status.COMPLETED else read_goodput(folder)  # otherwise rank 0 has printed it
        if goodput is not None:
            with contextlib.suppress(OSError):  # a full disk has been reported
                folder.update_run(goodput=goodput.model_dump())
            on_line(goodput.describe())
        return result


def _run_attempt(
    folder: RunFolder,
    command: LaunchCommand,
    on_line: Callable[[str], None],
    lock: int | None,
    *,
    timeout_seconds: float | None,
    stop_minutes: float,
) -> tuple[RunResult, ProcessResult]:
    kills_before = count_oom_kills()
    log_start = folder.log.stat().st_size if folder.log.exists() else 0

    shown = OutputFilter(on_line)

    def relay(line: str) -> None:
        if not folder.failure_json.exists():  # the launcher's own traceback follows
            shown(line)

    process_result = run_command(
        command,
        folder.log,
        on_line=relay,
        timeout_seconds=timeout_seconds,
        ask_to_stop=lambda: stop_ranks(folder, on_line) if stop_minutes else False,
        stop_seconds=stop_minutes * 60,
        inherit=[] if lock is None else [lock],
    )
    shown.summarise(folder.log)
    if command.nvme_path is not None:  # killed ranks leave their swap files behind
        shutil.rmtree(swap_folder(command.nvme_path, command.run_id), ignore_errors=True)
    oom_killed = count_oom_kills() > kills_before
    return record_result(folder, process_result, oom_killed=oom_killed, log_start=log_start), process_result


def stop_ranks(folder: RunFolder, on_message: Callable[[str], None]) -> bool:
    """Send SIGTERM to each rank itself: torch's agent would kill it in 30 s. False where no rank is alive."""
    heartbeats = [found for found in read_heartbeats(folder.path / "ranks") if found.process is not None]
    for heartbeat in heartbeats:
        with contextlib.suppress(OSError):
            os.kill(heartbeat.pid, signal.SIGTERM)
    if heartbeats:
        on_message("stopping: every rank finishes its step and saves; a second signal ends the run at once")
    return bool(heartbeats)


@dataclass(slots=True)
class Restarts:
    """The restarts of one run, as `run.json` records them."""

    folder: RunFolder
    max_restarts: int
    done: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None  # what the next attempt resumes from

    def prepare_next(self, result: RunResult, process_result: ProcessResult) -> str | None:
        """Prepare the folder for a restart, and return the lines to print; None for a run without one."""
        later = (self.folder.path / "training-2").exists()  # no checkpoint brings a script there
        if later or len(self.done) >= self.max_restarts or not can_restart(result, process_result):
            return None
        failure, run = result.failure or {}, self.folder.read_run() or {}
        if self.done:  # with the step at which a script really resumed
            self.done[-1] = run.get("restarts", self.done)[-1]
        checkpoint = latest_complete(self.folder.checkpoints)
        resumed, self.checkpoint = (checkpoint.step, checkpoint.path) if checkpoint else (0, None)
        record = restart_record(
            self.folder, ended=result.status, failure=failure, world_size=run.get("world_size"), resumed_step=resumed
        )
        self.done.append(record)
        for path in self.folder.path.glob("ranks/rank*.jsonl"):
            drop_rows_after(path, resumed)
        self.folder.failure_json.unlink(missing_ok=True)
        self.folder.remove_heartbeats()
        self.folder.update_run(restarts=self.done)
        add_moment(self.folder.timeline, RESTART, **{name: record[name] for name in ("lost_steps", "lost_seconds")})
        lost = f" ({record['lost_steps']} steps lost)" * ("resume_command" not in run)  # a script has yet to show it
        return (
            f"{record['status']}: {record['message']}\n"
            f"restart {len(self.done)} of {self.max_restarts}, from step {resumed}{lost}"
        )


def can_restart(result: RunResult, process_result: ProcessResult) -> bool:
    """Return True for a fault that a restart may fix: a killed or hung rank, or host memory; not a fault of the job."""
    if process_result.interrupted or process_result.timed_out:
        return False
    killed = "seen_by_peer" in (result.failure or {})
    return killed or result.status in (status.TIMED_OUT, status.HOST_OUT_OF_MEMORY)
