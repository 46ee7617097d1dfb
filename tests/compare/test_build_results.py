"""Rows are made of their repeats, the planner and side runs; FLOPs, MFU and cost by hand for the tiny Llama."""

from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from comparison_records import aggregate_rows, comparison, failure, node, row, trial

from toolkit.compare.build_results import side_run_columns, with_efficiency
from toolkit.compare.comparison_report import json_text
from toolkit.compare.ledger import Ledger, LedgerRecord
from toolkit.compare.results import load_results
from toolkit.compare.rows import FlopsPerToken, Row, RowKey
from toolkit.compare.specification import open_comparison
from toolkit.models.read_model import read_model
from toolkit.record.folder import RunFolder

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}
# The tiny Llama: 2 layers of q 64x64, k and v 32x64, o 64x64, three of 64x128, two norms of 64; one final norm; a
# tied embedding of 4096 x 64.
LAYER = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
P = 2 * LAYER + 64 + 4096 * 64
ROW = row(tokens_per_second_per_gpu=500.0, non_padding_tokens_per_second=800.0, num_params=P, num_trainable_params=P)
ATTENTION = 12 * 2 * 64 * 95


def row_of(*trials: LedgerRecord) -> Row:
    return aggregate_rows(comparison("ddp", repeats=len(trials)), *trials)["ddp-n2"]


def test_readings_of_a_row_are_the_largest_the_median_or_those_of_the_middle_repeat() -> None:
    """Repeat 0 has the middle speed of 0.5, 0.505 and 0.495 s per step."""
    first, unknown = {"allocator_retries": 1, "attestation_sha256": "b"}, {"bytes_of": "rss", "step": None}
    row = row_of(
        trial("ddp", 0, energy_joules=100.0, padding_fraction=0.2, memory_by_phase=unknown | {"load": 1}, **first),
        trial("ddp", 1, energy_joules=90.0, padding_fraction=0.2, memory_by_phase=unknown | {"load": 3}),
        trial("ddp", 2, energy_joules=150.0, padding_fraction=0.2, throttle_reasons=["hot"], attestation_sha256="c"),
    )
    assert (row.peak_host_bytes, row.peak_rank, row.allocator_retries) == (1002, 0, 1)
    assert (row.energy_joules, row.attestation_sha256, row.throttle_reasons) == (100.0, "b", ("hot",))
    assert (row.memory_by_phase.load, row.memory_by_phase.step) == (3, None)
    assert row.non_padding_tokens_per_second == 0.8 * (row.tokens_per_second or 0)


def test_what_no_repeat_measured_is_unknown_and_impossible_step_times_make_no_speed() -> None:
    row = row_of(trial("ddp", 0), trial("ddp", 1))
    unmeasured = ("non_padding_tokens_per_second", "peak_driver_bytes", "memory_by_phase", "energy_joules")
    assert {getattr(row, key) for key in (*unmeasured, "throttle_reasons", "startup_seconds")} == {None}
    for seconds in (0.0, 1e99):
        row = row_of(trial("ddp", 0, step_seconds=[seconds] * 8), trial("ddp", 1))
        assert (row.completed, row.tokens_per_second) == (True, None)


def test_a_row_fails_if_one_of_its_repeats_does() -> None:
    facts = failure("out_of_memory", phase="backward", measured_bytes=7)
    changes = {"status": "out_of_memory", "message": "no room", "failure": facts, "tokens_per_second": None}
    trials = [trial("ddp", r) for r in range(3)] + [trial("other", 0), trial("other", 1, **changes)]
    row = aggregate_rows(comparison("ddp", "other"), *trials)["other-n2"]
    assert (row.status, row.repeats, row.parity, row.ratio_to_reference) == ("out_of_memory", 1, None, None)
    assert (row.message, row.failure and row.failure.model_dump()) == ("1 of 2 repeats completed; no room", facts)


def test_an_unsupported_row_has_the_reason_and_ranks_no_other_row() -> None:
    trials = [trial("ddp", repeat) for repeat in range(3)]
    rows = aggregate_rows(comparison("ddp", "zeropp"), *trials, unsupported={"zeropp-n2": "needs CUDA kernels"})
    row = rows["zeropp-n2"]
    found = (row.status, row.message, row.failure and row.failure.kind)
    assert found == ("not_supported", "needs CUDA kernels", "not_supported")
    assert rows["ddp-n2"].rank is None  # nobody to be ranked with


def efficiency(model: Path, row: Row = ROW, *, checkpointing: bool = False, **changes: Any) -> Row:
    """The row after a bf16 trial of 760 tokens in two timed steps of 2 ranks x 2 sequences: 95 each."""
    problem = {"activation_checkpointing": checkpointing, "global_batch_size": 4}
    steps = {"step_tokens": [999, 400, 360], "timed_step_numbers": [2, 3], "compute_dtype": "bfloat16"}
    given = {"shape": read_model(str(model)), "environment": node("cuda", H100, H100)} | changes
    return with_efficiency(row, [trial("ddp", 0, problem=problem, **steps)], **given)


