"""The command that starts a run, and its environment: built once, then printed, executed and recorded.

>>> from toolkit.presets import load_preset
>>> options = TrainOptions(preset="ddp", num_processes=2, training_arguments=("--max_steps", "8"), cpu=True)
>>> command_of(options, load_preset("ddp")).argv[-4:]
['-m', 'toolkit.train', '--max_steps', '8']

A run is started with `inherited_environment() | run_environment(...)`. `accelerate launch` then adds
`launcher_environment` for every rank, and torchrun `rank_environment` for each. A rank that torchrun alone has started,
as on several nodes, or that is alone, gives itself `strategy_environment`.
"""

import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from toolkit.engines.compiled_ops import check_extensions_folder, torch_extensions_folder
from toolkit.engines.engine import ENGINE_VARIABLES
from toolkit.files.secrets import SECRETS_VARIABLE, separate_secrets
from toolkit.hardware.shared_gpu import RANKS_PER_GPU_VARIABLE
from toolkit.launch.options import TrainOptions
from toolkit.presets.spec import PresetSpec
from toolkit.record.folder import PREPARED_VARIABLE, RESUME_VARIABLE, WORLD_SIZE_VARIABLE
from toolkit.record.heartbeat import HANG_TIMEOUT_VARIABLE

# In the environment of every process of a run, so that all of them are found and ended.
RUN_ID_VARIABLE = "TOOLKIT_RUN_ID"
PRESET_VARIABLE = "TOOLKIT_PRESET"
NVME_PATH_VARIABLE = "TOOLKIT_NVME_PATH"  # the disk that ranks offload to, for presets that use NVMe
# A rank prints rows and reads files in UTF-8, whatever the locale of this node is.
UTF8_VARIABLES = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
# accelerate's launcher functions also set where the ranks meet, which torchrun has told them.
PLACE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
# A library may have put its strategy into this process's environment; a run gets its strategy from the preset.
STRATEGY_VARIABLES = (*ENGINE_VARIABLES, "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_MIXED_PRECISION")
RESUME_LATEST = ("--resume_from_checkpoint", "latest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCommand:
    """One process to start, and how a user would start it from a shell."""

    argv: list[str]
    environment: dict[str, str]  # variables added to those of this process
    shown: str  # the same run as a shell line
    run_id: str  # the value of `TOOLKIT_RUN_ID` in every process of the run, by which all of them are found and ended


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand(ProcessCommand):
    """The launch of all ranks of a run: `argv` is accelerate's launcher, or a lone rank, which needs none."""

    preset: PresetSpec
    num_processes: int
    program: tuple[str, ...]
    training_argv: list[str]
    """Arguments of the training script, the same for every rank; `***` for each secret, which `environment` has."""
    nvme_path: Path | None = None  # the disk that the run offloads to
    resume_command: str | None = None  # what resumes the run of a script of the user's own

    @property
    def runs_script(self) -> bool:
        """True if the program is not our own training script."""
        return self.program[:2] != ("-m", "toolkit.train")

    def again(self, *, resumes: bool = True, checkpoint: Path | None = None) -> Self:
        """Return the command under a new run id, which resumes the run from its newest checkpoint or starts it over."""
        run_id, words = new_run_id(), RESUME_LATEST if resumes else ()  # the last of two equal flags counts
        added = {RUN_ID_VARIABLE: run_id}
        if self.runs_script:  # it may have no such argument: the observer gives it to the Trainer
            words, added[RESUME_VARIABLE] = (), str(checkpoint or "")
        return replace(
            self,
            argv=[*self.argv, *words],
            environment=self.environment | added,
            shown=" ".join([self.shown, *words]),
            run_id=run_id,
            training_argv=[*self.training_argv, *words],
        )


def command_of(
    options: TrainOptions,
    preset: PresetSpec,
    *,
    nvme_path: Path | None = None,
    resume_from: Path | None = None,
    observer_words: Sequence[str] = ("--complete-saves", "--stop-on-signal"),
) -> LaunchCommand:
    """Build the command that starts all ranks of a run on this node.

    Its arguments are what everybody may read: secrets are in its environment. `resume_from` is a converted copy of the
    checkpoint that the options name. Somebody's script runs observed in `output_dir`, with `observer_words`.
    """
    words = [*options.training_arguments]
    program = script_program(options, observer_words) if options.runs_script else ["-m", "toolkit.train"]
    variables: dict[str, Any] = {NVME_PATH_VARIABLE: nvme_path, HANG_TIMEOUT_VARIABLE: options.hang_timeout_minutes}
    if options.ranks_per_gpu > 1 or RANKS_PER_GPU_VARIABLE in os.environ:
        variables[RANKS_PER_GPU_VARIABLE] = options.ranks_per_gpu
    added = {name: str(value) for name, value in variables.items() if value is not None}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    if options.runs_script and (options.max_restarts or resume_from is not None):
        added[RESUME_VARIABLE] = str(resume_from or "")
    elif resume_from is not None:
        words += ["--resume_from_checkpoint", str(resume_from)]
    world_size, run_id = options.world_size(preset), new_run_id()
    shown_argv, secrets = separate_secrets(words)
    selected, script = accelerate_options(preset, world_size=world_size), [*program, *shown_argv]
    port = ["--num_machines", "1", "--main_process_port", "0"]  # 0: any free port
    launcher = ["-m", "accelerate.commands.launch", *selected, *port]
    if not preset.traits.needs_launcher and not options.runs_script:
        launcher = []  # it would import torch to set this rank's environment, and wait: 2 CPU-seconds and 150 MiB
    environment = run_environment(preset, world_size=world_size, cpu=options.on_cpu, run_id=run_id)
    return LaunchCommand(
        preset=preset,
        num_processes=world_size,
        program=tuple(program),
        training_argv=shown_argv,
        argv=[sys.executable, *launcher, *script],
        environment=environment | secrets | added,
        shown=" ".join([*assignments, shlex.join(["accelerate", "launch", *selected, *script])]),
        run_id=run_id,
        nvme_path=nvme_path,
        resume_command=resume_command(options, world_size, shown_argv) if options.runs_script else None,
    )


def script_program(options: TrainOptions, observer_words: Sequence[str]) -> list[str]:
    """Return the words that run somebody's script observed."""
    target = ["-m", str(options.module)] if options.script is None else [options.script]
    required = ["--output-dir", str(options.output_dir), "--require", options.preset]
    return ["-m", "toolkit.observe", *required, *_reading_words(options), *observer_words, *target]


def _reading_words(options: TrainOptions) -> list[str]:
    return [f"--{name}={reading}" for name in ("require", "allow") for reading in getattr(options, name)]


def resume_command(options: TrainOptions, world_size: int, shown_argv: Sequence[str]) -> str:
    target = ["--module", str(options.module)] if options.script is None else ["--script", options.script]
    words = ["toolkit", "train", "--preset", options.preset, "--num-processes", str(world_size)]
    words += [*["--cpu"] * options.on_cpu, *_reading_words(options), "--output-dir", str(options.output_dir)]
    words += ["--resume", *target, "--"]
    return shlex.join([*words, *shown_argv])


def inherited_environment() -> dict[str, str]:
    """Return this process's environment as a run inherits it: without another run's strategy and arguments."""
    another_run = (*STRATEGY_VARIABLES, SECRETS_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in another_run}


def process_environment(*, cpu: bool, run_id: str) -> dict[str, str]:
    """Return the variables that the toolkit gives every process that it starts, on the CPU or the visible GPUs."""
    environment = {RUN_ID_VARIABLE: run_id, "PYTHONUNBUFFERED": "1", **UTF8_VARIABLES}
    return environment | ({"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if cpu else {})


def run_environment(preset: PresetSpec, *, world_size: int, cpu: bool, run_id: str) -> dict[str, str]:
    """Return the variables of a run's launcher. Raises ToolkitError for compiled ops that others may write."""
    check_extensions_folder()
    environment = process_environment(cpu=cpu, run_id=run_id) | {
        PRESET_VARIABLE: str(preset.accelerate_config_path),
        WORLD_SIZE_VARIABLE: str(world_size),
        PREPARED_VARIABLE: "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder())),
    }
    if cpu:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(world_size)))
    return environment


def threads_per_rank(world_size: int) -> int:
    """Return each rank's share of this node's cores, the same for every preset; launchers' defaults differ."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def accelerate_options(preset: PresetSpec, *, world_size: int) -> list[str]:
    """Return the options of `accelerate launch` that select the preset on one node of `world_size` ranks."""
    options = ["--config_file", str(preset.accelerate_config_path)]
    if preset.settings_argument is not None:
        # accelerate resolves a path in a YAML against the working directory
        options += [preset.traits.settings_option, preset.settings_argument]
    options += ["--num_processes", str(world_size)]
    shard_size = preset.dp_shard_size(world_size)
    if shard_size is not None:  # the file gives the number of replicas; the ranks per replica follow from world_size
        options += ["--parallelism_config_dp_shard_size", str(shard_size)]
    return options


def launcher_environment(preset: PresetSpec, *, world_size: int) -> dict[str, str]:
    """Return what `accelerate launch` sets for all ranks, without `OMP_NUM_THREADS`, which depends on the node."""
    from accelerate.commands import launch

    options = accelerate_options(preset, world_size=world_size)
    options += ["--num_machines", "1", "--main_process_port", "0", "-m", "toolkit.train"]
    arguments, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(options))
    environment = preset.traits.launcher_environment(launch, arguments, defaults)
    environment.pop("OMP_NUM_THREADS", None)
    return environment


def strategy_environment(preset: PresetSpec, *, world_size: int) -> dict[str, str]:
    """Return the part of `launcher_environment` that says how to train, and not where the ranks meet."""
    environment = launcher_environment(preset, world_size=world_size).items()
    return {name: text for name, text in environment if name not in PLACE_VARIABLES and os.environ.get(name) != text}


def rank_environment(
    *, world_size: int, rank: int, local_rank: int, local_world_size: int, master_port: int
) -> dict[str, str]:
    """Return the variables with which torchrun tells one rank of a single node its place.

    >>> rank_environment(world_size=8, rank=3, local_rank=3, local_world_size=8, master_port=29500)["RANK"]
    '3'
    """
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}
    return place | {name: str(number) for name, number in numbers.items()}


def torchrun_words(*, nnodes: str, processes_per_node: int, attempt: str, endpoint: str) -> list[str]:
    """Return torchrun and its rendezvous for the shell, which expands the variables in `attempt` and `endpoint`."""
    return [
        "-m torch.distributed.run",
        f"--nnodes {nnodes} --nproc-per-node {processes_per_node}",
        f'--rdzv-id "{attempt}" --rdzv-backend c10d --rdzv-endpoint "{endpoint}"',
    ]


def new_run_id() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex
