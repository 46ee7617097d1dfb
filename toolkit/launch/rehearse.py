"""`toolkit rehearse`: check the world and the job, start one process that is rank r of N, and say what it held.

rehearsal = plan_rehearsal(load_preset("zero3"), world_size=64, rank=0, training_argv=[...], cpu=True)
result = run_rehearsal(rehearsal, output_dir=Path("out"), on_line=print)
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launch.command import RUN_ID_VARIABLE, LaunchCommand
from toolkit.launch.conclude import RunResult, conclude
from toolkit.launch.memory import host_memory_kills
from toolkit.launch.preflight import (
    check_dataset,
    check_hub_model,
    check_positive,
    check_required,
    local_folder,
)
from toolkit.launch.process import run_command
from toolkit.launch.rehearsable import check_rehearsal, check_traced
from toolkit.presets import Preset
from toolkit.runs import status
from toolkit.runs.argv import flag, read_arguments, resumes
from toolkit.runs.folder import RunFolder, read_json, start_facts
from toolkit.runs.rehearsals import (
    DEFAULT_STEPS,
    FAKE_TENSORS_VARIABLE,
    FORCED_ARGUMENTS,
    RANK_VARIABLE,
    SYNTHETIC,
)
from toolkit.runs.switches import check_switches


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """One process to start: which rank of which world, and its training arguments."""

    preset: Preset
    world_size: int
    rank: int
    training_argv: list[str]
    cpu: bool
    fake_tensors: bool = False


def plan_rehearsal(
    preset: Preset,
    *,
    world_size: int,
    rank: int,
    training_argv: Sequence[str],
    cpu: bool,
    fake_tensors: bool = False,
) -> Rehearsal:
    """Every check that needs no torch, and the training arguments with what a rehearsal decides.

    Raises ToolkitError for the first thing that is wrong, and for what cannot be rehearsed.
    """
    check_rehearsal(preset, world_size=world_size, rank=rank)
    if fake_tensors:
        check_traced(preset)
    arguments = read_arguments(training_argv)
    check_required(arguments, ("model_name_or_path",))
    check_positive(arguments)
    _check_told(arguments)
    check_switches(arguments, preset, num_processes=world_size, on_cpu=cpu)
    check_configuration(str(arguments["model_name_or_path"]))
    if "dataset" in arguments and arguments["dataset"] != SYNTHETIC:
        check_dataset(str(arguments["dataset"]))
    defaults = {"dataset": SYNTHETIC, "max_steps": str(DEFAULT_STEPS)}
    if fake_tensors:
        _check_traced_job(arguments)
        defaults |= _gpu_precision(preset, arguments)
    added = {name: value for name, value in defaults.items() if name not in arguments} | FORCED_ARGUMENTS
    words = [word for name, value in added.items() for word in (f"--{name}", value)]
    return Rehearsal(
        preset=preset,
        world_size=world_size,
        rank=rank,
        training_argv=[*training_argv, *words],
        cpu=cpu or fake_tensors,
        fake_tensors=fake_tensors,
    )


def _gpu_precision(preset: Preset, arguments: dict[str, Any]) -> dict[str, str]:
    """Traced as on a GPU; a CPU would compute in fp32."""
    said = "bf16" in arguments or "fp16" in arguments or preset.mixed_precision == "no"
    return {} if said else {preset.mixed_precision: "true"}


def _check_traced_job(arguments: dict[str, Any]) -> None:
    for name in ("dataset", "load_in_4bit", "torch_compile", "packing", "activation_checkpointing_offload"):
        if flag(arguments.get(name, False)) or (name == "dataset" and arguments.get(name, SYNTHETIC) != SYNTHETIC):
            raise ToolkitError(
                f"--{name} is not traced: fake tensors have shapes and no values",
                hint=f"leave --{name} out, or leave --fake-tensors out",
            )


def _check_told(arguments: dict[str, Any]) -> None:
    """Refuse what a process alone cannot do."""
    if resumes(arguments):
        raise ToolkitError("--resume_from_checkpoint: a rehearsal trains nothing that could go on", hint="leave it out")
    if arguments.get("ddp_comm_hook") is not None:
        raise ToolkitError(
            "--ddp_comm_hook cannot be rehearsed: a hook reads what the other ranks send", hint="leave it out"
        )
    if flag(arguments.get("load_best_model_at_end", False)):
        raise ToolkitError("--load_best_model_at_end: a rehearsal saves and evaluates nothing", hint="leave it out")


def check_configuration(name: str) -> None:
    """A configuration is enough: a folder with config.json, the file itself, or a hub id."""
    folder = local_folder(name)
    path = folder / "config.json" if folder.is_dir() else folder
    if path.suffix == ".json" and path.exists():
        if read_json(path) is None:
            raise ToolkitError(f"{path} is not a JSON object", hint="download the model's config.json again")
    elif folder.is_dir():
        raise ToolkitError(f"model folder {name} has no config.json", hint="name a folder that has one, or the file")
    elif folder.exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise ToolkitError(
            f"model {name!r} is neither a folder, a config.json nor a hub id",
            hint="a hub id looks like `owner/name`; a file must exist",
        )
    else:
        check_hub_model(name)


def rehearsal_command(rehearsal: Rehearsal) -> LaunchCommand:
    """The training script as one process."""
    run_id = uuid.uuid4().hex
    environment = {
        RUN_ID_VARIABLE: run_id,
        "TOOLKIT_PRESET": str(rehearsal.preset.accelerate_config_path),
        "TOOLKIT_WORLD_SIZE": str(rehearsal.world_size),
        RANK_VARIABLE: str(rehearsal.rank),
        "TOOLKIT_RUN_PREPARED": "1",
        "PYTHONUNBUFFERED": "1",
        **({FAKE_TENSORS_VARIABLE: "1"} if rehearsal.fake_tensors else {}),
        **({"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if rehearsal.cpu else {}),
    }
    argv = [sys.executable, "-m", "toolkit.train", *rehearsal.training_argv]
    words = ["toolkit", "rehearse", "--preset", rehearsal.preset.name, "--world-size", str(rehearsal.world_size)]
    shown = shlex.join([*words, "--rank", str(rehearsal.rank), "--", *rehearsal.training_argv])
    return LaunchCommand(argv=argv, environment=environment, shown=shown, run_id=run_id)


def run_rehearsal(rehearsal: Rehearsal, *, output_dir: Path, on_line: Callable[[str], None]) -> RunResult:
    """Rehearse in `output_dir`, which must hold no finished run. What it held is in run.json, under `rehearsal`."""
    folder = RunFolder(output_dir)
    lock = folder.hold()
    try:
        folder.prepare()
        command = rehearsal_command(rehearsal)
        folder.update_run(**_planned(rehearsal, command))
        kills_before = host_memory_kills()
        outcome = run_command(command, folder.log, on_line=on_line, inherit=[] if lock is None else [lock])
        return conclude(folder, outcome, killed_for_memory=host_memory_kills() > kills_before)
    finally:
        if lock is not None:
            os.close(lock)


def rehearse_once(rehearsal: Rehearsal, *, on_line: Callable[[str], None]) -> tuple[RunResult, dict[str, Any]]:
    """Rehearse, and give run.json; in a folder that is gone afterwards unless `--output_dir` names one."""
    named = read_arguments(rehearsal.training_argv).get("output_dir")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = Path(temporary if named is None else str(named))
        if named is None:
            rehearsal = replace(rehearsal, training_argv=[*rehearsal.training_argv, "--output_dir", temporary])
        result = run_rehearsal(rehearsal, output_dir=folder, on_line=on_line)
        return result, RunFolder(folder).read_run() or {}


def _planned(rehearsal: Rehearsal, command: LaunchCommand) -> dict[str, Any]:
    return {
        "status": status.RUNNING,
        "exit_code": None,
        "launcher_pid": os.getpid(),
        **start_facts(),
        "preset": rehearsal.preset.name,
        "preset_files": rehearsal.preset.texts(),
        "world_size": rehearsal.world_size,
        "rehearsal": {"world_size": rehearsal.world_size, "rank": rehearsal.rank},
        "training_arguments": rehearsal.training_argv,
        "plan": None,
        "command": command.shown,
    }