def test_a_stopped_comparison_is_reported_from_its_files_with_the_node_of_its_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = comparison("ddp", "zero2", repeats=2)
    open_comparison(tmp_path, spec, resume=False)
    code, _, err = run_command(["report", str(tmp_path)], capsys)
    assert (code, "no trial of" in err, "--resume" in err) == (2, True, True)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for record in (trial("ddp", 0), trial("zero2", 0)):
        ledger.append(record)
        folder = RunFolder(tmp_path / record.run_folder)
        folder.update_run(
            hardware={"cpu": "Z80", "cpu_count": 1, "python": "3.11", "gpus": []}, versions={"torch": "9"}
        )
    code, out, _ = run_command(["report", str(tmp_path)], capsys)
    assert (code, "Interrupted, of finished trials (2) only. " in out) == (0, True)
    stopped = load_results(tmp_path)
    assert (stopped.unfinished, [row.repeats for row in stopped.rows]) == (True, [1, 1])
    assert (stopped.environment.cpu, stopped.environment.versions) == ("Z80", {"torch": "9"})
    ledger.append(trial("ddp", 1))  # resumed, and stopped again
    assert "Interrupted, of finished trials (3) only. " in run_command(["report", str(tmp_path)], capsys)[1]
    (tmp_path / "results.json").write_text(json_text(stopped.updated(unfinished=False, trials=(trial("ddp", 0),) * 3)))
    assert "Interrupted" not in run_command(["report", str(tmp_path)], capsys)[1]


def test_flops_per_token_worked_out_by_hand(tiny_model: Path) -> None:
    """6 per parameter; attention 12 x layers x width x length, half of it causal; a tied embedding is multiplied."""
    causal = 6 * P + ATTENTION // 2
    assert efficiency(tiny_model, checkpointing=True).flops_per_token == FlopsPerToken(
        num_params=P,
        seq_length=95,
        causal=causal,
        full_attention=6 * P + ATTENTION,
        without_embeddings=causal,
        hardware=8 * P + ATTENTION // 2 + ATTENTION // 6,
    )
    adapters = efficiency(tiny_model, ROW.updated(num_params=P + 1000, num_trainable_params=1000)).flops_per_token
    assert adapters.causal == 4 * P + 6 * 1000 + ATTENTION // 2  # four per frozen parameter


def test_mfu_is_relative_to_the_dense_peak_and_counts_only_timed_steps(tiny_model: Path) -> None:
    """An H100's dense bf16 peak is 989 TFLOP/s."""
    found = efficiency(tiny_model)
    assert found.mfu == pytest.approx(500 * (6 * P + ATTENTION // 2) / 989e12, rel=1e-3)
    assert found.mfu_full_attention == pytest.approx(500 * (6 * P + ATTENTION) / 989e12, rel=1e-3)
    assert found.hfu == found.mfu  # without activation checkpointing


def test_there_is_no_mfu_without_a_shape_a_speed_or_a_peak(tiny_model: Path) -> None:
    unlisted = node("cuda", {"name": "Imaginary 9000", "memory_bytes": 1})
    without_speed = efficiency(tiny_model, ROW.updated(tokens_per_second_per_gpu=None))
    for found in (without_speed, *(efficiency(tiny_model, environment=each) for each in (node("cpu"), unlisted))):
        assert (found.mfu, found.flops_per_token is None) == (None, False)
    assert efficiency(tiny_model, shape=None) == ROW


def test_a_row_has_only_the_columns_of_its_own_completed_side_runs() -> None:
    profile = {"communication_fraction": 0.25, "exposed_communication_fraction": 0.1}
    save = {"save_seconds": 3.0, "save_bytes": 7}
    records = [trial("ddp", 0).updated(trial="ddp-n2-profile", kind="side_run", kinds=("profile",), **profile)]
    records += [trial("ddp", 0).updated(trial="ddp-n2-save", kind="side_run", kinds=("save",), status="failed", **save)]
    records += [trial("zero2", 0).updated(trial="zero2-n2-save", kind="side_run", kinds=("save",), **save)]
    records += [trial("ddp", 0)]
    by_name = {record.trial: record for record in records}
    ddp = side_run_columns(by_name, RowKey(preset="ddp", world_size=2))
    assert (ddp["communication_fraction"], ddp["save_seconds"]) == (0.25, None)
    assert side_run_columns(by_name, RowKey(preset="zero2", world_size=2))["save_bytes"] == 7
