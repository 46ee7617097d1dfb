"""`make gpu-check`: it resumes, keeps to its time, makes a row of what fails, and writes a file without names."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, cpu_environment, run_bash, run_captured

sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

import check  # noqa: E402
import parts  # noqa: E402
import small_job  # noqa: E402

from toolkit.entry_point import exit_code_of  # noqa: E402

SECRET = "hf_AbCdEfGhIjKlMnOp"
NOTE = f"cannot read /home/someone/model on {socket.gethostname()} with {SECRET}"


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu/check.py", *map(str, words)])
    return exit_code_of(check.main)


def part_of(code: str, rows: list[parts.Row], **given: Any) -> parts.Part:
    command = [sys.executable, "-c", code]
    return parts.Part(**{"minutes": 1, **given}, teaches="a test", steps=lambda *_: [("step", command, lambda: rows)])


@pytest.fixture
def three_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A part that ends, one that fails, and one that takes longer than its time; each adds a line to the file."""
    calls = tmp_path / "calls"
    noted = f"open({str(calls)!r}, 'a').write('{{}}\\n')\n"
    made = {
        "ends": part_of(noted.format("ends"), [parts.row_of("a", "states", 110, 100)]),
        "fails": part_of(noted.format("fails") + "raise SystemExit('error: ' + " + repr(NOTE) + ")", []),
        "slow": part_of(noted.format("slow") + "import time; time.sleep(60)", parts.unmeasured("b", "not reached")),
    }
    monkeypatch.setattr(check, "PARTS", made)
    monkeypatch.setattr(check, "TINY_MINUTES", 0.1)
    return calls


def test_parts_take_ten_minutes_at_most_and_45_in_all_and_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    minutes = [part.minutes for part in parts.PARTS.values()]
    assert max(minutes) <= 10
    assert sum(minutes) <= 45
    assert run(monkeypatch, "--output", tmp_path, "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(parts.PARTS)


def test_a_node_without_a_gpu_ends_with_two_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "count_gpus", lambda: 0)
    assert run(monkeypatch, "--output", tmp_path / "out") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: no GPU is visible, expected one or more NVIDIA GPUs"
    assert "GPU_CHECK_ARGS=--tiny" in hint
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_or_takes_too_long_is_a_row_and_finished_parts_are_not_run_again(
    three_parts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(monkeypatch, "--output", output, "--tiny") == 0
    assert three_parts.read_text().split() == ["ends", "fails", "slow"]
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines()[3:]] == [
        *(["ends", "a"], ["fails", "step"], ["fails", "failed"], ["slow", "b"], ["slow", "its"])
    ]
    assert "+10.0%" in shown
    assert "these figures say nothing of a GPU" in shown
    assert run(monkeypatch, "--output", output, "--tiny") == 0
    assert run(monkeypatch, "--output", output, "--tiny", "--part", "ends") == 0
    assert three_parts.read_text().split() == ["ends", "fails", "slow", "ends"]
    assert run(monkeypatch, "--report", output / "gpu-check.json") == 0


def test_an_interrupted_part_is_run_again(three_parts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "run_until", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(monkeypatch, "--output", tmp_path / "out", "--tiny") != 0
    monkeypatch.undo()
    (tmp_path / "out" / "parts.jsonl").write_text('{"part": "en')  # killed while it wrote
    monkeypatch.setattr(check, "PARTS", {"ends": part_of("", [])})
    assert run(monkeypatch, "--output", tmp_path / "out", "--tiny") == 0
    assert [part["part"] for part in read_file(tmp_path / "out")["parts"]] == ["ends"]
    assert not three_parts.exists()


def read_file(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "gpu-check.json").read_text()))


@pytest.mark.usefixtures("three_parts")
def test_the_file_says_where_it_was_measured_and_names_no_node_no_user_no_path_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "--output", tmp_path / "out", "--tiny", "--part", "fails")
    found, text = read_file(tmp_path / "out"), (tmp_path / "out" / "gpu-check.json").read_text()
    assert found.keys() == {"schema_version", "tiny", "command", "date", "git_commit", "versions", "machine", "parts"}
    assert found["command"] == "make gpu-check GPU_CHECK_ARGS=--tiny"
    assert (found["parts"][0]["rows"][0]["note"]) == "exit code 1: error: cannot read PATH on NAME with ***"
    for name in (SECRET, socket.gethostname(), "/home", str(tmp_path), str(ROOT)):
        assert name not in text


def test_with_one_gpu_the_parts_for_several_are_said_to_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parts, "count_gpus", lambda: 1)
    left_out = check.run_part(parts.Check(output=tmp_path), "bandwidth", lambda: 0.0)
    assert (left_out["ended"], left_out["rows"][0]["note"]) == ("left out", "needs 2 GPUs")


