"""Every benchmark can be imported, and its records name no machine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

FOLDERS = (ROOT / "benchmarks", ROOT / "benchmarks" / "gpu")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `record`; the benchmarks can be imported by name."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield __import__("record")
    for path in SCRIPTS:
        sys.modules.pop(path.stem, None)


def test_a_recorded_command_names_no_folder_of_the_machine_it_ran_on(record: Any) -> None:
    words = ["benchmarks/overhead.py", "--work", "/scratch/user/runs", "--steps", "8"]
    assert record.repeatable_command(words) == "python benchmarks/overhead.py --work DIR --steps 8"
    for path in record.RESULTS.glob("*.jsonl"):
        facts, rows = record.read_result(path.stem)
        assert facts["command"].startswith("python benchmarks/"), path.name
        assert " /" not in facts["command"], path.name
        assert rows, path.name


def test_a_record_has_no_path_of_the_machine(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    message = f"{record.ROOT}/.venv/lib/x.py failed, see {Path.home()}/runs"
    written = record.write_result("seen", {}, [{"messages": [message]}])
    assert record.read_result("seen")[1] == [{"messages": [".venv/lib/x.py failed, see ~/runs"]}]
    assert str(record.ROOT) not in written.read_text()


@pytest.mark.usefixtures("record")
def test_a_deviation_counts_as_found_only_if_its_field_is_named_with_both_values(tmp_path: Path) -> None:
    benchmark = __import__("verification")
    run = benchmark.Run("toolkit train", "zero2", "", field="sharding", fault="stage_1")
    names = ("engine", "sharding (equal on all ranks)")
    differences = [{"fact": name, "rank": 1, "expected": "a", "found": "b"} for name in names]
    attestation = {"verdict": "attestation_failed", "differences": differences}
    (tmp_path / "attestation.json").write_text(json.dumps(attestation))
    message = "the run does not match its preset and arguments: engine on rank 1 is b, expected a"
    assert benchmark.found(run, tmp_path, message) == "sharding (equal on all ranks) on rank 1 is b, expected a"
    assert benchmark.found(run._replace(field="seed"), tmp_path, message) is None
    assert benchmark.found(run, tmp_path, "another error") is None
    assert benchmark.found(run, tmp_path / "none", message) is None


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    assert __import__(path.stem).__doc__
