"""`make gpu-check`: it resumes, keeps to its time, makes a row of what fails, and writes a file without names."""

import gzip
import json
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import PYTHON_PATH, ROOT, cpu_environment, nightly_launch, run_bash, run_captured

sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

import check  # noqa: E402
import first_parts  # noqa: E402
import hot_kernels  # noqa: E402
import parts  # noqa: E402
import small_job  # noqa: E402

from toolkit.entry_point import exit_code_of  # noqa: E402

SECRET = "hf_AbCdEfGhIjKlMnOp"
NOTE = f"cannot read /home/someone/model on {socket.gethostname()} with {SECRET}"


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu/check.py", *map(str, words)])
    monkeypatch.setattr(check, "fork_runs_of_steps", lambda: None)
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


def test_a_node_without_a_gpu_ends_with_two_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "count_gpus", lambda: 0)
    assert run(monkeypatch, "--output", tmp_path / "out") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: no GPU is visible, expected one or more NVIDIA GPUs"
    assert "GPU_CHECK_ARGS=--tiny" in hint
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
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


def test_what_the_time_in_all_cuts_off_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each step takes four of a clock's minutes; `b` has three."""
    clock, ran = [0.0], list[str]()

    def take_four_minutes(_: list[str], log: Path, deadline: float, *__: Any) -> int | None:
        ran.append(log.stem)
        enough = clock[0] + 240 <= deadline
        clock[0] = clock[0] + 240 if enough else deadline
        return 0 if enough else None

    def part(name: str, minutes: float) -> parts.Part:
        return parts.Part(minutes=minutes, teaches="", steps=lambda *_: [(name, [], list)])

    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(check, "run_until", take_four_minutes)
    monkeypatch.setattr(check, "minutes_of", lambda _, name: check.PARTS[name].minutes)
    monkeypatch.setattr(check, "PARTS", {"a": part("a", 5), "b": part("b", 3), "c": part("c", 5), "d": part("d", 5)})
    words = ["--output", tmp_path / "out", "--tiny", "--minutes", "9"]
    run(monkeypatch, *words)
    ended = {each["part"]: each["ended"] for each in read_file(tmp_path / "out")["parts"]}
    assert (ran, ended["a"], ended["c"]) == (["a", "b", "c"], "done", check.CUT_OFF)
    assert check.OVER in ended["b"]
    run(monkeypatch, *words)
    assert ran[3:] == ["c", "d", "b"]
    run(monkeypatch, *words[:3])  # without a limit for all, what had its time is not run again
    assert ran[6:] == ["b"]  # which the last call cut off


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> parts.Check:
    """A check of an H100, whose commands are read and not run; no model is written."""
    monkeypatch.setattr(parts, "count_gpus", lambda: 1)
    monkeypatch.setattr(parts, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(parts, "write_model", lambda folder, _: folder)
    monkeypatch.setenv("TOOLKIT_RANKS_PER_GPU_BY", "")
    return parts.Check(output=tmp_path)


def flattened(groups: Iterable[Any]) -> list[parts.Step]:
    return [step for group in groups for step in (group if isinstance(group, list) else [group])]


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)" ;;
  --query-gpu*) echo "NVIDIA H100 80GB HBM3, 81559, 570.86.15, 700.00, 1980, 2619" ;;
