"""results.json is read again as it was written; what cannot be used is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results_documents import FIXTURES, Document

from toolkit.__main__ import main
from toolkit.compare.commands import write_report_again
from toolkit.compare.results import Results, load_results
from toolkit.compare.rows import Row, RunRecord
from toolkit.errors import ToolkitError


def test_loading_a_missing_file_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"no such file: .*results.json") as raised:
        load_results(tmp_path)
    assert raised.value.hint == "name a folder of `toolkit compare` that holds results.json"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("rows.0.wall_seconds", -1.0, "rows[0].wall_seconds is -1.0, expected at least 0"),
        ("rows.0", None, "rows[0] is None, expected keys and values"),
        ("rows.0.padding_fraction", "x", "rows[0].padding_fraction is 'x', expected a valid number"),
        ("schema_version", "x" * 500_000, "schema_version is 'xxx"),
        ("job.untimed_steps", "2", "job.untimed_steps is '2', expected a valid integer"),
    ],
)
def test_a_damaged_value_is_refused_in_two_lines_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, value: Any, message: str
) -> None:
    recorded = around = json.loads((FIXTURES / "results_small.json").read_text("utf-8"))
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for part in parents:
        around = around[part]
    around[last] = value
    file = tmp_path / "results.json"
    file.write_text(json.dumps(recorded))
    before = file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert "\x1b" not in error
    assert len(error.splitlines()) <= 2
    assert len(error) < 500 + len(str(tmp_path))
    assert (list(tmp_path.iterdir()), file.read_bytes()) == ([file], before)


def test_a_copy_of_results_beside_others_never_replaces_their_report(results: Document, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("another comparison's")
    (tmp_path / "copy.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"copy.json has another name than results.json"):
        write_report_again(tmp_path / "copy.json", price_per_gpu_hour=None)
    assert (tmp_path / "results.json").read_text() == "another comparison's"


@pytest.mark.parametrize("model", [Results, Row, RunRecord])
def test_every_key_is_declared_with_its_meaning(model: type[Results | Row | RunRecord]) -> None:
    assert all((field.description or "").endswith(".") for field in model.model_fields.values())
