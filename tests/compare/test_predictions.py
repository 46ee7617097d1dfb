"""A dry run: each trial's memory, duration and cost, from the planner or the ledger, and nothing that starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, comparison_on_gpus, planned_step_seconds, probe, trial

from toolkit.compare.ledger import Ledger
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import (
    announcement,
    dry_run,
    dry_run_text,
    expected_duration,
    planned_columns,
    planned_memory,
)
from toolkit.compare.rows import RowKey
from toolkit.compare.specification import ComparisonSpec
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset

ZERO2 = RowKey(preset="zero2", world_size=2)
H100 = find_gpu("h100-sxm")


def test_a_row_on_gpus_has_the_planner_s_peaks_and_one_on_a_cpu_none(tiny_model: Path) -> None:
    shape, on_gpus = read_model(str(tiny_model)), comparison_on_gpus(tiny_model)
    job = PlannedJob(per_device_train_batch_size=8, max_seq_length=512)
    plan = plan_memory(shape, load_preset("zero2"), world_size=2, job=job)
    on_cpu = comparison_on_gpus(tiny_model, cpu=True)
    assert planned_memory(on_gpus, ZERO2, shape=shape) == plan
    peaks = [planned_columns(spec, ZERO2, shape=shape).get("planned_peak_bytes") for spec in (on_gpus, on_cpu)]
    assert peaks == [plan.planned_peak_bytes, None]
    assert planned_memory(on_gpus, ZERO2, shape=None) is None


def test_a_row_on_a_cpu_has_the_planned_states_of_a_gpu_in_bf16_or_in_the_dtype_given(tiny_model: Path) -> None:
    """ZeRO-2 holds bf16 weights of 2 bytes; with `--bf16 false` everything is in fp32, as on the CPU."""
    shape, on_cpu = read_model(str(tiny_model)), comparison_on_gpus(tiny_model, cpu=True)
    in_fp32 = on_cpu.model_copy(update={"training_arguments": (*on_cpu.training_arguments, "--bf16", "false")})
    plans = [planned_memory(spec, ZERO2, shape=shape) for spec in (on_cpu, in_fp32)]
    assert [plan and plan.states.parameter_bytes // shape.num_params for plan in plans] == [2, 4]


def test_the_planner_s_step_times_count_from_the_earliest_stop_to_the_last_step(tiny_model: Path) -> None:
    """Two untimed steps and ten timed ones: decided after step 15, stopped after step 17."""
    (low, high), shape = planned_step_seconds(tiny_model), read_model(str(tiny_model))
    for target_interval, fewest in ((0.01, 17), (None, 30)):
        spec = comparison_on_gpus(tiny_model, target_interval=target_interval)
        span = pytest.approx(fewest * low), pytest.approx(30 * high), "planner"
        assert expected_duration(ZERO2, {}, spec, shape=shape, gpu=H100) == span


def test_a_row_s_own_trials_come_before_the_planner_and_other_rows_trials_after_it(tiny_model: Path) -> None:
    shape, spec = read_model(str(tiny_model)), comparison_on_gpus(tiny_model)
    own = {"zero2-n2-r1": trial("zero2", 1, wall_seconds=90.0), "zero2-n2-r2": trial("zero2", 2, wall_seconds=80.0)}
    others = {"ddp-n2-r0": trial("ddp", 0, wall_seconds=70.0)}
    assert expected_duration(ZERO2, own | others, spec, shape=shape, gpu=H100) == (80.0, 90.0, "trials")
    planned = expected_duration(ZERO2, others, spec, shape=shape, gpu=H100)
    assert planned.source == "planner"
    assert expected_duration(ZERO2, others, spec, shape=shape, gpu=None) == (70.0, 70.0, "other trials")
    on_cpu = comparison_on_gpus(tiny_model, cpu=True)
    profile = trial("zero2", 0, wall_seconds=9.0).updated(trial="zero2-n2-profile", kind="side_run", kinds=("profile",))
    records = {"zero2-n2-b4": probe("zero2", 4, wall_seconds=9.0), "zero2-n2-profile": profile}  # not trials
    assert expected_duration(ZERO2, records, on_cpu, shape=shape, gpu=H100) is None


def options(folder: Path, **changes: Any) -> CompareOptions:
    return CompareOptions(**{"output_dir": folder, "num_processes": ("2",), "cpu": True, "dry_run": True} | changes)


def lines_of(given: CompareOptions, spec: ComparisonSpec, unsupported: dict[str, str]) -> list[str]:
    planned = json.loads(json.dumps(dry_run(given, spec, unsupported)))  # as another program reads it
    return dry_run_text(planned, spec, given.price_per_gpu_hour).splitlines()


def test_a_dry_run_reads_the_ledger_says_why_a_trial_will_not_run_and_estimates_the_cost(tmp_path: Path) -> None:
    """Trials of 90 s are in the ledger; the only one left takes as long, on two GPUs at 4 per hour."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for record in (trial("ddp", 0, wall_seconds=90.0), trial("zero2", 0, status="failed", wall_seconds=90.0)):
        ledger.append(record)
    spec = comparison("ddp", "zero2", "zeropp", repeats=2)
    lines = lines_of(options(tmp_path, price_per_gpu_hour=4.0), spec, {"zeropp-n2": "no kernels"})
    assert lines[-1] == "1 of 6 trials to run, in 90.00 s, at 0.20; nothing was started"
    outlooks = dict(line.partition("] ")[2].split(": ", 1) for line in lines if line.startswith("["))
    assert outlooks["ddp on 2 processes, repeat 1"] == "completed, already in the ledger"
    assert outlooks["zero2 on 2 processes, repeat 2"] == (
        "not run, since zero2 on 2 processes, repeat 1 ended as failed"
    )
    assert outlooks["zeropp on 2 processes, repeat 1"] == "not supported here: no kernels"
    assert any("--num_processes 2 -m toolkit.train" in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_a_comparison_announces_its_trials_why_so_many_and_how_long_they_take(tmp_path: Path) -> None:
    spec = comparison("ddp", "zero2", "zeropp")
    because = "; repeats tell a difference from noise, `--repeats 1` makes single runs"
    unsupported = {"zeropp-n2": "no kernels"}
    assert announcement(options(tmp_path), spec, unsupported) == (
        f"2 presets x 3 repeats, 6 trials to run: how long is known after the first{because}"
    )
    Ledger(tmp_path / "ledger.jsonl").append(trial("ddp", 0, wall_seconds=90.0))
    assert announcement(options(tmp_path), spec, unsupported) == (
        f"2 presets x 3 repeats, 5 trials to run: 7 min 30 s in all{because}"
    )
    single = comparison("ddp", repeats=1)
    assert announcement(options(tmp_path), single, {}).startswith("1 preset x 1 repeat, no trials to run")


def test_planned_durations_and_costs_are_ranges_with_their_source(tmp_path: Path, tiny_model: Path) -> None:
    """Two trials of 30 steps on two GPUs each, at 360,000 per hour: 100 per GPU-second."""
    on_h100 = options(tmp_path, cpu=None, gpu="h100-sxm", price_per_gpu_hour=3.6e5)
    lines = lines_of(on_h100, comparison_on_gpus(tiny_model), {})
    low, high = (2 * 30 * 2 * 100 * seconds for seconds in planned_step_seconds(tiny_model))
    assert f"at {low:,.2f} to {high:,.2f}; nothing was started" in lines[-2]
    assert "of steps, by the planner; predicted memory" in lines[0]
    assert lines[-1].startswith("durations by the planner are of steps on h100-sxm, with rows of full length; starting")


def test_a_dry_run_reports_the_longest_search_and_the_sizes_already_tried(tmp_path: Path, faq_alpaca: Path) -> None:
    words = ("--model_name_or_path", "m", "--dataset", str(faq_alpaca), "--per_device_train_batch_size", "4")
    spec = comparison("ddp", "zero2", find_max_batch=32, training_arguments=words)
    Ledger(tmp_path / "ledger.jsonl").append(probe("zero2", 4))
    lines = lines_of(options(tmp_path), spec, {})
    assert lines[0] == "ddp-n2: its largest per-GPU batch is searched first, from 4 to 32, in runs of two steps"
    assert lines[1] == "zero2-n2: of per-GPU batches up to 32, 4 were tried, and 4 runs"
