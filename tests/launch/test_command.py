"""The launch command, its environment, and the line that a user can type."""

from __future__ import annotations

import os
import sys

import pytest
from launching import ROOT

from toolkit.launch.command import LaunchCommand, launch_command, threads_per_rank
from toolkit.presets import load_preset

YAMLS, JSONS = ROOT / "accelerate_configs", ROOT / "ds_configs"


def command_of(preset: str, n: int, *words: str, cpu: bool = False) -> LaunchCommand:
    return launch_command(load_preset(preset), num_processes=n, training_argv=words, cpu=cpu)


def test_the_argv_is_accelerates_launcher_with_the_presets_file() -> None:
    command = command_of("ddp", 2, "--max_steps", "8")
    selected, script = f"--config_file {YAMLS}/ddp.yaml --num_processes 2", "-m toolkit.train --max_steps 8"
    launcher, place = f"{sys.executable} -m accelerate.commands.launch", "--num_machines 1 --main_process_port 0"
    assert command.argv == f"{launcher} {selected} {place} {script}".split()
    assert command.shown == f"accelerate launch {selected} {script}"


def test_a_deepspeed_json_is_named_by_its_absolute_path() -> None:
    command = command_of("zero3", 4)
    named = ["--deepspeed_config_file", str(JSONS / "zero3.json")]
    assert f"--config_file {YAMLS}/zero3.yaml {' '.join(named)} --num_processes 4 -m" in command.shown
    assert command.argv[5:7] == named


def test_a_hybrid_mesh_gets_its_shard_degree_from_the_number_of_processes() -> None:
    shown = command_of("fsdp2_hybrid", 8).shown
    assert "--num_processes 8 --parallelism_config_dp_shard_size 4 -m toolkit.train" in shown
    assert "parallelism_config" not in command_of("fsdp2", 8).shown


def test_the_environment_on_gpus_describes_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/ops")
    command = command_of("ddp", 2)
    run = {"TOOLKIT_RUN_ID": command.run_id, "TOOLKIT_PRESET": str(YAMLS / "ddp.yaml"), "TOOLKIT_WORLD_SIZE": "2"}
    python = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    assert command.environment == {**run, "TOOLKIT_RUN_PREPARED": "1", "TORCH_EXTENSIONS_DIR": "/ops", **python}


def test_on_the_cpu_gpus_are_hidden_and_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    on_cpu, on_gpu = (command_of("ddp", 2, cpu=cpu).environment for cpu in (True, False))
    added = {name: on_cpu[name] for name in set(on_cpu) - set(on_gpu)}
    assert added == {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // 2))}
    assert threads_per_rank(10 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert command_of("ddp", 2, cpu=True).environment["OMP_NUM_THREADS"] == "7"
