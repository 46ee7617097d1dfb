"""What a row says beside speed: readings over repeats, efficiency and cost, the container's limits; by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.compare.efficiency import cost_per_million_tokens, efficiency, flops_per_token, mean_seq_length, peak_flops
from toolkit.compare.extra_facts import extras_of
from toolkit.compare.extras import words_of
from toolkit.compare.planned import job_of, planned_bytes
from toolkit.compare.readings import extra_readings, row_readings, trial_readings
from toolkit.compare.trials import plan_comparison
from toolkit.hardware.container import cpu_cores, cpu_limit, memory_limit_bytes
from toolkit.hardware.machine import disk_facts, gpu_facts
from toolkit.hardware.nvml import Nvml, throttle_names
from toolkit.models.read import read_model
from toolkit.plan.job import Job
from toolkit.plan.memory import plan_memory
from toolkit.presets import load_preset
from toolkit.runs.folder import RunFolder, write_json
from toolkit.runs.steps import measure

GPU = {"device": "cuda", "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}] * 2}
CPU = {"device": "cpu", "gpus": []}
# The tiny Llama: 2 layers of q 64x64, k and v 32x64, o 64x64, three of 64x128, two norms of 64; one final norm; a
# tied embedding of 49152 x 64.
LAYER = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
P = 2 * LAYER + 64 + 49152 * 64


def trial(**changes: Any) -> dict[str, Any]:
    return {
        "run_folder": "trials/a",
        "peak_driver_bytes": None,
        "allocator_retries": None,
        "memory_ladder": None,
        "energy_joules": None,
        "throttle_reasons": None,
        "attestation_sha256": None,
        "startup_seconds": None,
        "step_tokens": [999, 400, 360],
        "timed_step_numbers": [2, 3],
        "compute_dtype": "bfloat16",
        "problem": {"activation_checkpointing": False, "global_batch_size": 4},
    } | changes


def row(**changes: Any) -> dict[str, Any]:
    return {
        "run_folder": "trials/b",
        "world_size": 2,
        "tokens_per_second": 1000.0,
        "tokens_per_second_per_gpu": 500.0,
        "non_padding_tokens_per_second": 800.0,
        "padding_fraction": 0.2,
        "num_params": P,
        "num_trainable_params": P,
    } | changes


# -- readings


def test_a_row_s_readings_are_the_highest_the_middle_or_the_shown_repeat_s() -> None:
    trials = [
        trial(peak_driver_bytes=5, allocator_retries=0, energy_joules=90.0, startup_seconds=7.0, throttle_reasons=[]),
        trial(peak_driver_bytes=9, allocator_retries=1, energy_joules=100.0, startup_seconds=8.0, run_folder="trials/b")
        | {"attestation_sha256": "b", "throttle_reasons": ["hardware slowdown"]},
        trial(energy_joules=150.0, startup_seconds=30.0, attestation_sha256="c"),
    ]
    found = row_readings(row(), trials)
    assert (found["peak_driver_bytes"], found["allocator_retries"]) == (9, 1)
    assert (found["energy_joules"], found["startup_seconds"]) == (100.0, 8.0)
    assert (found["throttle_reasons"], found["attestation_sha256"]) == (["hardware slowdown"], "b")
    assert found["non_padding_tokens_per_second"] == 800.0


def test_what_nobody_measured_is_unknown() -> None:
    found = row_readings(row(tokens_per_second=None), [trial()])
    assert {key for key, value in found.items() if value is not None} == set()
    assert {value for value in extra_readings(None).values()} == {None}


def test_a_run_that_ran_out_of_memory_shows_how_far_it_came(tmp_path: Path) -> None:
    ladder = {"bytes_of": "allocated", "load": 10, "forward": 70, "backward": None, "step": None}
    write_json(tmp_path / "failure.json", {"kind": "out_of_memory", "memory_ladder": ladder})
    assert trial_readings(RunFolder(tmp_path), measure([], untimed_steps=2))["memory_ladder"] == ladder


def test_the_profiled_run_gives_communication_a_timeline_and_a_save(tmp_path: Path) -> None:
    def step(rank: int, seconds: float, sent: float, exposed: float) -> dict[str, float]:
        parts = {"communication_seconds": sent, "exposed_communication_seconds": exposed}
        return {"rank": rank, "step": 3, "step_seconds": seconds, **parts}

    lanes = {"compute": [[0.0, 0.5]], "communication": [], "data_wait": []}
    drawn = [{"rank": rank, "start_unix": 50.0 + rank / 4, "seconds": 1.0, "lanes": lanes} for rank in (0, 1)]
    profile = {"last_step": 3, "steps": [step(0, 1.0, 0.5, 0.1), step(1, 1.0, 0.3, 0.1)], "timeline": drawn}
    saves = [{"kind": "checkpoint", "step": 3, "seconds": 2.5, "bytes": 77}]
    write_json(tmp_path / "run.json", {"profile": profile, "saves": saves})
    found = extra_readings(RunFolder(tmp_path))
    assert (found["communication_fraction"], found["exposed_communication_fraction"]) == (0.4, 0.1)
    assert (found["save_seconds"], found["save_bytes"]) == (2.5, 77)
    assert found["timeline"]["step"] == 3
    assert [rank["start_seconds"] for rank in found["timeline"]["ranks"]] == [0.0, 0.25]


# -- efficiency


def test_operations_of_a_token_worked_by_hand(tiny_model: Path) -> None:
    """6 a parameter; attention 12 x layers x width x length, half of it causal; a tied table is multiplied."""
    found = flops_per_token(
        read_model(str(tiny_model)), num_params=P, num_trainable_params=P, seq_length=100, recompute=True
    )
    attention = 12 * 2 * 64 * 100
    assert found["full_attention"] == 6 * P + attention
    assert found["causal"] == 6 * P + attention // 2
    assert found["without_embeddings"] == found["causal"]
    assert found["hardware"] == 8 * P + attention // 2 + attention // 6
    assert (found["num_params"], found["seq_length"]) == (P, 100)


def test_adapters_are_four_a_frozen_and_six_a_trained_parameter(tiny_model: Path) -> None:
    shape = read_model(str(tiny_model))
    found = flops_per_token(shape, num_params=P + 1000, num_trainable_params=1000, seq_length=100, recompute=False)
    assert found["causal"] == 4 * P + 6 * 1000 + 6 * 2 * 64 * 100


def test_mfu_is_of_the_dense_peak_and_counts_timed_steps_alone(tiny_model: Path) -> None:
    """760 tokens in two timed steps of 2 ranks x 2 sequences: 95 each. An H100's dense bf16 peak is 989 TFLOP/s."""
    found = efficiency(row(), [trial()], shape=read_model(str(tiny_model)), environment=GPU, price_per_gpu_hour=3.0)
    attention = 12 * 2 * 64 * 95
    assert found["flops_per_token"]["seq_length"] == 95
    assert found["mfu"] == pytest.approx(500 * (6 * P + attention // 2) / 989e12, rel=1e-3)
    assert found["mfu_full_attention"] == pytest.approx(500 * (6 * P + attention) / 989e12, rel=1e-3)
    assert found["hfu"] == found["mfu"]  # nothing is computed twice
    assert found["cost_per_million_tokens"] == pytest.approx(3.0 * 2 / 3600 / 800 * 1e6)


def test_there_is_no_mfu_without_a_peak_a_shape_or_a_speed(tiny_model: Path) -> None:
    shape = read_model(str(tiny_model))
    none = {"environment": GPU, "price_per_gpu_hour": None}
    assert efficiency(row(), [trial()], shape=None, **none)["mfu"] is None
    assert efficiency(row(tokens_per_second_per_gpu=None), [trial()], shape=shape, **none)["mfu"] is None
    on_cpu = efficiency(row(), [trial()], shape=shape, environment=CPU, price_per_gpu_hour=None)
    assert (on_cpu["mfu"], on_cpu["flops_per_token"]["seq_length"]) == (None, 95)
    unlisted = {"device": "cuda", "gpus": [{"name": "Imaginary 9000", "memory_bytes": 1}]}
    assert peak_flops(unlisted, "bfloat16") is None
    assert peak_flops(GPU, "int8") is None


def test_cost_is_the_price_of_all_gpus_over_the_speed_of_all_ranks() -> None:
    cost = cost_per_million_tokens(tokens_per_second=5000.0, world_size=8, price_per_gpu_hour=2.25)
    assert cost == pytest.approx(1.0)  # 18 an hour is 0.005 a second, for 5,000 tokens
    assert cost_per_million_tokens(tokens_per_second=None, world_size=8, price_per_gpu_hour=2.25) is None
    assert cost_per_million_tokens(tokens_per_second=5000.0, world_size=8, price_per_gpu_hour=None) is None


def test_a_trial_without_timed_steps_has_no_length() -> None:
    assert mean_seq_length(trial(timed_step_numbers=[])) is None


# -- environment


def test_a_gpu_s_line_of_nvidia_smi() -> None:
    line = ["NVIDIA H100 80GB HBM3", "81559", "570.86.15", "700.00", "1980", "2619"]
    assert gpu_facts(line) == {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 81559 * 2**20,
        "driver": "570.86.15",
        "power_limit_watts": 700.0,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 2619,
    }
    assert gpu_facts(["A GPU", "[N/A]", "1", "[Not Supported]", "[N/A]", "[N/A]"])["power_limit_watts"] is None


def test_only_what_slows_work_is_throttling() -> None:
    assert throttle_names(0x1 | 0x2 | 0x10) == []  # idle, clocks set by the user, synchronised boost
    assert throttle_names(0x80) == ["hardware power brake"]


def test_nvml_answers_nothing_where_it_is_not() -> None:
    nvml = Nvml("no-such-uuid")
    assert (nvml.process_bytes(1), nvml.energy_joules(), nvml.throttle_reasons()) == (None, None, None)


def test_cores_of_both_versions_of_cgroups() -> None:
    assert (cpu_cores("200000 100000"), cpu_cores("max 100000"), cpu_cores("-1 100000")) == (2.0, None, None)


def test_the_smallest_limit_above_this_process_holds(tmp_path: Path) -> None:
    """Whatever this machine's own cgroups are: its version 1 or 2 tree is laid out again below a folder."""
    for controller in ("", "memory", "cpu"):
        folder = tmp_path / controller
        folder.mkdir(exist_ok=True)
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1048576\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert memory_limit_bytes(tmp_path) == 2**20
    assert cpu_limit(tmp_path) == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # version 1's word for no limit
    assert memory_limit_bytes(tmp_path) is None


def test_a_folder_s_disk_has_a_size(tmp_path: Path) -> None:
    found = disk_facts(tmp_path)
    assert 0 < found["free_bytes"] <= found["total_bytes"]


# -- runs beside the trials


def test_such_a_run_has_a_few_steps_of_which_the_last_are_profiled_and_saved() -> None:
    assert words_of(("profile", "save"), untimed_steps=2) == [
        *("--max_steps", "4", "--profile_steps", "3:4"),
        *("--save_strategy", "steps", "--save_steps", "4"),
    ]
    assert words_of(("save",), untimed_steps=0) == ["--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2"]


def test_a_row_knows_only_what_a_completed_run_beside_it_says() -> None:
    profile = {"communication_fraction": 0.25, "exposed_communication_fraction": 0.1, "timeline": None}
    save = {"save_seconds": 3.0, "save_bytes": 7}
    beside = {
        "ddp-n2-profile": {"trial": "ddp-n2-profile", "status": "completed", "kinds": ["profile"], **profile},
        "ddp-n2-save": {"trial": "ddp-n2-save", "status": "failed", "kinds": ["save"], **save},
        "zero2-n2-save": {"trial": "zero2-n2-save", "status": "completed", "kinds": ["save"], **save},
        "ddp-n2-r0": {"trial": "ddp-n2-r0", "status": "completed"},
    }
    found = extras_of(beside, "ddp-n2")
    assert (found["communication_fraction"], found["save_seconds"]) == (0.25, None)
    assert extras_of(beside, "zero2-n2")["save_bytes"] == 7


# -- the plan


def test_a_row_s_arguments_are_the_planner_s_job() -> None:
    words = {
        "per_device_train_batch_size": "4",
        "max_seq_length": "512",
        "gradient_checkpointing": "true",
        "lora_r": "8",
    }
    assert job_of(words) == Job(
        per_device_train_batch_size=4, max_seq_length=512, activation_checkpointing=True, lora_r=8
    )
    assert job_of({}).per_device_train_batch_size == 8  # transformers' default


def test_a_row_on_gpus_has_the_planner_s_peaks_and_one_on_a_cpu_none(tiny_model: Path) -> None:
    def compared(*, cpu: bool) -> Any:
        arguments = ["--model_name_or_path", str(tiny_model), "--dataset", "rows.jsonl", "--max_steps", "4"]
        return plan_comparison(
            {"zero2": load_preset("zero2")},
            loads={"zero2": "zero2"},
            extra_arguments={},
            num_processes=[2],
            training_arguments=arguments,
            untimed_steps=2,
            reference=None,
            cpu=cpu,
        )

    shape = read_model(str(tiny_model))
    found = planned_bytes(compared(cpu=False), "zero2", 2, shape=shape)
    plan = plan_memory(shape, load_preset("zero2"), world_size=2, job=Job(per_device_train_batch_size=8))
    assert found["planned_allocated_bytes"] == plan.peak.allocated_bytes
    assert found["planned_peak_bytes"] == plan.planned_peak_bytes
    assert set(planned_bytes(compared(cpu=True), "zero2", 2, shape=shape).values()) == {None}
    assert set(planned_bytes(compared(cpu=False), "zero2", 2, shape=None).values()) == {None}
