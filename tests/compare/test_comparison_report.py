"""Reports are self-contained, escape every value, show the exact figures, and are written completely or not at all."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from results_documents import Document, Tags, console_lines, csv_text, html_text, markdown_text, read, write_report

from toolkit.compare.commands import write_report_again


def test_markdown_has_each_row_s_figures_and_its_difference_from_the_baseline(results: Document) -> None:
    lines = markdown_text(results).splitlines()
    assert lines[0] == "# Comparison: 4 presets on 2 CPU processes"
    assert lines[6:8] == [
        "| ddp | completed | 400 | 0.500 | 4.0 | 4.0 | 8.0 | 1,500 | 2.0000 | 1.00 |",
        "| zero2 | completed | 300 | 0.667 | 4.0 | 2.0 | 4.0 | 1,600 | 2.0000 | 0.75 |",
    ]
    assert "| fsdp2 | parity failed | 2.750000 | +1.0e-01 | 2.200000 | +1.0e-01 |" in lines
    assert "| zero3 | n/a | 2.500000 | 0 | 2.500000 | n/a |" in lines  # it never reached the reference's last step


def test_figures_of_gpus_have_intervals_mfu_scaling_and_timelines(made_up: Document) -> None:
    row = "| fsdp2 n2 | completed | 24,840 | 24,641–25,039 | 31.6 % | 0.0635 | 1.319 | 7.45 | 7.45 | 14.90 | 37.95"
    assert any(line.startswith(row) for line in markdown_text(made_up).splitlines())
    page = html_text(made_up)
    assert "<h2>Scaling</h2>" in page
    assert (page.count("<details"), page.count("<details open>")) == (6, 1)  # one per row with a profile


def test_markdown_escapes_hostile_text(results: Document) -> None:
    text = markdown_text(results)
    assert "````text\n<script>alert('loss')</script> | CUDA out of memory.\nTried to allocate" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_html_makes_no_request_and_has_one_script(made_up: Document, results: Document) -> None:
    page = html_text(made_up)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// Clicking", ""))
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attributes)
    assert html_text(results).count("<script>") == 1  # a message of this comparison has another


HOSTILE = "\x1b[2J</script><script>alert(1)</script>\u202e=cmd|x"


def test_a_hostile_name_acts_in_no_terminal_page_or_spreadsheet(
    results: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(results).replace('"ddp"', json.dumps(HOSTILE))
    (tmp_path / "results.json").write_text(text)
    write_report_again(tmp_path, price_per_gpu_hour=None)
    printed = capsys.readouterr().out
    assert r"\x1b[2J</script>" in printed
    for shown in (printed, *((tmp_path / name).read_text() for name in ("report.html", "report.md", "results.csv"))):
        assert not {"\x1b", "\u202e"} & set(shown)
    assert (tmp_path / "report.html").read_text().count("<script>") == 1


def test_a_spreadsheet_reads_no_formula(results: Document) -> None:
    results["rows"][2]["message"] = "=cmd()"
    assert "'=cmd()" in {row["message"] for row in csv.DictReader(io.StringIO(csv_text(results)))}


@pytest.mark.parametrize(("index", "preset"), [(2, "zero3"), (3, "fsdp2")])
def test_a_row_that_failed_or_trained_another_problem_never_has_a_ratio(
    results: Document, tmp_path: Path, index: int, preset: str
) -> None:
    results["rows"][index]["ratio_to_reference"] = 2.0
    write_report(results, tmp_path)
    assert read(tmp_path)["rows"][index]["ratio_to_reference"] is None
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text("utf-8").splitlines()))
    assert (rows[index]["preset"], rows[index]["ratio_to_reference"]) == (preset, "")
    assert next(line for line in console_lines(results) if line.startswith(preset)).endswith("n/a")
    assert results["rows"][index]["ratio_to_reference"] == 2.0  # the document of the caller is unchanged


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


def test_the_csv_begins_with_the_row_and_has_one_line_for_each(results: Document) -> None:
    header, *lines = csv_text(results).splitlines()
    assert header.startswith("trial,preset,world_size,status,message,parity,parity_message,tokens_per_second_per_gpu,")
    assert "losses" not in header
    assert len(lines) == 4  # the message with a line break is one line too
    assert lines[1].startswith("zero2-n2,zero2,2,completed,,agrees,,150.0,0.75,")