def test_a_folder_of_another_check_and_another_file_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "setting.json").write_text('{"tiny": false, "gpus": ["A"]}')
    assert run(monkeypatch, "--output", tmp_path, "--tiny") == 2
    assert "another folder" in capsys.readouterr().err
    assert run(monkeypatch, "--report", tmp_path / "setting.json") == 2
    assert "is not a file of this check" in capsys.readouterr().err


def case_of(number: int, planned: int, measured: int | None) -> dict[str, Any]:
    states = dict.fromkeys(parts.STATES, 1)
    plan = {**states, "phases": {"step": {"allocated_bytes": planned}}, "planned_peak_bytes": 0, "step_seconds": None}
    found = {**states, "peaks": None, "peak_allocated_bytes": measured, "peak_reserved_bytes": None}
    found |= {"status": "completed" if measured else "out_of_memory", "message": "CUDA out of memory"}
    job = {"id": str(number), "split": "test", "architecture": "a", "method": "full", "preset": "ddp", "world_size": 2}
    return {**job, "planned": plan, "measured": found}


def test_of_many_cases_the_table_has_the_worst_of_each_preset_and_what_ran_out_of_memory() -> None:
    cases = [case_of(1, 102, 100), case_of(2, 90, 100), case_of(3, 100, None)]
    rows = [row for case in cases for row in parts.rows_of_case(case)]
    shown = list(check.table_rows({"parts": [{"part": "peaks", "ended": "done", "rows": rows}]}))
    assert [row[1:3] + row[5:] for row in shown] == [
        ["ddp", "allocated", "-10.0%", "the worst of 2 cases; mean 6.0%"],
        ["3 a full", "", "n/a", "out_of_memory: CUDA out of memory"],
    ]


def test_a_trial_stands_beside_the_plan_of_its_own_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that nothing measured. `toolkit compare` gave the ranks of a `tp` trial twice the rows."""
    planned: list[dict[str, Any]] = []
    plan = {
        **dict.fromkeys(parts.STATES, 100),
        "allocated_peak_bytes": 900,
        "planned_peak_bytes": 2200,
        "mfu": (0.2, 0.6),
    }
    plan |= {"step_seconds": (0.5, 1.5), "step_seconds_estimate": 0.75, "without_generation": False}
    monkeypatch.setattr(parts.Check, "plan", lambda *_, **job: planned.append(job) or plan)
    spec = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    measured = {"peak_allocated_bytes": 1000, "peak_driver_bytes": 2000, "step_seconds_median": 1.0}
    run = {"status": "completed", "world_size": 2, "spec": spec, "measured": measured}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "attestation.json").write_text(json.dumps({"ranks": [dict.fromkeys(parts.STATES, 100)]}))
    variant, given = parts.Variant(preset="tp", planned={"tp": 2}), {"per_device_train_batch_size": 2}
    check_of_a_gpu = parts.Check(output=tmp_path)
    rows = parts.rows_of_trial(check_of_a_gpu, tmp_path, "tp", tmp_path, variant, **given)
    errors = {row["quantity"]: row["error"] for row in rows}
    expected = {"states": 0.0, "allocated": -0.1, "driver": 0.1, "step": -0.25, "mfu": 1 / 0.75 - 1}
    assert errors == pytest.approx(expected)
    assert planned == [{"tp": 2, **spec}]
    (tmp_path / "run.json").write_text(json.dumps({"status": "out_of_memory"}))
    (tmp_path / "failure.json").write_text(json.dumps({"message": "CUDA out of memory"}))
    (failed,) = parts.rows_of_trial(check_of_a_gpu, tmp_path, "tp", tmp_path, variant)
    assert failed["note"] == "out_of_memory: CUDA out of memory"


def test_a_job_with_rows_of_its_own_needs_no_package_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_job, "default_data_file", lambda *_: pytest.fail("the demo's data"))
    assert small_job.words(dataset="synthetic") == ["--max_seq_length", "64", "--dataset", "synthetic"]


def test_make_runs_the_check_without_a_set_up(tmp_path: Path) -> None:
    words = f"VENV={tmp_path} PYTHON={sys.executable} GPU_CHECK_ARGS=--list"
    ended = run_bash(f"make --silent gpu-check {words}", cpu_environment())
    assert ended.stdout.split()[:3] == ["part", "minutes", "teaches"], ended.stderr


@pytest.mark.nightly
@pytest.mark.launch
def test_every_part_is_tried_whole_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "check.py"), "--tiny", "--output", str(tmp_path)]
    for name in parts.PARTS:
        ended = run_captured([*command, "--part", name], cpu_environment())
        assert ended.returncode == 0, f"{name}: {ended.stderr[-3000:]}"
    found = {part["part"]: part for part in read_file(tmp_path)["parts"]}
    assert {name: part["ended"] for name, part in found.items()} == dict.fromkeys(parts.PARTS, "done")
    for name, part in found.items():
        assert any(row["measured"] for row in part["rows"]) or name == "tests", name
