"""`toolkit rehearse`: check the world and the job, start one process that is rank r of N, and read its results.

    rehearsal = plan_rehearsal(load_preset("zero3"), world_size=64, rank=0, training_argv=[...], cpu=True)
    result, run = rehearse_once(rehearsal, on_line=print)

This module is light: torch is imported by the process that it starts, `python -m toolkit.rehearse`. Nothing of a
rehearsal is a result of training: its collectives move nothing, so losses mean nothing and no speed includes them. Its
run.json has `rehearsal`, by which every reader of run folders recognizes it.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.secrets import hide_words, separate_secrets
from toolkit.hardware.node import count_oom_kills
from toolkit.job.argument_values import Range, check_range
from toolkit.job.job import Job
from toolkit.launch.command import ProcessCommand, new_run_id, process_environment
from toolkit.launch.preflight import WEIGHT_SUFFIXES, check_dataset, check_required
from toolkit.launch.process import RunResult, record_result, run_command
from toolkit.models.read_model import config_path
from toolkit.observe.script_file import check_script, check_script_preset
from toolkit.presets.compatibility import Purpose
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_arguments, check_supported
from toolkit.record import status
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, read_json, start_facts
from toolkit.units import MIB, gib, seconds

DEFAULT_STEPS = 3
LARGEST_WORLD_SIZE = 2**17  # more ranks than any GPU cluster has
# Nothing of a rehearsal is worth saving, evaluating or reporting.
FORCED_ARGUMENTS = {"save_model": "false", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
# A value of `--dataset`: rows of exactly `max_seq_length` tokens, the most that a batch can hold.
SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """One rank of a world whose other ranks have no process."""

    world_size: int
    rank: int
    fake_tensors: bool = False  # shapes without memory: peaks by part instead of readings of real tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A process to start: the rank it stands for, and its training arguments."""

    preset: PresetSpec
    rehearsed: RehearsedRank
    training_argv: list[str]
    cpu: bool
    script: str | None = None  # somebody's, or a module's name, for `training_argv`; None for our own
    is_module: bool = False
    steps: int = DEFAULT_STEPS
    output_dir: Path | None = None  # the run folder that is kept


def check_rehearsal(preset: PresetSpec, *, world_size: int, rank: int, purpose: Purpose = "rehearse") -> None:
    """Raise ToolkitError for a world size that the preset does not support, a rank outside it, or no rehearsal."""
    check_range("--num-processes", world_size, Range(lowest=1, highest=LARGEST_WORLD_SIZE))
    check_supported(preset, world_size=world_size, purpose=purpose)
    if not 0 <= rank < world_size:
        what = f"--rank is {rank}, and a world of {world_size} has ranks 0 to {world_size - 1}"
        raise ToolkitError(what, hint="`--rank 0`")


def plan_rehearsal(
    preset: PresetSpec,
    *,
    world_size: int,
    rank: int,
    training_argv: Sequence[str],
    cpu: bool,
    fake_tensors: bool = False,
) -> Rehearsal:
    """Check the job without torch, and add the training arguments that a rehearsal decides.

    Raises ToolkitError for the first thing that is invalid, and for what cannot be rehearsed.
    """
    check_rehearsal(preset, world_size=world_size, rank=rank)
    job = Job.from_argv(training_argv)
    _check_job(job, preset, world_size=world_size, on_cpu=cpu, purpose="trace" if fake_tensors else "rehearse")
    defaults = {"dataset": SYNTHETIC, "max_steps": str(DEFAULT_STEPS)}
    if fake_tensors and not {"bf16", "fp16"} & set(job.given) and preset.mixed_precision != "no":
        defaults[preset.mixed_precision] = "true"  # traced as on a GPU, not in a CPU's fp32
    added = {name: value for name, value in defaults.items() if name not in job.given} | FORCED_ARGUMENTS
    return Rehearsal(
        preset=preset,
        rehearsed=RehearsedRank(world_size=world_size, rank=rank, fake_tensors=fake_tensors),
        training_argv=[*training_argv, *(word for name, value in added.items() for word in (f"--{name}", value))],
        cpu=cpu or fake_tensors,
        output_dir=None if job.output_dir is None else Path(job.output_dir),
    )


