"""The grid of the GPU validation is registered and balanced; its script runs on a CPU, resumes, and sums up errors."""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import shipped_counts
from launching import CPU_PRESETS, ROOT, cpu_environment, run_warm

FOLDER = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import fits  # noqa: E402
import grid  # noqa: E402
import parts  # noqa: E402
import plan_errors  # noqa: E402
import validate  # noqa: E402

from toolkit.hardware.gpu_table import Gpu, find_gpu  # noqa: E402
from toolkit.presets import load_preset  # noqa: E402
from toolkit.rehearse.rehearsal import check_rehearsal  # noqa: E402

# Digest of the grid as registered before any measurement. A change here is a new registration.
REGISTERED = "07a99232a5bcf600c43a492b771a584d9901fc8524386cf3730bded1d166dbc5"


MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu-check.json").read_text())["parts"]


def recorded(part: str, quantity: str) -> dict[str, dict[str, Any]]:
    """Case -> row of what was measured on a GPU."""
    rows = next(each["rows"] for each in MEASURED if each["part"] == part)
    return {row["case"]: row for row in rows if row["quantity"] == quantity}


def test_shipped_counts_are_of_this_code() -> None:
    content = shipped_counts.shipped()
    assert content["code"] == shipped_counts.code(), "count again: python tests/support/shipped_counts.py"
    assert {name: model["config"] for name, model in content["models"].items()} == {
        name: validate.CONFIGS[name] for name in shipped_counts.COUNTED
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", shipped_counts.COUNTED)
def test_a_shipped_count_is_what_transformers_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    assert shipped_counts.count(name) == shipped_counts.shipped()["models"][name]


def test_plans_of_one_rank_of_many_agree_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    shipped_counts.fill_cache()
    cases = {f"{case['id']} {case['architecture']} {case['method']}": case for case in grid.registered_grid()}
    columns = [(*row, column) for row in fits.rows() for column in fits.HARDWARE]
    cases |= {f"{model} {method}, {column}": (model, method, column) for model, method, column in columns}
    plan, errors = validate.planner("h200", tmp_path), {}
    for name, row in (recorded("fits", "allocated") | recorded("peaks", "allocated")).items():
        case = cases[name] if isinstance(cases[name], dict) else fits.case_of(*cases[name])
        planned = plan(case | {"gradient_as_bucket_view": False})  # when these were measured, DDP's buckets were copies
        assert planned is not None
        allocated = max(phase["allocated_bytes"] for phase in planned["phases"].values())
        assert allocated == row["planned"], f"{name}: the record has the plan of another planner"
        errors[name] = abs(allocated / row["measured"] - 1)
    assert len(errors) == 28
    assert max(errors.values()) < 0.05
    assert statistics.median(errors.values()) < 0.005
    assert statistics.mean(errors.values()) < 0.01


@pytest.mark.parametrize(
    ("part", "case", "rows", "job", "bound"),
    [
        ("speed", "eager", 8, {}, 0.005),
        ("speed", "liger", 8, parts.LIGER, 0.005),
        ("methods", "lora", 2, {"lora_r": 16}, 0.01),
        ("methods", "qlora", 2, {"lora_r": 16, "load_in_4bit": True}, 0.01),
        ("methods", "dpo", 2, {"method": "dpo"}, 0.005),
    ],
)
def test_plans_of_methods_agree_with_a_gpu(
    tmp_path: Path, part: str, case: str, rows: int, job: dict[str, Any], bound: float
) -> None:
    class OnThatGpu(parts.Check):
        @property
        def gpu(self) -> Gpu:  # type: ignore[override]
            return find_gpu("h200")

    (tmp_path / "config.json").write_text(json.dumps(grid.CALIBRATION["llama-1b"]))
    plan = OnThatGpu(output=tmp_path).plan(tmp_path, "single", 1, per_device_train_batch_size=rows, **job)
    row = recorded(part, "allocated")[case]
    assert plan["allocated_peak_bytes"] == row["planned"]
    assert abs(plan["allocated_peak_bytes"] / row["measured"] - 1) < bound


def test_the_grid_is_the_registered_one_and_balanced_and_can_be_rehearsed() -> None:
    cases = grid.registered_grid()
    assert grid.digest(cases) == REGISTERED
    assert not set(grid.CALIBRATION) & set(grid.TEST)
    assert {case["architecture"] for case in cases if case["split"] == "test"} == set(grid.TEST)
    assert {case["preset"] for case in cases} == set(CPU_PRESETS)  # every preset that can be rehearsed
    for case in cases:
        check_rehearsal(load_preset(case["preset"]), world_size=case["world_size"], rank=case["rank"])
    first_pass = cases[: len(grid.ARCHITECTURES) * len(grid.WORLD_SIZES)]  # every architecture under every preset once
    assert set(Counter((case["architecture"], case["preset"]) for case in first_pass).values()) == {1}


def case_of(split: str, planned: int, measured: int) -> dict[str, Any]:
    states = dict.fromkeys(plan_errors.STATES, 10)
    plan = {"phases": {"forward": {"allocated_bytes": planned}}, "planned_peak_bytes": planned}
    found = {"status": "completed", "peak_allocated_bytes": measured, "peak_reserved_bytes": measured, "peaks": None}
    kind = {"preset": "ddp", "method": "full", "activation_checkpointing": False, "architecture": "tiny-llama"}
    planned_step = {"planned": {**states, **plan, "step_seconds": [0.9, 1.3]}, "id": "1", "world_size": 1}
    return {**kind, **planned_step, "split": split, "measured": {**states, **found, "compute_step_seconds": 1.0}}


def test_errors_are_planned_over_measured_and_summed_up_by_half() -> None:
    cases = [case_of("test", 90, 100), case_of("test", 105, 100), case_of("calibration", 100, 100)]
    summed = plan_errors.summary([plan_errors.recorded(case) for case in cases])
    rows = {(row["split"], row["what"]): row for row in summed if row["group"] == "all"}
    assert [rows["test", "allocated"][name] for name in ("mean", "p95", "under")] == pytest.approx([0.075, 0.1, 0.5])
    assert rows["test", "step"]["mean"] == pytest.approx(0.1)
    assert rows["calibration", "allocated"]["mean"] == rows["test", "states"]["mean"] == 0


@pytest.mark.launch
def test_the_script_runs_on_a_cpu_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    finished = grid.tiny_grid()[0] | {"planned": None, "measured": {"status": "out_of_memory"}}
    lines = tmp_path / "cases.jsonl"
    lines.write_text(json.dumps(finished) + '\n{"id": "tiny-1", "spl')  # killed while it wrote
    words = ["--output", str(tmp_path), "--tiny", "--limit", "2"]
    ended = run_warm([sys.executable, str(FOLDER / "validate.py"), *words], cpu_environment())
    assert ended.returncode == 0, ended.stderr[-2000:]
    first, second = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (first, second["id"], second["measured"]["status"]) == (finished, "tiny-1", "completed")
    facts, *rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert facts["grid_sha256"] == grid.digest(grid.tiny_grid())
    assert [row["errors"].get("states") for row in rows] == [None, 0.0]
