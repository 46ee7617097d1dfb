"""Tables that are written from benchmarks/results say what the results say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__("record")
    for name in ("record", "kills", "live_faults", "resume_elsewhere"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["kills", "live_faults", "resume_elsewhere"])
def test_a_table_in_the_docs_is_that_of_the_results(name: str, record: Any, tmp_path: Path) -> None:
    benchmark = __import__(name)
    found = json.loads((record.RESULTS / f"{name}.json").read_text())
    copy = tmp_path / "copy.md"
    copy.write_text(benchmark.DOCUMENT.read_text())
    record.write_table(copy, benchmark.TABLE, benchmark.HEADER, benchmark.table_rows(found))
    assert copy.read_text() == benchmark.DOCUMENT.read_text()
    assert found["command"].startswith(f"python benchmarks/{name}.py ")
