"""The launch command, its environment, and the line that a user can type."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from toolkit.launch.command import launch_command, threads_per_rank
from toolkit.presets import load_preset

ROOT = Path(__file__).parents[2]


YAMLS, JSONS = ROOT / "accelerate_configs", ROOT / "ds_configs"


def test_the_argv_is_accelerates_launcher_with_the_presets_file() -> None:
    command = launch_command(load_preset("ddp"), num_processes=2, training_argv=["--max_steps", "8"], cpu=False)
    assert command.argv == [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(YAMLS / "ddp.yaml"), "--num_processes", "2"),
        *("--num_machines", "1", "--main_process_port", "0"),
        *("-m", "toolkit.train", "--max_steps", "8"),
    ]
    assert command.shown == (
        f"accelerate launch --config_file {YAMLS}/ddp.yaml --num_processes 2 -m toolkit.train --max_steps 8"
    )


def test_a_deepspeed_json_is_named_by_its_absolute_path() -> None:
    command = launch_command(load_preset("zero3"), num_processes=4, training_argv=[], cpu=False)
    assert command.shown == (
        f"accelerate launch --config_file {YAMLS}/zero3.yaml --deepspeed_config_file {JSONS}/zero3.json"
        " --num_processes 4 -m toolkit.train"
    )
    assert command.argv[5:7] == ["--deepspeed_config_file", str(JSONS / "zero3.json")]


def test_a_hybrid_mesh_gets_its_shard_degree_from_the_number_of_processes() -> None:
    command = launch_command(load_preset("fsdp2_hybrid"), num_processes=8, training_argv=[], cpu=False)
    assert "--num_processes 8 --parallelism_config_dp_shard_size 4 -m toolkit.train" in command.shown
    assert (
        "parallelism_config"
        not in launch_command(load_preset("fsdp2"), num_processes=8, training_argv=[], cpu=False).shown
    )


def test_the_environment_on_gpus_describes_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/ops")
    command = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=False)
    assert command.environment == {
        "TOOLKIT_RUN_ID": command.run_id,
        "TOOLKIT_PRESET": str(YAMLS / "ddp.yaml"),
        "TOOLKIT_WORLD_SIZE": "2",
        "TOOLKIT_RUN_PREPARED": "1",
        "TORCH_EXTENSIONS_DIR": "/ops",
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8",
    }


def test_on_the_cpu_gpus_are_hidden_and_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    on_cpu = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=True).environment
    on_gpu = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=False).environment
    added = {name: on_cpu[name] for name in set(on_cpu) - set(on_gpu)}
    assert added == {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // 2))}
    assert threads_per_rank(10 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    chosen = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=True).environment
    assert chosen["OMP_NUM_THREADS"] == "7"
