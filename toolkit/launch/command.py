"""The argv and environment of one training run. Builds; `toolkit.launch.process` runs.

>>> launch_command(load_preset("ddp"), num_processes=2, training_argv=["--max_steps", "8"], cpu=True).shown
'accelerate launch --config_file .../ddp.yaml --num_processes 2 ...'
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cache import torch_extensions_folder
from toolkit.presets import Preset
from toolkit.runs.nvme import NVME_PATH_VARIABLE
from toolkit.runs.pulses import HANG_TIMEOUT_VARIABLE

RUN_ID_VARIABLE = "TOOLKIT_RUN_ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """What is started, and what of it a user can type."""

    argv: list[str]
    environment: dict[str, str]
    """Added to the environment of this process."""
    shown: str
    """The same run by hand, through accelerate's own launcher."""
    run_id: str
    """Found in the environment of every process of this run, so that none is left behind."""


def launch_command(
    preset: Preset,
    *,
    num_processes: int,
    training_argv: Sequence[str],
    cpu: bool,
    nvme_path: Path | None = None,
    hang_timeout_minutes: float | None = None,
) -> LaunchCommand:
    """The command for `num_processes` ranks on this machine."""
    options = ["--config_file", str(preset.accelerate_config_path)]
    if preset.deepspeed_config_path is not None:
        # accelerate resolves the YAML's path against the working directory; an absolute one holds from anywhere
        options += ["--deepspeed_config_file", str(preset.deepspeed_config_path)]
    options += ["--num_processes", str(num_processes)]
    shard_size = preset.dp_shard_size(num_processes)
    if shard_size is not None:  # the file says how many replicas; how many ranks share one is the machine's
        options += ["--parallelism_config_dp_shard_size", str(shard_size)]
    script = ["-m", "toolkit.train", *training_argv]
    port = ["--num_machines", "1", "--main_process_port", "0"]  # 0: a free one
    run_id = uuid.uuid4().hex
    given = {NVME_PATH_VARIABLE: nvme_path, HANG_TIMEOUT_VARIABLE: hang_timeout_minutes}
    added = {name: str(value) for name, value in given.items() if value is not None}
    by_hand = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    return LaunchCommand(
        argv=[sys.executable, "-m", "accelerate.commands.launch", *options, *port, *script],
        environment=_environment(preset, num_processes, cpu=cpu, run_id=run_id) | added,
        shown=" ".join([*by_hand, shlex.join(["accelerate", "launch", *options, *script])]),
        run_id=run_id,
    )


def _environment(preset: Preset, num_processes: int, *, cpu: bool, run_id: str) -> dict[str, str]:
    environment = {
        RUN_ID_VARIABLE: run_id,
        "TOOLKIT_PRESET": str(preset.accelerate_config_path),
        "TOOLKIT_WORLD_SIZE": str(num_processes),
        "TOOLKIT_RUN_PREPARED": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder())),
        "PYTHONUNBUFFERED": "1",
    }
    if cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(num_processes)))
    return environment


def threads_per_rank(num_processes: int) -> int:
    """The same share of the cores for every preset; launchers differ in their defaults."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)
