"""Two-rank runs on two files with weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, read, toolkit


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path, faq_sharegpt: Path) -> Path:
    """A YAML file with 10 and 20 rows in two formats: 20 are half of an epoch of 40 rows, which is 5 steps of 8."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, source, rows in (("alpaca", faq_alpaca, slice(10)), ("sharegpt", faq_sharegpt, slice(10, 30))):
        (folder / f"{name}.jsonl").write_text("\n".join(source.read_text().splitlines()[rows]) + "\n")
    names = [str(folder / f"{name}.jsonl") for name in ("alpaca", "sharegpt")]
    words = {"model_name_or_path": str(tiny_model), "dataset": names, "dataset_weights": [0.5, 0.5]}
    words |= {"max_seq_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    words |= {"num_train_epochs": 2}
    config = folder / "job.yaml"
    config.write_text(json.dumps(words))
    return config


def run_job(preset: str, output: Path, *words: str) -> dict[str, list[Any]]:
    """Values of each step by key, rank 0 first."""
    words = (*words, "--save_model", "false", "--output_dir", str(output))
    ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    files = [output / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {key: [row[key] for row in found] for key in ("step", "loss", "batch_sha256", "non_padding_tokens")}


@pytest.mark.parametrize("command", ["train", "compare", "rehearse"])
def test_every_command_checks_both_files(command: str, job: Path, tmp_path: Path) -> None:
    """Before anything starts."""
    options = ["--output-dir", str(tmp_path), "--dry-run"] if command == "compare" else []
    words = [command, "--preset", "ddp", "--num-processes", "2", "--cpu", *options, "--", str(job)]
    words += [] if command == "compare" else ["--output_dir", str(tmp_path)]
    ended = toolkit(*words, "--dataset", str(job.with_name("alpaca.jsonl")), str(job.with_name("sharegpd.jsonl")))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"error: no such data file: {job.with_name('sharegpd.jsonl')}" in ended.stderr
    assert f"did you mean `{job.with_name('sharegpt.jsonl')}`?" in ended.stderr
    if command == "compare":
        ended = toolkit(*words)
        assert ended.returncode == 0, ended.stderr
        assert str(job) in ended.stdout


@pytest.mark.launch
def test_two_weighted_files_give_the_same_steps_under_another_preset_and_when_resumed(
    job: Path, tmp_path: Path
) -> None:
    whole = run_job("ddp", tmp_path / "ddp", str(job), "--save_steps", "3")
    assert whole["step"] == [*range(1, 11)] * 2
    data = read(tmp_path / "ddp" / "run.json")["data"]
    assert [(source["rows"], source["epoch_rows"], source["weight"]) for source in data["sources"]] == [
        (10, 20, 0.5),
        (20, 20, 0.5),
    ]
    assert (data["format"], data["rows"], data["epoch_rows"]) == ("alpaca, sharegpt", 30, 40)
    assert sum(whole["non_padding_tokens"]) == 2 * data["tokens"]  # two epochs of 40 rows
    assert "20 rows, each 2.00 times" in (tmp_path / "ddp" / "train.log").read_text()

    other = run_job("zero3", tmp_path / "zero3", str(job), "--save_strategy", "no")
    assert other["batch_sha256"] == whole["batch_sha256"]
    assert other["loss"] == pytest.approx(whole["loss"], abs=1e-4)

    checkpoint = tmp_path / "ddp" / "checkpoint-3"
    assert read(checkpoint / "manifest.json")["dataset_weights"] == [0.5, 0.5]
    resume = [str(job), "--resume_from_checkpoint", str(checkpoint), "--save_strategy", "no"]
    resumed = run_job("ddp", tmp_path / "resumed", *resume)
    later = [index for index, step in enumerate(whole["step"]) if step > 3]
    assert resumed["step"] == [*range(4, 11)] * 2
    for key in ("loss", "batch_sha256"):
        assert resumed[key] == [whole[key][index] for index in later]

    reweighted = ["--dataset_weights", "0.7", "0.3", "--output_dir", str(tmp_path / "reweighted")]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "ddp.yaml", *resume, *reweighted)
    assert ended.returncode != 0
    assert "was trained with --dataset_weights 0.5 0.5, now it is 0.7 0.3" in ended.stderr
