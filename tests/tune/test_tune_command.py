"""`toolkit tune` as its user runs it: real trials, a budget, resume, invalid input, and a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import read, toolkit

from toolkit.compare.ledger import Ledger
from toolkit.job.job import Job


@pytest.mark.launch
def test_a_search_ends_with_its_budget_resumes_and_names_the_command_to_copy(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """Three settings: the user's own, smaller batches with accumulation, and activation checkpointing."""
    folder = tmp_path / "tune"
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    job += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--output_dir", str(tmp_path / "mine")]
    options = ["--num-processes", "2", "--cpu", "--keep", "preset", "--keep", "loss", "--keep", "compile"]
    options += ["--max-settings", "3", "--rounds", "2", "--trial-steps", "6", "--output-dir", str(folder)]
    words = ["tune", *options, "--", *job]

    first = toolkit(*words[:1], "--budget-minutes", "0.01", "--json", *words[1:])
    assert first.returncode == 0, first.stderr
    stopped = json.loads(first.stdout)
    assert stopped["ended"] == "the budget of 0.0 minutes, in round 1"
    assert stopped["winner"] == "yours"
    assert [each["outcome"] for each in stopped["settings"]] == ["left", "not_tried", "not_tried"]
    again = toolkit(*words)
    assert (again.returncode, "already holds a comparison" in again.stderr) == (2, True)
    other = toolkit(*words[:1], "--resume", *words[1:], "--seed", "7")
    assert (other.returncode, "holds another comparison" in other.stderr) == (2, True)

    ended = toolkit(*words[:1], "--resume", *words[1:])
    assert ended.returncode == 0, ended.stderr
    result = read(folder / "tune.json")
    records = Ledger(folder / "ledger.jsonl").read()
    assert len(records) == 6  # of which the first search ran one
    settings = {each["name"]: each for each in result["settings"]}
    assert list(settings) == ["yours", "ddp_b1x2", "ddp_b2x1_checkpointing"]
    assert all(each["outcome"] in ("left", "eliminated") and each["trials"] == 2 for each in settings.values())
    assert settings["ddp_b1x2"]["ratio_interval"][0] < settings["ddp_b1x2"]["ratio_to_yours"]
    assert f"fastest   {result['winner']}" in ended.stdout
    preset, _, arguments = result["command"].partition(" -- ")
    assert preset == "toolkit train --preset ddp --num-processes 2 --cpu"
    trained = Job.from_argv(arguments.split())
    assert trained.output_dir == str(tmp_path / "mine")
    assert trained.per_device_train_batch_size * trained.gradient_accumulation_steps == 2
    assert toolkit("report", str(folder)).returncode == 0


def test_a_dry_run_for_another_gpu_prints_what_is_pruned_and_the_time(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "128"]
    words = ["tune", "--dry-run", "--gpu", "h100", "--num-processes", "8", "--keep", "loss", "--output-dir"]
    shown = toolkit(*words, str(tmp_path / "tune"), "--", *job, "--per_device_train_batch_size", "1")
    assert shown.returncode == 0, shown.stderr
    assert "not tried, cannot win:" in shown.stdout
    assert "two rounds take" in shown.stdout
    assert not (tmp_path / "tune").exists()