esac
"""


@pytest.mark.nightly
def test_every_command_of_the_first_parts_passes_its_checks_on_a_node_with_one_gpu(
    one_gpu: parts.Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The GPU is a name that nvidia-smi prints; the checkpoint to convert is not there."""

    def write_stub(folder: Path, config: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        header = b'{"w": {"dtype": "U8", "shape": [928], "data_offsets": [0, 928]}}'
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(928))
        return folder

    monkeypatch.setattr(parts, "write_model", write_stub)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH} | variables
    (one_gpu.output / "sharing.log").write_text('{"nccl": "2.29.7", "works_by": "one-host", "findings": []}\n')
    assert flattened(first_parts.ranks(one_gpu))[0][2]()[0]["note"] == "NCCL 2.29.7, by one-host"
    assert os.environ["TOOLKIT_RANKS_PER_GPU_BY"] == "one-host"
    tried = []
    for name, part in first_parts.FIRST_PARTS.items():
        for label, command, _ in flattened(part.steps(one_gpu, part.minutes)):
            if command[1:3] == ["-m", "toolkit"] and label not in ("measured", "ranks-converted"):
                at = command.index("--")
                ended = run_captured([*command[:at], "--dry-run", *command[at:]], environment)
                missing = ("needs liger-kernel", "needs Triton", "libaio is not installed")
                assert ended.returncode == 0 or any(text in ended.stderr for text in missing), f"{name}: {ended.stderr}"
                tried.append(label)
    assert {"ranks-2-a", "ranks-2-b", "ranks-4", "ranks-8", "ranks-saved"} <= set(tried)
    assert {"profile-eager", "again-experts", "grpo"} <= set(tried)


def test_where_nccl_takes_no_two_ranks_on_a_gpu_ddp_is_run_with_gloo(one_gpu: parts.Check) -> None:
    failed = {"nccl": "2.27.5", "findings": ["two ranks cannot share a GPU: Duplicate GPU detected"]}
    (one_gpu.output / "sharing.log").write_text(json.dumps(failed) + "\n")
    steps = first_parts.ranks(one_gpu)
    (_, _, read), *alone = next(steps)
    assert "Duplicate GPU" in read()[0]["note"]
    commands = {label: command for label, command, _ in flattened([alone, *steps])}
    assert list(commands) == ["ranks-single", "ranks-single_smaller", "ranks-2"]
    assert "ddp=ddp --ddp_backend gloo" in commands["ranks-2"]


def test_a_profile_has_the_dearest_kernels_and_the_gap_after_each(tmp_path: Path) -> None:
    """Two kernels of 3 and 1 ms, 2 ms apart, twice; a copy of another stream runs beside the first."""

    def event(name: str, at_ms: float, ms: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": kind, "ts": 1000 * at_ms, "dur": 1000 * ms, "tid": 1}

    events = [event("ProfilerStep#1", 0, 14, "user_annotation"), event("ProfilerStep#1", 1, 12, "gpu_user_annotation")]
    for start in (0, 7):
        events += [event("gemm", start, 3), event("norm", start + 5, 1), event("copy", start + 1, 1, "gpu_memcpy")]
    trace = tmp_path / "rank0.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = hot_kernels.hot_kernels(trace)
    totals = (found["step_seconds"], found["busy_seconds"], found["gap_seconds"])
    assert totals == pytest.approx((0.014, 0.008, 0.005))
    assert {row["name"]: row["count"] for row in found["kernels"]} == {"gemm": 2, "copy": 2, "norm": 2}
    assert found["kernels"][0]["name"] == "gemm"
    gaps = {row["name"]: row["seconds"] for row in found["gaps"]}
    assert gaps == pytest.approx({"gemm": 0.004, "norm": 0.001})
    shown = "\n".join(hot_kernels.table_lines(found))
    assert "kernels: 8.0 ms of 14.0 ms" in shown
    assert "4.00 ms  80.0%      2 x  after gemm" in shown


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


@pytest.mark.nightly
def test_make_runs_the_check_without_a_set_up(tmp_path: Path) -> None:
    words = f"VENV={tmp_path} PYTHON={sys.executable} GPU_CHECK_ARGS=--list"
    ended = run_bash(f"make --silent gpu-check {words}", cpu_environment())
    assert ended.stdout.split()[:3] == ["part", "minutes", "teaches"], ended.stderr


@nightly_launch
def test_every_part_is_tried_whole_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "check.py"), "--tiny", "--output", str(tmp_path)]
    for name in check.PARTS:
        ended = run_captured([*command, "--part", name], cpu_environment())
        assert ended.returncode == 0, f"{name}: {ended.stderr[-3000:]}"
    found = {part["part"]: part for part in read_file(tmp_path)["parts"]}
    assert {name: part["ended"] for name, part in found.items()} == dict.fromkeys(check.PARTS, "done")
    for name, part in found.items():
        assert any(row["measured"] for row in part["rows"]) or name == "tests", name