def plan_script_rehearsal(
    preset: PresetSpec,
    *,
    world_size: int,
    rank: int = 0,
    script: str | None = None,
    module: str | None = None,
    arguments: Sequence[str] = (),
    cpu: bool,
    fake_tensors: bool = False,
    steps: int = DEFAULT_STEPS,
    output_dir: Path | None = None,
) -> Rehearsal:
    """Check what can be known of somebody's script. Raises ToolkitError for the first thing that is invalid."""
    check_script_preset(preset)
    check_rehearsal(preset, world_size=world_size, rank=rank, purpose="trace" if fake_tensors else "rehearse")
    check_script(script, module)
    return Rehearsal(
        preset=preset,
        rehearsed=RehearsedRank(world_size=world_size, rank=rank, fake_tensors=fake_tensors),
        training_argv=list(arguments),
        cpu=cpu or fake_tensors,
        script=script or module,
        is_module=script is None,
        steps=steps,
        output_dir=output_dir,
    )


def _check_job(job: Job, preset: PresetSpec, *, world_size: int, on_cpu: bool, purpose: Purpose) -> None:
    check_required(job, ("model_name_or_path",))
    if job.resumes:
        raise ToolkitError("--resume_from_checkpoint: a rehearsal trains nothing to resume", hint="leave it out")
    if job.load_best_model_at_end:
        raise ToolkitError("--load_best_model_at_end: a rehearsal saves and evaluates nothing", hint="leave it out")
    check_arguments(job, preset, num_processes=world_size, on_cpu=on_cpu, purpose=purpose)
    model = str(job.model_name_or_path)
    if read_json(path := config_path(model, known=False)) is None:
        raise ToolkitError(f"{path} is not a JSON object", hint="download the model's config.json again")
    if job.load_in_4bit and not has_local_weights(model):
        what = "--load_in_4bit is rehearsed with the model's own weights, and there are none here to quantize"
        hint = "name a local folder with weights; `toolkit plan --load-in-4bit` needs config.json alone"
        raise ToolkitError(what, hint=hint)
    if job.dataset in ((), (SYNTHETIC,)):
        return
    if purpose == "trace":
        what = "--dataset is not traced: fake tensors have shapes and no values"
        raise ToolkitError(what, hint="leave --dataset out, or leave --fake-tensors out")
    check_dataset(job)


def has_local_weights(model: str) -> bool:
    """Return True for a local folder with weights. All else is rehearsed with random ones: memory is the same."""
    folder = Path(model)
    return folder.is_dir() and any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())


def _command(rehearsal: Rehearsal) -> ProcessCommand:
    training_argv, secrets = separate_secrets(rehearsal.training_argv)
    run_id = new_run_id()
    rehearsed = rehearsal.rehearsed
    world = ["--world-size", str(rehearsed.world_size), "--rank", str(rehearsed.rank)]
    world += ["--fake-tensors"] if rehearsed.fake_tensors else []
    if rehearsal.script is not None:
        world += ["--module" if rehearsal.is_module else "--script", rehearsal.script]
        world += ["--output-dir", str(rehearsal.output_dir), "--steps", str(rehearsal.steps)]
    process = [sys.executable, "-m", "toolkit.rehearse", "--preset", str(rehearsal.preset.accelerate_config_path)]
    shown = ["toolkit", "rehearse", "--preset", rehearsal.preset.name]
    return ProcessCommand(
        argv=[*process, *world, "--", *training_argv],
        environment=process_environment(cpu=rehearsal.cpu, run_id=run_id) | secrets,
        shown=shlex.join([*shown, *world, "--", *training_argv]),
        run_id=run_id,
    )


def _run(rehearsal: Rehearsal, folder: RunFolder, on_line: Callable[[str], None]) -> RunResult:
    lock = folder.hold()
    try:
        start_attempt(folder, "resume_if_possible")  # an unfinished rehearsal is repeated
        command = _command(rehearsal)
        folder.update_run(
            **{"status": status.RUNNING, "exit_code": None, "launcher_pid": os.getpid(), **start_facts()},
            preset=rehearsal.preset.name,
            preset_files=rehearsal.preset.texts(),
            world_size=rehearsal.rehearsed.world_size,
            rehearsal=asdict(rehearsal.rehearsed),
            training_arguments=hide_words(rehearsal.training_argv),
            plan=None,
            command=command.shown,
        )
        kills_before = count_oom_kills()
        outcome = run_command(command, folder.log, on_line=on_line, inherit=[] if lock is None else [lock])
        return record_result(folder, outcome, oom_killed=count_oom_kills() > kills_before)
    finally:
        if lock is not None:
            os.close(lock)


