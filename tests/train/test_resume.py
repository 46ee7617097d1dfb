"""A run that is stopped and resumed has the losses of an uninterrupted run, bit for bit, under each engine.

The uninterrupted runs are those of the fixture `saved_runs`. `ddp` is resumed from its damaged folder below, and
after kills and signals in test_faults.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import LORA, ROOT, SAVED, SAVED_STEPS, accelerate_launch, losses, rank_rows, read, succeeded, toolkit

from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import RunFolder

Runs = dict[str, Path]

pytestmark = pytest.mark.launch


def some(*first: str) -> list[object]:
    return [pytest.param(case, marks=() if case in first else pytest.mark.nightly) for case in SAVED]


@pytest.fixture
def job(saved_job: list[str]) -> list[str]:
    return [*saved_job, "--save_steps", "1", "--save_model", "false"]


def rows_after(folder: Path, step: int) -> list[list[tuple[Any, ...]]]:
    """Each rank's batches, losses and norms for the steps after `step`."""
    keys = ("step", "loss", "grad_norm", "local_grad_norm", "batch_sha256")
    ranks = (rank_rows(folder, rank) for rank in (0, 1))
    return [[tuple(row[key] for key in keys) for row in rows if row["step"] > step] for rows in ranks]


@pytest.fixture
def resume(saved_job: list[str], saved_runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    def run(case: str, *words: str, num_processes: int = 2) -> Path:
        preset, _, lora = case.partition("-")
        words = (*saved_job, *(LORA if lora else []), *words, "--save_strategy", "no", "--save_model", "false")
        words += ("--resume_from_checkpoint", str(saved_runs[case] / f"checkpoint-{SAVED[case]}"))
        config, out = ROOT / "accelerate_configs" / f"{preset}.yaml", tmp_path / "out"
        succeeded(accelerate_launch(config, *words, "--output_dir", str(out), num_processes=num_processes))
        return out

    return run


@pytest.mark.parametrize("case", some("fsdp2"))
def test_a_resumed_run_repeats_the_losses(case: str, resume: Callable[..., Path], saved_runs: Runs) -> None:
    whole, step, out = saved_runs[case], SAVED[case], resume(case)
    expected = rows_after(whole, step)
    assert [len(rank) for rank in expected] == [SAVED_STEPS - step] * 2
    assert rows_after(out, 0) == expected
    resumed = {"path": str(whole / f"checkpoint-{step}"), "step": step, "preset": read(whole / "run.json")["preset"]}
    assert read(out / "run.json")["resumed_from"] == resumed
    assert read(out / "attestation.json")["verdict"] == "attested"


@pytest.mark.nightly  # ZeRO-2 in every test: test_elastic.py
@pytest.mark.parametrize("preset", ["ddp", "fsdp2"])
def test_fewer_ranks_resume_with_equal_losses(preset: str, resume: Callable[..., Path], saved_runs: Runs) -> None:
    out = resume(preset, "--gradient_accumulation_steps", "4", num_processes=1)
    # In another order of the sums of a step.
    assert losses(out, ranks=1) == pytest.approx(losses(saved_runs[preset])[SAVED[preset] :], rel=1e-6)


@pytest.mark.parametrize("case", some("ddp", "zero3-lora", "fsdp2"))
def test_every_checkpoint_is_complete_and_described_by_its_manifest(case: str, saved_runs: Runs) -> None:
    found = list_checkpoints(saved_runs[case])
    steps = {*range(SAVED[case], SAVED_STEPS, SAVED[case]), SAVED_STEPS}
    assert [checkpoint.step for checkpoint in found] == sorted(steps, reverse=True)
    assert [checkpoint.problem(deep=True) for checkpoint in found] == [None] * len(steps)
    manifest = found[0].manifest
    preset, _, lora = case.partition("-")
    assert (manifest.preset, manifest.world_size, manifest.adapter) == (preset, 2, bool(lora))
    assert all(entry.sha256 for entry in manifest.files), "the last one too, though the run ends after it"
    assert len(manifest.fingerprint.logits) == 64
    if lora:  # no base weights, not even in bf16
        tokenizer = sum(entry.bytes for entry in manifest.files if "token" in entry.path)
        assert 0 < found[0].bytes - tokenizer < (4 * 336_192) / 2


@pytest.fixture
def stopped(saved_runs: Runs, tmp_path: Path) -> Path:
    """A run that was killed after step 4: its rows go to step 5, its newest checkpoint is damaged."""
    folder = tmp_path / "stopped"
    shutil.copytree(saved_runs["ddp"], folder)
    for trained in ("model.safetensors", "config.json"):
        (folder / trained).unlink()
    for step in (5, 6):
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / ".saving-checkpoint-5").mkdir()
    weights = folder / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for rank in (0, 1):
        rows = RunFolder(folder).rank_rows(rank)
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:5]))
    RunFolder(folder).update_run(status="failed", exit_code=1)
    return folder


def test_latest_resumes_before_a_damaged_checkpoint(stopped: Path, job: list[str], saved_runs: Runs) -> None:
    words = ["--output_dir", str(stopped), "--resume_from_checkpoint", "latest", "--save_total_limit", "2"]
    ended = succeeded(toolkit("train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *job, *words))
    assert f"skipped {stopped}/checkpoint-4: model.safetensors has " in ended.stderr
    assert f"resume: from {stopped}/checkpoint-3, after step 3" in ended.stderr
    assert rows_after(stopped, 0) == rows_after(saved_runs["ddp"], 0)  # one row a step, before and after
    assert sorted(path.name for path in stopped.glob("*checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert not list(stopped.glob(".saving-*"))
    run = read(stopped / "run.json")
    assert (run["status"], run["measured"]["steps"]) == ("completed", SAVED_STEPS)


def test_an_unusable_checkpoint_is_refused_before_a_rank_starts(stopped: Path, job: list[str], tmp_path: Path) -> None:
    words = [*job, "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint"]
    given = [*words, str(stopped / "checkpoint-4")]
    ended = toolkit("train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *given)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "checkpoint-4 cannot be used: model.safetensors has " in ended.stderr
    assert f"the previous one is complete: `{stopped}/checkpoint-3`" in ended.stderr
    # Started otherwise, rank 0 checks and converts; in one process because that is quicker.
    other = accelerate_launch("zero2", *words, str(stopped / "checkpoint-3"), num_processes=1)
    assert other.returncode != 0
    assert "was trained with 8 sequences per step over all ranks, now it is 4" in other.stderr
    assert not (tmp_path / "out" / "run.json").exists()
