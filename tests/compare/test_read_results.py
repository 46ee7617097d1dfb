"""results.json of this version and earlier ones is read; what cannot be used is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results_documents import FIXTURES, Document, read, write_report

from toolkit.cli import main
from toolkit.compare.commands import write_report_again
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


def put(document: Document, place: str, value: Any) -> Document:
    """The document with another value at a place like `rows.0.losses`."""
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    around: Any = document
    for part in parents:
        around = around[part]
    around[last] = value
    return document


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("rows.0.wall_seconds", "12", "rows[0].wall_seconds is '12', expected a valid number"),
        ("rows.0.wall_seconds", -1.0, "rows[0].wall_seconds is -1.0, expected at least 0"),
        ("rows.0.wall_seconds", float("nan"), "rows[0].wall_seconds is nan, expected a finite number"),
        ("rows.0.wall_seconds", 1e200, "rows[0].wall_seconds is 1e+200, expected at most 1e+100"),
        ("rows.0.world_size", 0, "rows[0].world_size is 0, expected more than 0"),
        ("rows.0.world_size", True, "rows[0].world_size is True, expected a valid integer"),
        ("rows.0.world_size", 2**70, "rows[0].world_size is an integer of 71 bits"),
        ("rows.0.parameter_bytes", -1, "rows[0].parameter_bytes is -1, expected at least 0"),
        ("rows.0.losses", {}, "rows[0].losses is {}, expected a list"),
        ("rows.0.losses", "12", "rows[0].losses is '12', expected a list"),
        ("rows.0.tokens_per_second_interval", [9.0, 1.0], "expected the low end first"),
        ("rows.0.preset", "p" * 301, "expected string should have at most 300 characters"),
        ("rows.0", None, "rows[0] is None, expected keys and values"),
        ("rows.1.trial", "ddp-n2", "rows has 'ddp-n2' 2 times, expected each once"),
        ("trials.0.preset", "other", "trials[0] is of 'other-n2', which is not among the rows"),
        ("trials.0.losses", [1.0], "losses has 1, "),
        ("trials.0.timed_step_numbers", [3, 99], "trials[0]: timed_step_numbers has step 99, expected at most "),
        ("trials.0.timed_step_numbers", [3, 3], "trials[0]: timed_step_numbers is not ascending"),
        ("trials.0.problem.seed", {}, "trials[0].problem.seed: expected a text, a finite number, or a list of them"),
        ("reference", "\x1b[2J", r"reference is '\x1b[2J', which is not among the rows"),
        ("method.ratio_confidence", 2, "method.ratio_confidence is 2, expected at most 1"),
        ("environment.versions", {"\x1b[2J": 1}, r"environment.versions.'\x1b[2J' is 1, expected a valid string"),
        ("schema_version", 1.0, "has schema_version 1.0; this toolkit reads 1"),
        ("schema_version", "x" * 500_000, "has schema_version 'xxx"),
        ("rows", [{}] * 501, "has 501 rows, expected at most 500"),
        ("rows", [None] * 1_000_000, "has 1,000,000 rows, expected at most 500"),
        ("job.untimed_steps", "2", "job.untimed_steps is '2', expected a valid integer"),
        ("comment", "x" * (2**20 + 1), "comment has 1,048,577 characters, expected at most 1,048,576"),
    ],
)
def test_a_damaged_value_is_refused_in_two_lines_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, value: Any, message: str
) -> None:
    recorded = json.loads((FIXTURES / "comparison_before_typed_results" / "results.json").read_text("utf-8"))
    file = tmp_path / "results.json"
    file.write_text(json.dumps(put(recorded, place, value)))
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


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("job.untimed_steps", None),
        ("rows.0.parity", []),
        ("rows.0.parity", {}),
        ("rows.0.step_seconds", 3),
    ],
)
def test_damaged_results_from_before_trials_were_repeated_are_refused(
    results: Document, tmp_path: Path, place: str, value: Any
) -> None:
    old = put({key: item for key, item in results.items() if key not in ("trials", "method")}, place, value)
    (tmp_path / "results.json").write_text(json.dumps(old))
    with pytest.raises(ToolkitError, match=r"results.json: (job|rows)"):
        load_results(tmp_path)


def test_a_copy_of_results_beside_others_never_replaces_their_report(results: Document, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("another comparison's")
    (tmp_path / "copy.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"copy.json has another name than results.json"):
        write_report_again(tmp_path / "copy.json", price_per_gpu_hour=None)
    assert (tmp_path / "results.json").read_text() == "another comparison's"


def _without_unknowns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unknowns(item) for key, item in value.items() if item is not None}
    return [_without_unknowns(item) for item in value] if isinstance(value, list) else value
