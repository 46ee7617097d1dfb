"""The job that all engines write: what is refused before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_jobs import run_cluster, write_inputs

SLURM = ["slurm", "--gpus-per-node", "4"]


ZERO2 = ("--preset", "zero2", "--nodes", "2")


@pytest.mark.parametrize(
    ("options", "training", "message"),
    [
        (("--preset", "single", "--nodes", "2"), (), "'single' trains in one process, --nodes x --gpus-per-node is 8"),
        (("--preset", "fsdp2_hybrid", "--nodes", "3", "--gpus-per-node", "1"), (), "preset 'fsdp2_hybrid' needs"),
        (("--preset", "zero2", "--nodes", "2:1"), (), "--nodes is '2:1', expected a number, or MIN:MAX"),
        (("--preset", "zero2", "--nodes", "0"), (), "--nodes is 0, expected 1 or more"),
        ((*ZERO2, "--env", "HF_TOKEN=abc"), (), "would write a secret into the job file"),
        ((*ZERO2, "--env", "1X=2"), (), "--env is '1X=2', expected NAME=VALUE or NAME"),
        ((*ZERO2, "--name", "My Job"), (), "--name is 'My Job', expected at most 40"),
        ((*ZERO2, "--setup", "a\nb"), (), "--setup has a line break"),
        ((*ZERO2, "--saves-of", "/nowhere"), (), "--saves-of /nowhere has no measured save"),
        (("--preset", "zero3_nvme_offload", "--nodes", "2"), (), "offloads to a disk of each node, and none is named"),
        (("--preset", "zeropp", "--nodes", "2", "--cpu"), (), "preset 'zeropp' does not run on a CPU"),
        (ZERO2, ("--max_stepz", "8"), "max_stepz"),
        (ZERO2, ("--hub_token", "hf_ABCDEFGHIJKLMNOP"), "a training argument is a secret"),
        (
            ZERO2,
            ("--resume_from_checkpoint", "out/checkpoint-5"),
            "a job that is started again would begin there again",
        ),
        (ZERO2, ("--per_device_train_batch_size", "100"), "fewer than one global batch"),
    ],
)
def test_a_job_that_cannot_train_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    training: tuple[str, ...],
    message: str,
) -> None:
    code, text, errors = run_cluster([*SLURM, *options, "--", *write_inputs(tmp_path), *training], capsys)
    assert (code, text) == (2, "")
    assert message in errors


def test_an_elastic_job_that_cannot_keep_its_batch_says_which_numbers_of_ranks_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SLURM, "--preset", "zero2", "--nodes", "1:3", "--", *write_inputs(tmp_path)]
    code, text, errors = run_cluster(words, capsys)
    assert (code, text) == (2, "")
    assert "--global_batch_size 96 is no multiple of 8 data-parallel ranks" in errors
    assert "numbers of processes that keep it: 1, 2, 3, 4, 6, 12" in errors


def test_files_that_only_the_nodes_have_are_not_read_here(capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--model_name_or_path", "/nodes/model", "--dataset", "/nodes/rows.jsonl", "--output_dir", "/nodes/out"]
    words = [*SLURM, "--preset", "zero2", "--nodes", "2"]
    assert run_cluster([*words, "--", *there], capsys)[0] == 2
    code, text, _ = run_cluster([*words, "--no-check-files", "--", *there], capsys)
    assert code == 0
    assert "--model_name_or_path /nodes/model" in text


def test_a_preset_of_the_user_is_named_by_its_absolute_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Mine.yaml").write_text("# mine\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    training = write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, text, errors = run_cluster([*SLURM, "--preset", "Mine.yaml", "--nodes", "2", "--", *training], capsys)
    assert code == 0, errors
    assert f"export TOOLKIT_PRESET={tmp_path}/Mine.yaml\n" in text
    assert "--job-name=mine\n" in text


def test_the_file_is_written_whole_and_nothing_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SLURM, "--preset", "zero2", "--nodes", "2", "--output", str(tmp_path / "job.sbatch")]
    code, text, _ = run_cluster([*words, "--", *write_inputs(tmp_path)], capsys)
    assert (code, text) == (0, "")
    assert (tmp_path / "job.sbatch").read_text().startswith("#!/bin/bash\n")
