"""`toolkit simulate pipeline`: JSON, schedules that are left out, times, and input that is refused."""

import json
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG

from toolkit.parallel.pipeline_schedule import SCHEDULES

SIZES = ["simulate", "pipeline", "--stages", "4", "--micro-batches", "8"]
TIMES = ["--forward-ms", "10", "--backward-ms", "15"]
MODEL = ["--model", str(LLAMA_8B_CONFIG), "--gpu", "h100"]


def test_json_has_a_row_per_named_schedule_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of([*SIZES, *TIMES, "--schedule", "gpipe", "--schedule", "1f1b"], capsys)
    assert [row["schedule"] for row in found["schedules"]] == ["gpipe", "1f1b"]
    row = found["schedules"][1]
    assert (row["stages"], row["micro_batches"], row["peak_micro_batches"]) == (4, 8, [4, 3, 2, 1])
    assert row["step_seconds"] == pytest.approx((8 + 3) * 0.025)
    assert row["bubble_fraction"] == pytest.approx(3 / 11)
    assert found["predicted_over_measured"] == [0.04, 0.18]
    assert [row["schedule"] for row in json_of([*SIZES, *TIMES], capsys)["schedules"]] == list(SCHEDULES)


def test_schedules_that_are_impossible_with_these_sizes_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    few = json_of([*SIZES, "--micro-batches", "3"], capsys)
    assert [row["schedule"] for row in few["schedules"]] == ["gpipe", "interleaved_1f1b"]
    assert few["left_out"][0] == "1f1b: --micro-batches is 3, but 1f1b on 4 stages needs 4 or more"


def test_chunks_are_those_of_the_interleaved_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of([*SIZES, "--chunks", "3"], capsys)
    chunks = {row["schedule"]: row["chunks"] for row in found["schedules"]}
    assert (chunks["interleaved_1f1b"], chunks["1f1b"]) == (3, 1)
    code, _, err = run_command([*SIZES, "--chunks", "3", "--schedule", "1f1b"], capsys)
    assert (code, err) == (0, "warning: --chunks has no effect: these schedules have one chunk per stage\n")


def test_text_has_a_table_timelines_and_the_range_of_the_miss(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command([*SIZES, *TIMES, "--schedule", "1f1b"], capsys)
    assert code == 0
    assert "forward 10 ms, backward 15 ms, transfer 0 ms" in out
    assert "27.3 %" in out
    assert sum(line.startswith("stage ") for line in out.splitlines()) == 4
    assert "4 to 18 % above the measured" in out
    without = run_command([*SIZES, *TIMES, "--schedule", "1f1b", "--no-timeline"], capsys)[1]
    assert not [line for line in without.splitlines() if line.startswith("stage ")]


def test_a_model_gives_times_and_memory_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    row = json_of([*SIZES, *MODEL, "--schedule", "1f1b"], capsys)["schedules"][0]
    low, high = row["step_seconds_range"]
    assert low < row["step_seconds"] < high
    assert row["activation_bytes"][1] > 1.4 * row["activation_bytes"][2]  # 3 and 2 micro-batches in flight
    assert row["state_bytes"][1] == row["state_bytes"][2]
    assert all(peak > states for peak, states in zip(row["peak_bytes"], row["state_bytes"], strict=True))


def test_the_report_is_one_page_with_each_timeline(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command([*SIZES, *MODEL, "--output-dir", str(tmp_path / "out")], capsys)
    assert (code, "stage 3" in out) == (0, True)
    page = (tmp_path / "out" / "simulation.html").read_text()
    rows = json.loads((tmp_path / "out" / "simulation.json").read_text())["schedules"]
    assert page.count('aria-label="stage 3"><path d="M') == page.count("<details") == len(rows)
    assert page.count("<details open>") == 1
    assert "://" not in page
