"""The launch command is built once, and restarts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from toolkit.errors import ToolkitError
from toolkit.job import job_checks
from toolkit.launch import launch
from toolkit.launch.command import LaunchCommand
from toolkit.launch.launch import Restarts, can_restart
from toolkit.launch.options import TrainOptions
from toolkit.launch.process import ProcessResult, RunResult
from toolkit.record.attempts import start_attempt
from toolkit.record.checkpoints import checkpoint_files, commit_checkpoint, file_entries, saving_folder
from toolkit.record.folder import RunFolder, write_json


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
    assert warning.startswith("--load_in_4bit needs bitsandbytes, which is not installed here (in the clone: pip")
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
