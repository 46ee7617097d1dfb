"""A dry run: the order of the trials, their durations and costs, and nothing that starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from comparison_records import comparison, comparison_on_gpus, planned_step_seconds, probe, trial

from toolkit.compare.ledger import Ledger
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import dry_run_text


def options(folder: Path, **changes: Any) -> CompareOptions:
    return CompareOptions(**{"output_dir": folder, "num_processes": ("2",), "cpu": True, "dry_run": True} | changes)


def test_a_dry_run_estimates_the_cost_from_the_ledger(tmp_path: Path) -> None:
    """Two trials of 90 s are in the ledger; the other of each row takes as long on two GPUs at 4 per hour."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for preset in ("ddp", "zero2"):
        ledger.append(trial(preset, 0, wall_seconds=90.0))
    text = dry_run_text(options(tmp_path, price_per_gpu_hour=4.0), comparison("ddp", "zero2", repeats=2), {})
    assert text.splitlines()[-1] == "2 of 4 trials to run, in 3 min 00 s, at 0.40; nothing was started"


def test_planned_durations_and_costs_are_ranges_with_their_source(tmp_path: Path, tiny_model: Path) -> None:
    """Two trials of 30 steps on two GPUs each, at 360,000 per hour: 100 per GPU-second."""
    on_h100 = options(tmp_path, cpu=None, gpu="h100-sxm", price_per_gpu_hour=3.6e5)
    lines = dry_run_text(on_h100, comparison_on_gpus(tiny_model), {}).splitlines()
    low, high = (2 * 30 * 2 * 100 * seconds for seconds in planned_step_seconds(tiny_model))
    assert f"at {low:,.2f} to {high:,.2f}; nothing was started" in lines[-2]
    assert "of steps, by the planner; predicted memory" in lines[0]
    assert lines[-1].startswith("durations by the planner are of steps on h100-sxm, with rows of full length; starting")


def test_only_a_dry_run_can_plan_for_gpus_that_this_node_lacks(
    tiny_model: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--preset", "ddp", "--num-processes", "8", "--output", "nowhere", "--gpu", "h100-sxm"]
    job = ["--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_steps", "20"]
    code, out, err = run_command([*words, "--dry-run", *job], capsys)
    assert (code, "by the planner" in out) == (0, True), err
    code, _, err = run_command([*words, *job], capsys)
    assert (code, "--gpu needs --dry-run" in err) == (2, True)


def test_on_a_cpu_the_duration_is_unknown_before_a_first_trial(tmp_path: Path) -> None:
    lines = dry_run_text(options(tmp_path, price_per_gpu_hour=2.0), comparison("ddp"), {}).splitlines()
    assert lines[-2] == "3 of 3 trials to run, in n/a, at n/a; nothing was started"
    assert lines[-1] == "on a CPU no duration is known before a first trial: run one, stop, and repeat the dry run"


def test_a_dry_run_reports_the_longest_search_and_the_sizes_already_tried(tmp_path: Path, faq_alpaca: Path) -> None:
    words = ("--model_name_or_path", "m", "--dataset", str(faq_alpaca), "--per_device_train_batch_size", "4")
    spec = comparison("ddp", "zero2", find_max_batch=32, training_arguments=words)
    Ledger(tmp_path / "ledger.jsonl").append(probe("zero2", 4))
    lines = dry_run_text(options(tmp_path), spec, {}).splitlines()
    assert lines[0] == "ddp-n2: its largest micro-batch is searched first, from 4 to 32: at most 8 runs of 2 steps"
    assert lines[1] == "zero2-n2: of micro-batches up to 32, 4 were tried, and 4 runs"
