"""Reports are self-contained, escape every value, show exact figures, and claim what the comparison does.

results.json is read again as it was written; what cannot be used is refused by name.
"""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from results_documents import (
    FIXTURES,
    Document,
    Tags,
    console_lines,
    csv_text,
    html_text,
    markdown_text,
    notes,
    read,
    write_report,
)

from toolkit.__main__ import main
from toolkit.compare.results import load_results
from toolkit.compare.runner import write_report_again
from toolkit.errors import ToolkitError


def test_markdown_has_each_row_s_figures_and_its_difference_from_the_baseline(results: Document) -> None:
    results["method"]["repeats"] = 3
    lines = markdown_text(results).splitlines()
    assert lines[0] == "# b&gt;: 4 presets on 2 CPU processes"
    assert {
        "| ddp | completed | 400 | 0.500 | 4.0 | 4.0 | 8.0 | 1,500 | 2.0000 | 1.00 |",
        "| zero2 | completed | 300 | 0.667 | 4.0 | 2.0 | 4.0 | 1,600 | 2.0000 | 0.75 |",
    } <= set(lines)
    assert "| fsdp2 | parity failed | 2.750000 | +1.0e-01 | 2.200000 | +1.0e-01 |" in lines
    assert "| zero3 | n/a | 2.500000 | 0 | 2.500000 | n/a |" in lines  # it never reached the reference's last step
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    hostile = "````text\n<script>alert('loss')</script> | CUDA out of memory.\nTried to allocate"
    assert hostile in markdown_text(results)


def test_figures_of_gpus_have_intervals_mfu_scaling_and_timelines(made_up: Document) -> None:
    row = "| fsdp2 n2 | completed | 24,840 | 24,641–25,039 | 31.6 % | 0.0635 | 1.319 | 7.45 | 7.45 | 14.90 | 37.95"
    assert any(line.startswith(row) for line in markdown_text(made_up).splitlines())
    page = html_text(made_up)
    assert "<h2>Scaling</h2>" in page
    assert (page.count("<details>"), page.count("<details open>")) == (5, 1)  # one per row with a profile


def test_html_makes_no_request_and_has_one_script(made_up: Document, results: Document) -> None:
    page = html_text(made_up)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// Clicking", ""))
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attributes)
    assert html_text(results).count("<script>") == 1  # a message of this comparison has another


def test_a_hostile_name_acts_in_no_terminal_page_or_spreadsheet(
    results: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(results).replace('"ddp"', json.dumps("\x1b[2J</script><script>alert(1)</script>\u202e=cmd|x"))
    (tmp_path / "results.json").write_text(text)
    write_report_again(tmp_path, price_per_gpu_hour=None)
    printed = capsys.readouterr().out
    assert r"\x1b[2J</script>" in printed
    for shown in (printed, *((tmp_path / name).read_text() for name in ("report.html", "report.md", "results.csv"))):
        assert not {"\x1b", "\u202e"} & set(shown)
    assert (tmp_path / "report.html").read_text().count("<script>") == 1


def test_a_row_that_failed_or_trained_another_problem_never_has_a_ratio(results: Document, tmp_path: Path) -> None:
    for row in results["rows"][2:]:
        row["ratio_to_reference"] = 2.0
    repeated = results | {"method": results["method"] | {"repeats": 3}}
    write_report(results, tmp_path)
    assert [row["ratio_to_reference"] for row in read(tmp_path)["rows"]][2:] == [None, None]
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text("utf-8").splitlines()))
    for row in rows[2:]:
        assert row["ratio_to_reference"] == ""
        assert next(line for line in console_lines(repeated) if line.startswith(row["preset"])).endswith("n/a")


def test_nan_is_unknown_and_the_json_stays_strict(results: Document, tmp_path: Path) -> None:
    results["rows"][2].update(status="diverged", losses=[2.5, float("nan")], last_loss=float("nan"))
    write_report(results, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert (found["rows"][2]["losses"], found["rows"][2]["last_loss"]) == ([2.5, None], None)


def test_report_writes_four_files_and_writing_again_changes_nothing(results: Document, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(first) == ["report.html", "report.md", "results.csv", "results.json"]
    write_report(read(tmp_path), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == first


def test_the_csv_has_one_line_per_row_and_no_formula(results: Document) -> None:
    results["rows"][3]["message"] = "=cmd()"
    header, *lines = csv_text(results).splitlines()
    assert header.startswith("trial,preset,world_size,status,message,parity,parity_message,tokens_per_second_per_gpu,")
    assert "losses" not in header
    assert len(lines) == 4  # the message with a line break is one line too
    assert lines[1].startswith("zero2-n2,zero2,2,completed,,agrees,,150.0,0.75,")
    assert "'=cmd()" in {row["message"] for row in csv.DictReader(io.StringIO(csv_text(results)))}


def test_notes_of_gpus_say_what_mfu_counts_the_price_and_throttling(made_up: Document) -> None:
    said = "\n".join(notes(made_up))
    assert "Cost: per million non-padding tokens, at 2.5 per GPU-hour." in said
    assert "MFU counts all parameters and causal attention, padding included" in said
    assert "GPU clocks were reduced during timed steps: zero2 n2 (software power cap), zero2 n4 (" in said


def test_loading_a_missing_file_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"no such file: .*results.json") as raised:
        load_results(tmp_path)
    assert raised.value.hint == "name a folder of `toolkit compare` that holds results.json"
    (tmp_path / "run.json").touch()
    with pytest.raises(ToolkitError) as raised:
        load_results(tmp_path)
    assert raised.value.hint == f"it is the folder of one run: `toolkit report --share {tmp_path}` prints its figures"


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
    file, before = tmp_path / "results.json", json.dumps(recorded)
    file.write_text(before)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert (ended.value.code, message in error, "\x1b" in error) == (2, True, False), error
    assert len(error.splitlines()) <= 2
    assert len(error) < 500 + len(str(tmp_path))
    assert (list(tmp_path.iterdir()), file.read_text()) == ([file], before)


def test_a_copy_of_results_beside_others_never_replaces_their_report(results: Document, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("another comparison's")
    (tmp_path / "copy.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"copy.json has another name than results.json"):
        write_report_again(tmp_path / "copy.json", price_per_gpu_hour=None)
    assert (tmp_path / "results.json").read_text() == "another comparison's"