def rehearse_once(rehearsal: Rehearsal, *, on_line: Callable[[str], None]) -> tuple[RunResult, dict[str, Any]]:
    """Rehearse, and return run.json too; in a temporary folder unless `--output_dir` names one."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        if rehearsal.output_dir is None:
            words = [] if rehearsal.script else ["--output_dir", temporary]  # our own script has it as an argument
            words = [*rehearsal.training_argv, *words]
            rehearsal = replace(rehearsal, output_dir=Path(temporary), training_argv=words)
        assert rehearsal.output_dir is not None
        result = _run(rehearsal, RunFolder(rehearsal.output_dir), on_line)
        return result, result.folder.read_run() or {}


def refuse_rehearsals(folders: Sequence[Path]) -> None:
    """Raise ToolkitError if one of the run folders holds a rehearsal, where results of training are needed."""
    for folder in folders:
        rehearsed = (RunFolder(folder).read_run() or {}).get("rehearsal")
        if rehearsed:
            rank = f"rank {rehearsed['rank']} of {rehearsed['world_size']}"
            what = f"{folder} is a rehearsal ({rank}): it has no speed and no loss"
            raise ToolkitError(what, hint="`toolkit train` or `toolkit compare` make runs")


def result_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `toolkit rehearse --json` prints, from a finished rehearsal's run.json."""
    names = ("preset", "training_arguments", "versions", "hardware", "git_commit", "measurement_version")
    return {"device": _device(run), **run["rehearsal"], **{name: run[name] for name in names}}


def result_lines(run: Mapping[str, Any]) -> list[str]:
    """Return what `toolkit rehearse` prints, from a finished rehearsal's run.json."""
    facts, spec, device = run["rehearsal"], run.get("spec"), _device(run)
    weights = "random weights" if facts["random_weights"] else "the model's weights"
    batch = facts.get("batch")
    if spec is not None:
        batch = f"{spec['per_device_train_batch_size']} rows of up to {spec['data']['max_seq_length']:,} tokens"
    sizes = {part: int(facts[f"{part}_bytes"]) for part in ("parameter", "gradient", "optimizer")}
    sizes["total"] = sum(sizes.values())
    return [
        f"rank {facts['rank']} of {facts['world_size']} under {run['preset']}, on this node's {device}:"
        f" {facts['num_trainable_params']:,} of {facts['num_params']:,} parameters trained, {weights}, {batch}",
        "model states of this rank, read back from the live objects in the first step:",
        *(f"  {part:<10} {size:>18,} bytes  {gib(size):>10}" for part, size in sizes.items()),
        *(f"  and {name}: {size:,} bytes, {gib(size)}" for name, size in facts.get("other_model_bytes", {}).items()),
        *(_traced_lines(facts) if facts["fake_tensors"] else _measured_lines(facts, device)),
        f"not measured by a rehearsal: {'; '.join(facts['not_measured'])}",
    ]


def _device(run: Mapping[str, Any]) -> str:
    return str((run.get("spec") or run["rehearsal"])["device"])


def _traced_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "peak of each phase on fake tensors:"
    for phase, peak in facts["peaks"].items():
        parts = ", ".join(f"{part} {gib(size)}" for part, size in peak["parts"].items() if size >= MIB)
        yield f"  {phase:<10} {gib(peak['total_bytes']):>10}{': ' * bool(parts)}{parts}"
    if facts.get("made_up"):
        yield "made up, where code reads a value that follows from weights or other ranks:"
        yield from (f"  {what}" + (f", {times} times" if times > 1 else "") for what, times in facts["made_up"].items())


def _measured_lines(facts: Mapping[str, Any], device: str) -> Iterator[str]:
    if device != "cuda":
        host = gib(facts["peak_host_bytes"])
        yield f"peak host memory of this process: {host} (on a CPU, libraries included)"
        return
    yield f"peak of {facts['steps']} steps by the allocator:"
    for phase, peaks in facts["phase_peaks"].items():
        allocated, reserved = peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]
        yield f"  {phase:<10} {gib(allocated):>10} allocated, {gib(reserved):>10} reserved"
    yield f"compute of a step, without communication: {seconds(facts['compute_step_seconds'])}"
