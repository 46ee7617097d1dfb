"""What is known of a trial before it runs: memory and duration, from the planner or from the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison_records import comparison_on_gpus, planned_step_seconds, probe, trial

from toolkit.compare.ledger import SideRunRecord
from toolkit.compare.predictions import ExpectedDuration, PlannedMemory, expected_duration, planned_memory
from toolkit.compare.rows import RowKey
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset

ZERO2 = RowKey(preset="zero2", world_size=2)
H100 = find_gpu("h100-sxm")


def test_a_row_on_gpus_has_the_planner_s_peaks_and_one_on_a_cpu_none(tiny_model: Path) -> None:
    shape, on_gpus = read_model(str(tiny_model)), comparison_on_gpus(tiny_model)
    plan = plan_memory(
        shape,
        load_preset("zero2"),
        world_size=2,
        job=PlannedJob(per_device_train_batch_size=8, max_seq_length=512),
    )
    assert planned_memory(on_gpus, ZERO2, shape=shape) == (plan.planned_peak_bytes, plan.peak.allocated_bytes)
    assert planned_memory(comparison_on_gpus(tiny_model, cpu=True), ZERO2, shape=shape) == PlannedMemory()
    assert planned_memory(on_gpus, ZERO2, shape=None) == PlannedMemory()


def test_the_planner_s_step_times_count_from_the_earliest_stop_to_the_last_step(tiny_model: Path) -> None:
    """Two untimed steps and ten timed ones: decided after step 15, stopped after step 17."""
    low, high = planned_step_seconds(tiny_model)
    shape = read_model(str(tiny_model))
    early = comparison_on_gpus(tiny_model, target_interval=0.01)
    assert expected_duration(ZERO2, {}, early, shape=shape, gpu=H100) == ExpectedDuration(
        pytest.approx(17 * low), pytest.approx(30 * high), "planner"
    )
    all_steps = comparison_on_gpus(tiny_model)
    assert expected_duration(ZERO2, {}, all_steps, shape=shape, gpu=H100) == ExpectedDuration(
        pytest.approx(30 * low), pytest.approx(30 * high), "planner"
    )


def test_a_row_s_own_trials_come_before_the_planner_and_other_rows_trials_after_it(tiny_model: Path) -> None:
    shape, spec = read_model(str(tiny_model)), comparison_on_gpus(tiny_model)
    own = {"zero2-n2-r1": trial("zero2", 1, wall_seconds=90.0), "zero2-n2-r2": trial("zero2", 2, wall_seconds=80.0)}
    others = {"ddp-n2-r0": trial("ddp", 0, wall_seconds=70.0)}
    assert expected_duration(ZERO2, own | others, spec, shape=shape, gpu=H100) == (80.0, 90.0, "trials")
    planned = expected_duration(ZERO2, others, spec, shape=shape, gpu=H100)
    assert planned is not None
    assert planned.source == "planner"
    assert expected_duration(ZERO2, others, spec, shape=shape, gpu=None) == (70.0, 70.0, "other trials")
    on_cpu = comparison_on_gpus(tiny_model, cpu=True)
    assert expected_duration(ZERO2, {}, on_cpu, shape=shape, gpu=H100) is None


def test_probes_and_side_runs_predict_no_trial_s_duration(tiny_model: Path) -> None:
    profile = SideRunRecord.of(trial("zero2", 0, wall_seconds=9.0), trial="zero2-n2-profile", kinds=["profile"])
    records = {"zero2-n2-b4": probe("zero2", 4, wall_seconds=9.0), "zero2-n2-profile": profile}
    assert expected_duration(ZERO2, records, comparison_on_gpus(tiny_model)) is None
