"""How this rank was launched: the preset, the number of processes, and the folders that the launcher prepared.

`toolkit train` passes them in environment variables. A plain `accelerate launch --config_file F --num_processes N`
passes its ranks neither, so they are read from the launcher's own command line, among this process's parents. Under
torchrun alone, as on several nodes, the user names the preset, and each rank gives itself what `accelerate launch`
would: after an elastic restart that may be for another number of ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import psutil
from accelerate.commands.launch import launch_command_parser
from transformers.utils import logging

from toolkit.cache import check_extensions_folder
from toolkit.errors import ToolkitError
from toolkit.files.reading import user_path
from toolkit.launch.command import (
    NVME_PATH_VARIABLE,
    PREPARED_VARIABLE,
    PRESET_VARIABLE,
    RUN_ID_VARIABLE,
    WORLD_SIZE_VARIABLE,
    strategy_environment,
)
from toolkit.launch.nvme import ACCELERATE_VARIABLES, swap_folder
from toolkit.observe.progress import Progress
from toolkit.presets.preset import load_preset, read_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.training_arguments import enable_fsdp_on_cpu

ACCELERATE_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # `accelerate launch` sets it for every preset
DEEPSPEED_CONFIG_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # of the YAML's `deepspeed_config_file`


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """The preset and sizes that the live objects are verified against; None where the launcher gives none."""

    preset: PresetSpec | None
    world_size: int | None
    dp_shard_size: int | None = None
    """Ranks that share one copy of the model in a hybrid mesh."""
    folder_prepared: bool = False
    """True if the launcher has locked and cleared the run folder, and verified the checkpoint that was named."""

    @classmethod
    def from_env(cls) -> LaunchContext:
        """Read it from the environment, or from the command line of the `accelerate launch` above this process.

        This completes the environment: by the preset's under torchrun alone, and by the absolute path of the preset's
        JSON, which accelerate looks for in the working directory. Raises ToolkitError for several nodes without a
        preset, for another number of ranks than the job asked for, and for a preset that needs a launcher without one.
        """
        started_by_torchrun = ACCELERATE_VARIABLE not in os.environ
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        if PRESET_VARIABLE in os.environ:
            preset, started = load_preset(os.environ[PRESET_VARIABLE]), os.environ.get("WORLD_SIZE")
            requested = os.environ.get(WORLD_SIZE_VARIABLE)
            if requested and started and requested != started:
                raise ToolkitError(
                    f"the job asked for {requested} ranks ({WORLD_SIZE_VARIABLE}), and {started} were started:"
                    f" {os.environ.get('LOCAL_WORLD_SIZE', '1')} on each of {nodes} node{'s' * (nodes != '1')}",
                    hint=f"ask for {requested} GPUs, and start torchrun on every node;"
                    f" or change `{WORLD_SIZE_VARIABLE}`",
                )
            if started_by_torchrun and started is None and preset.engine != "none":
                raise ToolkitError(
                    f"{PRESET_VARIABLE}={preset.name} needs a launcher, and this process has none",
                    hint=f"`toolkit train --preset {preset.name} -- ...`, or `torchrun` in front",
                )
            if started_by_torchrun:
                os.environ.update(strategy_environment(preset, world_size=int(started or 1)))
            context = cls.of_preset(preset, int(requested or started or 0) or None)
        elif started_by_torchrun and nodes != "1":
            raise ToolkitError(
                f"{PRESET_VARIABLE} is not set, and torchrun has started this job on {nodes} nodes:"
                " no rank knows how to shard the model",
                hint=f"on every node: `export {PRESET_VARIABLE}=zero2`; `toolkit presets` lists the presets",
            )
        else:
            context = _from_parent_processes()
        path = None if context.preset is None else context.preset.deepspeed_config_path
        if path is not None and not Path(os.environ.get(DEEPSPEED_CONFIG_VARIABLE, path)).is_file():
            os.environ[DEEPSPEED_CONFIG_VARIABLE] = str(path)
        return replace(context, folder_prepared=PREPARED_VARIABLE in os.environ)

    @classmethod
    def of_preset(cls, preset: PresetSpec, world_size: int | None) -> LaunchContext:
        """Return the context of a run under a preset, its hybrid mesh divided as the preset says."""
        shard_size = preset.dp_shard_size(world_size) if world_size else None
        return cls(preset=preset, world_size=world_size, dp_shard_size=shard_size)


def _from_parent_processes() -> LaunchContext:
    for parent in psutil.Process().parents():
        try:
            argv, folder = parent.cmdline(), Path(parent.cwd())
        except psutil.Error:
            continue
        if (options := accelerate_launch_arguments(argv)) is not None:
            return context_of_command(options, folder)
    return LaunchContext(preset=None, world_size=None)


def accelerate_launch_arguments(argv: list[str]) -> list[str] | None:
    """Return what follows accelerate's launcher in an argv; None where the argv is another program's."""
    for position, word in enumerate(argv[:4]):
        name = Path(word).name
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return argv[position + 1 :]
        if name == "accelerate" and argv[position + 1 : position + 2] == ["launch"]:
            return argv[position + 2 :]
    return None


def context_of_command(options: list[str], folder: Path) -> LaunchContext:
    """Read the options of an `accelerate launch` that was started in `folder`; its flags override its file."""
    parser = launch_command_parser()
    parser.set_defaults(parallelism_config_dp_shard_size=None)  # 1 otherwise
    given = parser.parse_args(options)
    if given.config_file is None:
        return LaunchContext(preset=None, world_size=given.num_processes)
    preset = read_preset(folder / given.config_file)
    return LaunchContext(
        preset=preset,
        world_size=given.num_processes or preset.accelerate_config().get("num_processes"),
        dp_shard_size=given.parallelism_config_dp_shard_size,
    )


def set_up_libraries(progress: Progress) -> None:
    """Set what accelerate and DeepSpeed read before the arguments are parsed, and switch progress bars off."""
    check_extensions_folder()
    datasets.disable_progress_bars()  # a log file holds lines
    logging.disable_progress_bar()
    enable_fsdp_on_cpu()
    candidates = [os.environ.get(name) for name in (NVME_PATH_VARIABLE, *ACCELERATE_VARIABLES.values())]
    if (disk := next(filter(None, candidates), None)) is not None:
        # The ranks of a node agree on the run's own folder: they share the launcher's id, or the launcher itself.
        run_id = os.environ.get(RUN_ID_VARIABLE) or f"pid{os.getppid()}"
        progress.swap_folder = swap_folder(user_path(disk).absolute(), run_id)
        os.environ.update(dict.fromkeys(ACCELERATE_VARIABLES.values(), str(progress.swap_folder)))
