"""How long a comparison may take before anything is paid for: from the planner's step time, or from trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import toolkit
from test_parity import comparison, trial

from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.expected import Expected, expected_time
from toolkit.compare.trials import Trial
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read import read_model
from toolkit.plan.job import Job
from toolkit.plan.planner import Request, make_plans
from toolkit.presets import load_preset

FIRST = Trial(preset="zero2", num_processes=2, repeat=0)
H100 = find_gpu("h100-sxm")


def on_gpus(model: Path, **changes: Any) -> Any:
    words = ["--model_name_or_path", str(model), "--max_steps", "30", "--max_seq_length", "512"]
    asked = comparison("zero2", training_arguments=words, loads={"zero2": "zero2"}, repeats=2, **changes)
    return replace(asked, cpu=False, reference="zero2")


def planned_step(model: Path) -> tuple[float, float]:
    """As `toolkit plan` gives it."""
    job = Job(per_device_train_batch_size=8, max_seq_length=512)
    request = Request(shape=read_model(str(model)), presets=[load_preset("zero2")], world_sizes=[2], job=job, gpu=H100)
    (plan,) = make_plans(request)
    assert plan.speed is not None
    return plan.speed.step_seconds


def test_a_trials_steps_are_the_planners_interval_from_the_first_that_may_end_it_to_the_last(tiny_model: Path) -> None:
    """Two untimed steps and ten timed ones: asked after step 15, over after step 17."""
    low, high = planned_step(tiny_model)
    shape = read_model(str(tiny_model))
    found = expected_time(FIRST, {}, on_gpus(tiny_model, target_interval=0.01), shape=shape, gpu=H100)
    assert found == Expected(pytest.approx(17 * low), pytest.approx(30 * high), "planner")
    to_the_end = expected_time(FIRST, {}, on_gpus(tiny_model), shape=shape, gpu=H100)
    assert to_the_end == Expected(pytest.approx(30 * low), pytest.approx(30 * high), "planner")


def test_a_trials_own_ledger_is_believed_before_the_planner_and_others_after_it(tiny_model: Path) -> None:
    shape, asked = read_model(str(tiny_model)), on_gpus(tiny_model)
    own = {"zero2-n2-r1": trial("zero2", 1, wall_seconds=90.0), "zero2-n2-r2": trial("zero2", 2, wall_seconds=80.0)}
    others = {"ddp-n2-r0": trial("ddp", 0, wall_seconds=70.0)}
    assert expected_time(FIRST, own | others, asked, shape=shape, gpu=H100) == Expected(80.0, 90.0, "trials")
    found = expected_time(FIRST, others, asked, shape=shape, gpu=H100)
    assert found is not None
    assert found.source == "planner"
    assert expected_time(FIRST, others, asked, shape=shape, gpu=None) == Expected(70.0, 70.0, "other trials")
    assert expected_time(FIRST, {}, replace(asked, cpu=True), shape=shape, gpu=H100) is None


def test_probes_and_runs_beside_the_trials_say_nothing_of_a_trials_length(tiny_model: Path) -> None:
    short = trial("zero2", 0, wall_seconds=9.0)
    ledger = {
        "zero2-n2-b4": short | {"trial": "zero2-n2-b4"},
        "zero2-n2-profile": short | {"trial": "zero2-n2-profile"},
    }
    assert expected_time(FIRST, ledger, on_gpus(tiny_model)) is None


def test_a_dry_run_gives_duration_and_cost_as_an_interval_and_says_whose_it_is(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Two trials of 30 steps on two GPUs each, at 3,600,000 an hour: 1,000 a GPU-second."""
    shape, price = read_model(str(tiny_model)), 3.6e6
    said = dry_run_text(on_gpus(tiny_model), tmp_path, {}, price_per_gpu_hour=price, shape=shape, gpu=H100).splitlines()
    low, high = (2 * 30 * 2 * 1000 * seconds for seconds in planned_step(tiny_model))
    assert f"at {low:,.2f} to {high:,.2f}; nothing was started" in said[-2]
    assert "of steps, by the planner; predicted memory" in said[0]
    assert said[-1].startswith("durations by the planner are of steps on h100-sxm, with rows of full length; starting,")


def test_a_dry_run_plans_for_gpus_that_are_not_here_and_only_a_dry_run_does(tiny_model: Path, faq_alpaca: Path) -> None:
    words = ["compare", "--preset", "ddp", "--num-processes", "8", "--output", "nowhere", "--gpu", "h100-sxm"]
    job = ["--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_steps", "20"]
    planned = toolkit(*words, "--dry-run", *job)
    assert (planned.returncode, "by the planner" in planned.stdout) == (0, True), planned.stderr
    refused = toolkit(*words, *job)
    assert (refused.returncode, "--gpu belongs to --dry-run" in refused.stderr) == (2, True)


def test_on_a_cpu_a_dry_run_says_that_nobody_knows(tmp_path: Path) -> None:
    said = dry_run_text(comparison("ddp", loads={"ddp": "ddp"}), tmp_path, {}, price_per_gpu_hour=2.0).splitlines()
    assert said[-2] == "3 of 3 trials to run, in n/a, at n/a; nothing was started"
    assert said[-1] == "on a CPU no duration is known before a first trial: run it, stop it, and look again"
