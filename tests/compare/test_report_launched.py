"""One real comparison with side runs: what it measures, and the page shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import read, toolkit

from toolkit.compare.ledger import Ledger

pytestmark = pytest.mark.launch
P = 3_219_776


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Path:
    """`zero2` once, and a side run with a profile and a checkpoint."""
    folder = tmp_path_factory.mktemp("report") / "cmp"
    options = ["--repeats", "1", "--profile", "--measure-save", "--price-per-gpu-hour", "2"]
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    job += ["--max_steps", "4", "--per_device_train_batch_size", "2"]
    words = ["compare", "--preset", "zero2", "--num-processes", "2", "--output", str(folder), "--cpu", *options]
    ended = toolkit(*words, "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "--price-per-gpu-hour has no effect" in ended.stderr
    return folder


def test_a_real_row_has_memory_by_phase_flops_and_start_up(comparison: Path) -> None:
    (row,) = read(comparison / "results.json")["rows"]
    memory = row["memory_by_phase"]
    assert memory["bytes_of"] == "rss"
    assert all(4 * P < memory[rung] <= row["peak_host_bytes"] for rung in ("load", "forward", "backward", "step"))
    assert row["flops_per_token"]["num_params"] == P
    attention = 6 * 2 * 64 * row["flops_per_token"]["seq_length"]
    assert row["flops_per_token"]["causal"] == 6 * P + attention
    assert 0 < row["non_padding_tokens_per_second"] <= row["tokens_per_second"]
    assert 0 < row["startup_seconds"] < row["wall_seconds"]
    assert len(row["attestation_sha256"]) == 64
    gpu_only = ("mfu", "hfu", "energy_joules", "throttle_reasons", "peak_driver_bytes", "cost_per_million_tokens")
    assert {row[key] for key in gpu_only} == {None}


def test_the_side_run_measures_communication_and_a_checkpoint(comparison: Path) -> None:
    (row,) = read(comparison / "results.json")["rows"]
    assert 0 < row["exposed_communication_fraction"] <= row["communication_fraction"] < 1
    assert row["save_seconds"] > 0
    assert row["save_bytes"] > 12 * P  # weights, and AdamW's two states, in fp32
    assert (row["timeline"]["step"], [rank["rank"] for rank in row["timeline"]["ranks"]]) == (4, [0, 1])
    assert "One step of every rank" in (comparison / "report.html").read_text()
    assert list(Ledger(comparison / "ledger.jsonl").read()) == ["zero2-n2-r0", "zero2-n2-profile-save"]
    assert not list(comparison.glob("extras/*/checkpoint-*"))


def test_no_speed_counts_the_side_run(comparison: Path) -> None:
    found = read(comparison / "results.json")
    assert [trial["trial"] for trial in found["trials"]] == ["zero2-n2-r0"]
    assert found["rows"][0]["repeats"] == 1


def test_the_environment_has_disk_and_limits(comparison: Path) -> None:
    found = read(comparison / "results.json")["environment"]
    assert 0 < found["disk"]["free_bytes"] <= found["disk"]["total_bytes"]
    assert found["links"] is None
    assert found["memory_limit_bytes"] is None or found["memory_limit_bytes"] > 0


@pytest.mark.gpu
def test_on_a_gpu_memory_by_phase_is_of_the_allocator(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> None:
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    job += ["--max_steps", "4", "--save_strategy", "no", "--save_model", "false", "--output_dir", str(tmp_path / "run")]
    ended = toolkit("train", "--preset", "single", "--num-processes", "1", "--no-cpu", "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured = read(tmp_path / "run" / "run.json")["measured"]
    memory = measured["memory_by_phase"]
    assert memory["bytes_of"] == "allocated"
    assert 4 * P <= memory["load"] < memory["forward"]
    assert memory["load"] + 8 * P <= memory["step"] <= measured["peak_allocated_bytes"]  # AdamW's two fp32 states
