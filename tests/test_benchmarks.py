"""Every benchmark can be imported, and the tables and plans that come from recorded results still agree with them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from toolkit.models.read_model import read_model

TABLED = [
    "kill_ranks",
    "live_faults",
    "resume_conversion",
    "host_memory",
    "peers",
    "async_checkpoint",
    "stragglers",
    "pipeline_step_time",
]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__("record")
    for name in (
        "record",
        "host_memory",
        "kill_ranks",
        "live_faults",
        "resume_conversion",
        "forked_rehearsals",
        "shard_bytes",
        "communication",
        "peers",
        "async_checkpoint",
        "stragglers",
        "comm_hooks",
        "pipeline_step_time",
    ):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", TABLED)
def test_a_table_in_the_docs_agrees_with_the_recorded_results(name: str, record: Any, tmp_path: Path) -> None:
    benchmark = __import__(name)
    found = json.loads((record.RESULTS / f"{name}.json").read_text())
    copy = tmp_path / "copy.md"
    copy.write_text(benchmark.DOCUMENT.read_text())
    record.write_table(copy, benchmark.TABLE, benchmark.HEADER, benchmark.table_rows(found))
    assert copy.read_text() == benchmark.DOCUMENT.read_text()
    assert found["command"].startswith(f"python benchmarks/{name}.py ")


def test_a_recorded_command_names_no_folder_of_the_machine_it_ran_on(record: Any) -> None:
    words = ["benchmarks/overhead.py", "--work", "/scratch/user/runs", "--steps", "8"]
    assert record.repeatable_command(words) == "python benchmarks/overhead.py --work DIR --steps 8"
    for path in record.RESULTS.glob("*.json"):
        assert " /" not in json.loads(path.read_text()).get("command", ""), path.name


def test_the_plan_equals_the_recorded_shard_bytes_of_every_case(record: Any, tmp_path: Path) -> None:
    sweep = __import__("shard_bytes")
    cases = json.loads((record.RESULTS / "shard_bytes.json").read_text())["cases"]
    assert {case["architecture"] for case in cases} == set(sweep.ARCHITECTURES)
    assert {case["preset"] for case in cases} == set(sweep.WORLD_SIZES)
    assert sweep.differing(cases, tmp_path) == []


def test_the_planned_bytes_of_every_collective_are_within_one_percent_of_those_counted(
    record: Any, tmp_path: Path
) -> None:
    benchmark = __import__("communication")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 49_152, **benchmark.SIZES}))
    shape = read_model(str(tmp_path))
    found = json.loads((record.RESULTS / "communication.json").read_text())
    counted = {row["setting"]: row["counted"] for row in found["rows"]}
    settings = {setting.name: setting for setting in (*benchmark.lone_settings(), *benchmark.settings())}
    assert (counted.keys(), found["num_params"]) == (settings.keys(), shape.num_params)
    for name, setting in settings.items():
        assert benchmark.largest_difference(setting, shape, counted[name]) < 0.01, name


def test_the_plan_next_to_the_measured_host_memory_is_current(record: Any, tmp_path: Path) -> None:
    benchmark = __import__("host_memory")
    found = json.loads((record.RESULTS / "host_memory.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found["config"]))
    shape = read_model(str(tmp_path))
    settings = {setting.name: setting for setting in benchmark.settings()}
    measured = [row["setting"] for row in found["rows"]]
    assert measured == [name for name in settings if name in measured]
    assert {settings[name].preset for name in measured} >= {"single", *benchmark.SHARED, *benchmark.OFFLOADED}
    for row in found["rows"]:
        assert row["planned"] == benchmark.planned(settings[row["setting"]], shape), row["setting"]


NEEDS_OTHER_PACKAGES = {"trl_sft"}  # TRL, in an environment of its own
WITHOUT_A_COMMAND = {"record", "forked_rehearsals"}
SCRIPTS = sorted(
    path
    for path in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "gpu").glob("*.py"))
    if path.stem not in NEEDS_OTHER_PACKAGES | WITHOUT_A_COMMAND
)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.__doc__
