"""results.json of this version and earlier ones is read; what cannot be used is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results_documents import FIXTURES, Document, read, write_report

from toolkit.compare.read_results import load_results
from toolkit.compare.trial_figures import Figures
from toolkit.errors import ToolkitError


@pytest.fixture
def results() -> Document:
    return read(FIXTURES / "results_small.json")


def test_loading_a_missing_file_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"no such file: .*results.json") as raised:
        load_results(tmp_path)
    assert raised.value.hint == "name a folder of `toolkit compare` that holds results.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1,\n oops', r"line 2: not JSON"),
        ("[1]", "has no schema_version"),
        ('{"schema_version": 2}', "has schema_version 2; this toolkit reads 1"),
        ('{"schema_version": 1, "rows": []}', "it has no created, reference, environment, job"),
    ],
    ids=["broken", "foreign", "newer", "incomplete"],
)
def test_loading_refuses_what_it_cannot_use(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(ToolkitError, match=message):
        load_results(file)


def test_loading_names_the_row_and_the_key(results: Document, tmp_path: Path) -> None:
    del results["rows"][1]["preset"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"rows\[1\] has no preset"):
        load_results(tmp_path)


def test_loading_reads_results_from_before_trials_were_repeated(results: Document, tmp_path: Path) -> None:
    old: dict[str, Any] = json.loads(json.dumps(results))
    del old["trials"], old["method"]
    old["rows"] = [{key: row[key] for key in Figures.model_fields} for row in old["rows"]]
    old["rows"][3].update(parity="differs", tokens_per_second=800.0)
    (tmp_path / "results.json").write_text(json.dumps(old))
    found = read(tmp_path)
    assert [row["repeats"] for row in found["rows"]] == [1, 1, 0, 1]
    assert {row["difference"] for row in found["rows"]} == {None}
    assert (found["rows"][3]["parity"], found["rows"][3]["tokens_per_second"]) == ("parity failed", None)
    assert found["trials"][0]["timed_step_numbers"] == [3, 4]
    assert (found["rows"][0]["mfu"], found["price_per_gpu_hour"], found["environment"]["disk"]) == (None, None, None)


def test_loading_welcomes_keys_that_it_does_not_know(tmp_path: Path) -> None:
    newer = json.loads((FIXTURES / "results_small.json").read_text("utf-8")) | {"comment": "more keys may be added"}
    (tmp_path / "results.json").write_text(json.dumps(newer))
    assert load_results(tmp_path).reference == "ddp"


def test_results_of_a_recorded_comparison_keep_every_value() -> None:
    """Written before results had types, by two repeats of `ddp` and `zero2` and an unsupported row."""
    folder = FIXTURES / "comparison_before_typed_results"
    recorded = json.loads((folder / "results.json").read_text("utf-8"))
    found = read(folder)
    assert len(found["trials"]) == 4
    assert [row["status"] for row in found["rows"]] == ["completed", "completed", "not_supported"]
    assert _without_unknowns(found) == _without_unknowns(recorded)


def test_a_recorded_comparison_is_reported_again(tmp_path: Path) -> None:
    files = write_report(read(FIXTURES / "comparison_before_typed_results"), tmp_path)
    assert "| ddp | completed |" in files.markdown.read_text("utf-8")


def test_a_value_of_another_type_is_named(results: Document, tmp_path: Path) -> None:
    results["rows"][0]["peak_host_bytes"] = "much"
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"rows\[0\].peak_host_bytes is 'much'"):
        load_results(tmp_path)


def _without_unknowns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unknowns(item) for key, item in value.items() if item is not None}
    return [_without_unknowns(item) for item in value] if isinstance(value, list) else value
