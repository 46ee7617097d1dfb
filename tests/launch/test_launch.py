"""From a run's options to its processes: their number, the launch command, a dry run, and restarts."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, ROOT

from toolkit.cli.plan import RehearseOptions
from toolkit.errors import ToolkitError
from toolkit.job import job_checks
from toolkit.launch import launch
from toolkit.launch.command import LaunchCommand, threads_per_rank
from toolkit.launch.launch import Restarts, can_restart
from toolkit.launch.options import TrainOptions
from toolkit.launch.process import ProcessResult, RunResult
from toolkit.plan.options import PlanOptions, RecommendOptions
from toolkit.plan.planner import plan_request
from toolkit.plan.recommend import recommend_request
from toolkit.presets import load_preset
from toolkit.record.attempts import start_attempt
from toolkit.record.checkpoints import checkpoint_files, commit_checkpoint, file_entries, saving_folder
from toolkit.record.folder import RunFolder, write_json

YAMLS, JSONS = ROOT / "accelerate_configs", ROOT / "ds_configs"


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")
@pytest.mark.parametrize(
    ("gpus", "preset", "cpu", "processes"),
    [(8, "zero3", None, 8), (1, "zero3", None, 1), (8, "single", None, 1), (0, "zero3", None, 2), (8, "ddp", True, 2)],
)
def test_a_run_uses_all_visible_gpus_or_two_processes_on_a_cpu_and_a_plan_is_for_them(
    gpus: int, preset: str, cpu: bool | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {index}: NVIDIA H100'\n" for index in range(gpus)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert TrainOptions(preset=preset, cpu=cpu).world_size(load_preset(preset)) == processes
    if gpus:
        plan = plan_request(str(LLAMA_8B_CONFIG), PlanOptions(gpu="h100"))
        recommendation = recommend_request(str(LLAMA_8B_CONFIG), RecommendOptions(gpu="h100"))
        assert (list(plan.world_sizes), recommendation.world_size) == ([gpus], gpus)
        assert RehearseOptions(preset="ddp").world_size == gpus


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("timeout_minutes", 0.0, "--timeout-minutes is 0, expected more than 0"),
        ("timeout_minutes", float("inf"), "--timeout-minutes is inf, expected 527,040 or less"),
        ("hang_timeout_minutes", float("nan"), "--hang-timeout-minutes is nan, expected 0 or more"),
        ("max_restarts", 10**20, f"--max-restarts is {10**20}, expected 1,000 or less"),
    ],
)
def test_a_limit_beyond_any_run_is_refused(name: str, value: float, message: str) -> None:
    limit: dict[str, Any] = {name: value}
    with pytest.raises(ToolkitError) as caught:
        TrainOptions(preset="ddp", num_processes=2, **limit)
    assert caught.value.message == message


def command_of(preset: str, n: int, *words: str, cpu: bool = False) -> LaunchCommand:
    return launch.command_of(
        TrainOptions(preset=preset, num_processes=n, training_arguments=words, cpu=cpu), load_preset(preset)
    )


def test_the_argv_is_accelerates_launcher_with_the_presets_files_and_the_shard_degree() -> None:
    command = command_of("ddp", 2, "--max_steps", "8")
    selected, script = f"--config_file {YAMLS}/ddp.yaml --num_processes 2", "-m toolkit.train --max_steps 8"
    launcher, place = f"{sys.executable} -m accelerate.commands.launch", "--num_machines 1 --main_process_port 0"
    assert command.argv == f"{launcher} {selected} {place} {script}".split()
    assert command.shown == f"accelerate launch {selected} {script}"
    named, command = ["--deepspeed_config_file", str(JSONS / "zero3.json")], command_of("zero3", 4)
    assert f"--config_file {YAMLS}/zero3.yaml {' '.join(named)} --num_processes 4 -m" in command.shown
    assert command.argv[5:7] == named
    hybrid = command_of("fsdp2_hybrid", 8).shown
    assert "--num_processes 8 --parallelism_config_dp_shard_size 4 -m toolkit.train" in hybrid
    assert "parallelism_config" not in command_of("fsdp2", 8).shown


def test_a_lone_rank_is_started_without_a_launcher_and_a_lone_script_with_one() -> None:
    options = TrainOptions(preset="single", num_processes=1, training_arguments=("--max_steps", "8"), cpu=True)
    command = launch.command_of(options, load_preset("single"))
    assert command.argv == [sys.executable, "-m", "toolkit.train", "--max_steps", "8"]
    assert command.shown.startswith(f"accelerate launch --config_file {YAMLS}/single.yaml --num_processes 1 -m toolkit")
    assert "accelerate.commands.launch" in command_of("zero3", 1).argv
    script = TrainOptions(preset="single", num_processes=1, script="script.py", cpu=True)
    assert "accelerate.commands.launch" in launch.command_of(script, load_preset("single")).argv


def test_ranks_that_share_a_gpu_are_told_so_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(preset="zero2", num_processes=4, ranks_per_gpu=4, training_arguments=("--max_steps", "8"))
    command = launch.command_of(options, load_preset("zero2"))
    assert command.environment["TOOLKIT_RANKS_PER_GPU"] == "4"
    assert command.shown.startswith("TOOLKIT_RANKS_PER_GPU=4 accelerate launch ")
    assert "TOOLKIT_RANKS_PER_GPU" not in command_of("zero2", 2).environment
    monkeypatch.setenv("TOOLKIT_RANKS_PER_GPU", "2")  # the option of this run counts
    assert command_of("zero2", 2).environment["TOOLKIT_RANKS_PER_GPU"] == "1"
    monkeypatch.setattr("toolkit.launch.options.default_num_processes", lambda **_: 1)
    assert replace(options, num_processes=None).world_size(load_preset("zero2")) == 4


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


@pytest.mark.parametrize(
    ("status", "killed", "outcome", "again"),
    [
        ("failed", True, {}, True),
        ("failed", False, {}, False),
        ("timed_out", False, {}, True),
        ("timed_out", False, {"timed_out": True}, False),  # `--timeout-minutes`: the time is up
        ("host_out_of_memory", False, {}, True),
        ("out_of_memory", False, {}, False),
        ("diverged", False, {}, False),
        ("attestation_failed", False, {}, False),
        ("failed", True, {"interrupted": True}, False),
    ],
)
def test_only_faults_that_a_restart_may_fix_are_restarted(
    status: str, killed: bool, outcome: dict[str, bool], again: bool, tmp_path: Path
) -> None:
    failure = {"kind": status} | ({"seen_by_peer": None} if killed else {})
    result = RunResult(folder=RunFolder(tmp_path), status=status, exit_code=1, seconds=1.0, failure=failure)
    assert can_restart(result, ProcessResult(exit_code=1, seconds=1.0, **outcome)) is again


def test_a_restart_reports_the_lost_steps_and_keeps_the_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    start_attempt(folder)
    for rank, steps in ((0, 3), (1, 2)):
        rows = (f'{{"step": {step}, "seconds": 1.5}}\n' for step in range(1, steps + 1))
        folder.rank_rows(rank).write_text("".join(rows))
    folder.update_run(world_size=2)
    failure = {"kind": "failed", "rank": 1, "step": 2, "message": "gone", "seen_by_peer": None}
    write_json(folder.failure_json, failure)
    result = RunResult(folder=folder, status="failed", exit_code=1, seconds=1.0, failure=failure)
    restarts, outcome = Restarts(folder, max_restarts=1), ProcessResult(exit_code=1, seconds=1.0)
    assert restarts.prepare_next(result, outcome)
    ended = {"rank": 1, "step": 2, "status": "failed", "message": "gone", "world_size": 2, "resumed_from_step": 0}
    assert (folder.read_run() or {})["restarts"] == [ended | {"lost_steps": 2, "lost_seconds": 4.5}]
    assert folder.rank_rows(1).exists()
    assert not folder.failure_json.exists()
    assert not restarts.prepare_next(result, outcome)  # one was allowed


def job_words(model: Path, output_dir: Path, *more: str) -> tuple[str, ...]:
    data = str(ROOT / "examples" / "data.jsonl")
    words = ("--model_name_or_path", str(model), "--dataset", data, "--per_device_train_batch_size", "1")
    return (*words, "--output_dir", str(output_dir), *more)


def test_the_printed_command_is_executed_and_recorded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = job_words(tiny_model, tmp_path / "out")
    options = TrainOptions(
        preset="ddp", num_processes=2, training_arguments=words, cpu=True, hang_timeout_minutes=7, max_restarts=1
    )
    executed: list[LaunchCommand] = []

    def run_command(command: LaunchCommand, *_: Any, **__: Any) -> ProcessResult:
        executed.append(command)
        run = {"kind": "timed_out", "rank": 1, "step": 0, "message": "hung"}
        write_json(tmp_path / "out" / "failure.json", run)
        return ProcessResult(exit_code=1, seconds=1.0)

    monkeypatch.setattr(launch, "run_command", run_command)
    printed: list[str] = []
    prepared = launch.prepare_run(options, on_message=printed.append)
    launch.train(prepared, plan=None, on_message=printed.append)
    first, second = executed
    assert first is prepared.command
    assert printed[0] == first.shown
    assert first.shown.startswith("TOOLKIT_HANG_TIMEOUT_MINUTES=7 accelerate launch")
    assert first.environment["TOOLKIT_HANG_TIMEOUT_MINUTES"] == "7"
    assert second.argv == [*first.argv, "--resume_from_checkpoint", "latest"]
    assert second.run_id != first.run_id == first.environment["TOOLKIT_RUN_ID"]
    assert second.environment == first.environment | {"TOOLKIT_RUN_ID": second.run_id}
    assert (RunFolder(tmp_path / "out").read_run() or {})["command"] == second.shown


def test_a_dry_run_needs_no_gpu_of_the_named_kind_and_names_missing_packages(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_checks, "is_importable", lambda name: name != "bitsandbytes")
    words = job_words(tiny_model, tmp_path / "out", "--lora_r", "8", "--load_in_4bit", "true")
    job: dict[str, Any] = {"preset": "ddp", "num_processes": 8, "training_arguments": words}
    there = launch.prepare_run(TrainOptions(**job, dry_run=True, gpu="h100"), on_message=print)
    (warning,) = there.run.warnings
    assert warning.startswith("--load_in_4bit needs bitsandbytes, which is not installed here (pip install 'finetune")
    assert there.command.argv.count("8") == 1 + there.command.training_argv.count("8")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ToolkitError, match="--load_in_4bit needs bitsandbytes"):
        launch.prepare_run(TrainOptions(**job, cpu=True), on_message=print)


def test_a_dry_run_reports_a_conversion_and_does_not_make_it(tiny_model: Path, tmp_path: Path) -> None:
    saved = saving_folder(tmp_path, 8)
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"weights")
    written = {"step": 8, "preset": "zero2", "engine": "deepspeed", "sharding": "shard_grad_op", "world_size": 4}
    checkpoint = tmp_path / "checkpoint-8"
    commit_checkpoint(saved, checkpoint, {**written, "files": file_entries(saved, checkpoint_files(saved))})
    words = job_words(tiny_model, tmp_path, "--resume_from_checkpoint", str(checkpoint))
    options = TrainOptions(preset="zero3", num_processes=2, training_arguments=words, cpu=True, dry_run=True)
    printed: list[str] = []
    launch.prepare_run(options, on_message=printed.append)
    assert printed == [f"{checkpoint} would be converted for zero3 on 2 processes first"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
