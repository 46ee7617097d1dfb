"""The grid of the GPU validation is registered and balanced; its script runs on a CPU, resumes, and sums up errors."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import CPU_PRESETS, ROOT, cpu_environment, run_warm

FOLDER = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import grid  # noqa: E402
import plan_errors  # noqa: E402

from toolkit.presets import load_preset  # noqa: E402
from toolkit.rehearse.rehearsal import check_rehearsal  # noqa: E402

# Digest of the grid as registered before any measurement. A change here is a new registration.
REGISTERED = "07a99232a5bcf600c43a492b771a584d9901fc8524386cf3730bded1d166dbc5"


def test_the_grid_is_the_registered_one() -> None:
    assert grid.digest(grid.registered_grid()) == REGISTERED


def test_halves_share_no_architecture_and_every_case_can_be_rehearsed() -> None:
    cases = grid.registered_grid()
    assert not set(grid.CALIBRATION) & set(grid.TEST)
    assert {case["architecture"] for case in cases if case["split"] == "test"} == set(grid.TEST)
    for case in cases:
        check_rehearsal(load_preset(case["preset"]), world_size=case["world_size"], rank=case["rank"])
    assert {case["preset"] for case in cases} == set(CPU_PRESETS)  # every preset that can be rehearsed


def test_the_first_pass_has_every_architecture_under_every_preset_once() -> None:
    first = grid.registered_grid()[: len(grid.ARCHITECTURES) * len(grid.WORLD_SIZES)]
    assert set(Counter((case["architecture"], case["preset"]) for case in first).values()) == {1}
    for name, values in {"world_size": {1, 2, 8, 64}, "method": {"full", "lora"}, "max_seq_length": None}.items():
        assert {case[name] for case in first} == (values or {512, 1024, 2048, 4096, 8192})


def case_of(split: str, planned: int, measured: int) -> dict[str, Any]:
    states = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes"), 10)
    plan = {**states, "phases": {"forward": {"allocated_bytes": planned}}, "planned_peak_bytes": planned}
    found = {
        **states,
        "status": "completed",
        "peak_allocated_bytes": measured,
        "peak_reserved_bytes": measured,
        "peaks": None,
    }
    kind = {"preset": "ddp", "method": "full", "activation_checkpointing": False, "architecture": "tiny-llama"}
    return kind | {
        **{"id": "1", "split": split, "world_size": 1, "planned": plan | {"step_seconds": [0.9, 1.3]}},
        "measured": found | {"compute_step_seconds": 1.0},
    }


def test_errors_are_planned_over_measured_and_summed_up_by_half() -> None:
    cases = [case_of("test", 90, 100), case_of("test", 105, 100), case_of("calibration", 100, 100)]
    recorded = [plan_errors.recorded(case) for case in cases]
    rows = {(row["split"], row["what"]): row for row in plan_errors.summary(recorded) if row["group"] == "all"}
    assert rows["test", "allocated"]["mean"] == pytest.approx(0.075)
    assert rows["test", "allocated"]["p95"] == pytest.approx(0.10)
    assert rows["test", "allocated"]["under"] == 0.5
    assert rows["calibration", "allocated"]["mean"] == 0
    assert rows["test", "step"]["mean"] == pytest.approx(0.1)
    assert rows["test", "states"]["mean"] == 0


def test_a_case_with_the_verdict_fits_that_ran_out_of_memory_is_listed() -> None:
    case = case_of("test", 90, 100)
    case["planned"]["verdict"], case["measured"] = "fits", {"status": "out_of_memory"}
    assert plan_errors.out_of_memory_among_fits([case]) == ["1"]
    assert plan_errors.plan_errors(case) == {}


@pytest.mark.launch
def test_the_script_runs_on_a_cpu_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    finished = grid.tiny_grid()[0] | {"planned": None, "measured": {"status": "out_of_memory"}}
    lines = tmp_path / "cases.jsonl"
    lines.write_text(json.dumps(finished) + '\n{"id": "tiny-1", "spl')  # killed while it wrote
    words = ["--output", str(tmp_path), "--tiny", "--limit", "2"]
    ended = run_warm([sys.executable, str(FOLDER / "validate.py"), *words], cpu_environment())
    assert ended.returncode == 0, ended.stderr[-2000:]
    first, second = [json.loads(line) for line in lines.read_text().splitlines()]
    assert first == finished
    assert (second["id"], second["measured"]["status"]) == ("tiny-1", "completed")
    assert second["measured"]["parameter_bytes"] > 0
    facts, *rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert facts["grid_sha256"] == grid.digest(grid.tiny_grid())
    assert [row["errors"].get("states") for row in rows] == [None, 0.0]
    assert facts["versions"]["torch"]
