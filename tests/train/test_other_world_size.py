"""A run that resumes on another number of ranks has the losses of an uninterrupted one, over the end of an epoch.

torchrun alone starts the ranks, so no launcher converts the checkpoint of a ZeRO run: rank 0 does. In fp32 and without
dropout, the sums of a step differ only in their order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import read, torchrun_preset

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import Measurements, measure, read_steps

pytestmark = [pytest.mark.launch, pytest.mark.nightly]  # ZeRO-2 in every test: test_elastic.py

# 9 rows and 4 sequences per step: an epoch has 3 steps, of which the last is filled up.
ROWS, STEPS, SAVED = 9, 6, 2
LOSS_TOLERANCE = 1e-6


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path, tmp_path: Path) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(faq_alpaca.read_text().splitlines()[:ROWS]) + "\n")
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "64"]
    words += ["--per_device_train_batch_size", "1", "--global_batch_size", "4", "--learning_rate", "1e-3"]
    return [*words, "--max_steps", str(STEPS), "--save_model", "false", "--bf16", "false", "--untimed_steps", "0"]


def train(preset: str, ranks: int, folder: Path, *words: str) -> str:
    ended = torchrun_preset(preset, *words, "--output_dir", str(folder), num_processes=ranks)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


def measured(folder: Path) -> Measurements:
    return measure(read_steps(RunFolder(folder)), untimed_steps=0)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "fsdp2"])
def test_a_run_resumes_on_fewer_ranks_and_then_on_more_with_the_same_losses(
    preset: str, job: list[str], tmp_path: Path
) -> None:
    whole, fewer, more = (tmp_path / name for name in ("whole", "fewer", "more"))
    train(preset, 2, whole, *job, "--save_steps", str(SAVED))
    resumed = ["--resume_from_checkpoint", str(whole / f"checkpoint-{SAVED}")]
    text = train(preset, 1, fewer, *job, *resumed)
    assert ("converting it for zero2 on 1" in text) == (preset == "zero2")
    later = ["--resume_from_checkpoint", str(fewer / f"checkpoint-{2 * SAVED}"), "--save_strategy", "no"]
    train(preset, 2, more, *job, *later)

    expected, on_one, on_two = (measured(folder).losses for folder in (whole, fewer, more))
    assert len(expected) == STEPS
    assert on_one == pytest.approx(expected[SAVED:], rel=LOSS_TOLERANCE)
    assert on_two == pytest.approx(expected[2 * SAVED :], rel=LOSS_TOLERANCE)
    run = read(fewer / "run.json")
    assert (run["world_size"], run["spec"]["gradient_accumulation_steps"], run["status"]) == (1, 4, "completed")
    assert run["resumed_from"] == {"path": str(whole / f"checkpoint-{SAVED}"), "step": SAVED}
    assert not (fewer / ".resume").exists()
