"""Planned step times, compared with published runs and with parts worked out by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from published_runs import MPT, mpt, published

from toolkit.hardware.gpu_table import custom_gpu, find_gpu
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.plan.step_time import StepTime, step_time
from toolkit.presets import load_preset


def speed_of(row: dict[str, str]) -> StepTime:
    job = PlannedJob(
        per_device_train_batch_size=int(row["mbs"]),
        max_seq_length=int(row["seq"]),
        gradient_accumulation_steps=int(row["gacc"]),
        activation_checkpointing=row["ac"] == "True",
    )
    shape, preset = mpt(*MPT[row["model"]]), load_preset("fsdp2")
    setup = TrainingSetup(shape=shape, preset=preset, world_size=int(row["gpus"]), job=job)
    speed = step_time(setup, Interconnect(gpu=find_gpu(row["gpu"]), world_size=setup.world_size))
    assert speed is not None
    return speed


def test_published_speeds_lie_inside_the_range_and_the_range_is_narrow() -> None:
    """No constant of the model was taken from these rows."""
    rows = published()
    assert all(mpt(*MPT[row["model"]]).num_params == int(row["params"]) for row in rows)
    inside, widths = 0, []
    for row in rows:
        low, high = speed_of(row).tokens_per_second_per_gpu
        inside += low <= float(row["tok_s_gpu"]) <= high
        widths.append(high / low)
    assert inside == len(rows) == 41
    assert statistics.median(widths) < 2.7
    assert max(widths) < 3.6


JOB = PlannedJob(per_device_train_batch_size=4, max_seq_length=1024)
SETUP = TrainingSetup(shape=mpt(*MPT["125m"]), preset=load_preset("ddp"), world_size=8, job=JOB)
A100 = Interconnect(gpu=find_gpu("a100-80gb"), world_size=8)


def timed(preset: str, **job: Any) -> StepTime:
    setup = replace(SETUP, preset=load_preset(preset), job=replace(JOB, **job))
    speed = step_time(setup, A100)
    assert speed is not None
    return speed


def test_everything_overlaps_at_best_and_nothing_at_worst() -> None:
    speed = timed("ddp")
    assert speed.step_seconds[0] == pytest.approx(
        max(speed.compute_seconds[0], speed.communication_seconds[0]) + speed.optimizer_seconds[0]
    )
    parts = (speed.compute_seconds, speed.communication_seconds, speed.offload_seconds, speed.optimizer_seconds)
    assert speed.step_seconds[1] == pytest.approx(sum(part[1] for part in parts))
    serial = timed("zero1")  # DeepSpeed does not overlap below stage 3
    assert serial.step_seconds[0] >= serial.compute_seconds[0] + serial.communication_seconds[0]


def test_adam_moves_28_bytes_per_parameter_and_checkpointing_costs_time_that_mfu_does_not_count() -> None:
    params = SETUP.shape.num_params
    assert timed("ddp").optimizer_seconds[0] == pytest.approx(28 * params / (2039e9 * 0.95))
    assert timed("zero1").optimizer_seconds[0] == pytest.approx(28 * params / 8 / (2039e9 * 0.95))
    plain, recomputed = timed("ddp"), timed("ddp", activation_checkpointing=True)
    assert recomputed.flops_per_token == plain.flops_per_token
    assert recomputed.compute_seconds[1] == pytest.approx(4 / 3 * plain.compute_seconds[1])


def test_offload_to_host_and_disk_slows_a_step_down() -> None:
    speeds = [timed(name) for name in ("zero3", "zero3_cpu_offload", "zero3_nvme_offload")]
    assert speeds[0].offload_seconds == (0.0, 0.0)
    assert speeds[0].step_seconds[1] < speeds[1].step_seconds[1] < speeds[2].step_seconds[1]
    assert speeds[1].offload_efficiency is not None
    low, high = speeds[1].offload_efficiency
    assert 0 < low < high < 1
    assert speeds[0].offload_efficiency is None


def test_a_gpu_without_a_peak_in_the_dtype_has_no_step_time_and_a_small_models_range_is_in_order() -> None:
    """It moves more bytes per operation than any published model, so the published share of the peak does not apply."""
    v100 = Interconnect(gpu=find_gpu("v100-32gb"), world_size=8)
    assert step_time(SETUP, v100) is None
    assert step_time(SETUP, replace(v100, gpu=custom_gpu(None, memory_gib=24))) is None
    speed = step_time(replace(SETUP, shape=mpt(width=64, layers=2)), A100)
    assert speed is not None
    assert speed.compute_seconds[0] <= speed.compute_seconds[1]
    assert speed.step_seconds[0] <= speed.step_seconds[1]
