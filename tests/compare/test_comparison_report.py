"""Reports are self-contained, escape every value, show the exact figures, and are written completely or not at all."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from results_documents import (
    Document,
    Tags,
    console_lines,
    csv_text,
    html_text,
    markdown_text,
    read,
    write_report,
)

from toolkit.compare.commands import write_report_again


def test_markdown_table_is_exact(results: Document) -> None:
    lines = markdown_text(results).splitlines()
    assert lines[0] == "# Comparison: 4 presets on 2 CPU processes"
    assert lines[4:10] == [
        "| preset | status | tokens /s | step s | param. MiB | grad. MiB | optim. MiB | peak RSS MiB | last loss"
        " | ratio to ddp |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| ddp | completed | 400 | 0.500 | 4.0 | 4.0 | 8.0 | 1,500 | 2.0000 | 1.00 |",
        "| zero2 | completed | 300 | 0.667 | 4.0 | 2.0 | 4.0 | 1,600 | 2.0000 | 0.75 |",
        "| zero3 | out_of_memory | n/a | n/a | n/a | n/a | n/a | n/a | n/a | n/a |",
        "| fsdp2 | parity failed | n/a | n/a | 2.0 | 2.0 | 4.0 | 1,550 | 2.2000 | n/a |",
    ]


def test_markdown_shows_each_difference_from_the_baseline(results: Document) -> None:
    lines = markdown_text(results).splitlines()
    assert "| fsdp2 | parity failed | 2.750000 | +1.0e-01 | 2.200000 | +1.0e-01 |" in lines
    assert "| zero3 | n/a | 2.500000 | 0 | 2.500000 | n/a |" in lines  # it never reached the reference's last step


def test_markdown_escapes_hostile_text(results: Document) -> None:
    text = markdown_text(results)
    assert r"models/&lt;b&gt;tiny\|llama&lt;/b&gt;" in text
    assert "````text\n<script>alert('loss')</script> | CUDA out of memory.\nTried to allocate" in text
    assert "first loss 2.75 against 2.5 of ddp \\| relative 1e-1, allowed 1e-5 &lt;b&gt;" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_html_makes_no_request(made_up: Document) -> None:
    page = html_text(made_up)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// Clicking", ""))
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attributes)


def test_html_escapes_what_it_shows(results: Document) -> None:
    page = html_text(results)
    assert page.count("<script>") == 1  # its own
    assert "&lt;script&gt;alert(&#39;loss&#39;)&lt;/script&gt; | CUDA out of memory.\nTried to allocate" in page
    assert "models/&lt;b&gt;tiny|llama&lt;/b&gt;" in page


def test_scaling_and_timelines_are_shown_only_where_there_are_any(made_up: Document, results: Document) -> None:
    full, small = html_text(made_up), html_text(results)
    for heading in ("<h2>Scaling</h2>", "<h2>One step of every rank</h2>", "<h3>GPU interconnect</h3>"):
        assert heading in full
        assert heading not in small
    assert full.count("<details") == 6  # one per row with a profile, the first open
    assert full.count("<details open>") == 1
    assert full.count('class="rank"><b>rank 3') == 3


def test_markdown_of_repeated_rows_has_intervals_mfu_and_cost(made_up: Document) -> None:
    lines = markdown_text(made_up).splitlines()
    assert lines[0] == "# Comparison: 5 presets on 2 and 4 × NVIDIA H100 80GB HBM3"
    assert (
        "| fsdp2 n2 | completed | 24,840 | 24,641–25,039 | 31.6 % | 0.0635 | 1.319 | 7.45 | 7.45 | 14.90 | 37.95"
        " | 1.3999 | 0.92 |"
    ) in lines
    assert "| ddp | out_of_memory | 15.00 | 36.10 | 44.60 | n/a | allocated |" in lines  # memory by phase


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


def test_a_long_curve_is_thinned_in_the_page(results: Document) -> None:
    short = len(html_text(results))
    results["rows"][0]["losses"] = [2.0, 1.0] * 50_000
    assert len(html_text(results)) < short + 2100 * len("1000.0,300.0 ")


@pytest.mark.parametrize("text", ["=cmd()", "@x"])
def test_a_spreadsheet_reads_no_formula(results: Document, text: str) -> None:
    results["rows"][2]["message"] = text
    (cell,) = {row["message"] for row in csv.DictReader(io.StringIO(csv_text(results))) if text in row["message"]}
    assert cell == f"'{text}"


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


def test_an_undecodable_byte_in_a_message_breaks_no_file(results: Document, tmp_path: Path) -> None:
    results["rows"][2]["message"] = b"\xff killed".decode("utf-8", "surrogateescape")
    write_report(results, tmp_path)
    assert read(tmp_path)["rows"][2]["message"] == "? killed"


def test_the_csv_begins_with_the_row_and_has_one_line_for_each(results: Document) -> None:
    header, *lines = csv_text(results).splitlines()
    assert header.startswith("trial,preset,world_size,status,message,parity,parity_message,tokens_per_second_per_gpu,")
    assert "losses" not in header
    assert len(lines) == 4  # the message with a line break is one line too
    assert lines[1].startswith("zero2-n2,zero2,2,completed,,agrees,,150.0,0.75,")


def test_console_table_is_exact_at_100_columns(results: Document) -> None:
    lines = console_lines(results)
    assert [" ".join(line.split()) for line in lines[4:8]] == [
        "ddp completed 400 0.500 4.0 4.0 8.0 1,500 2.0000 1.00",
        "zero2 completed 300 0.667 4.0 2.0 4.0 1,600 2.0000 0.75",
        "zero3 out_of_memory n/a n/a n/a n/a n/a n/a n/a n/a",
        "fsdp2 parity failed n/a n/a 2.0 2.0 4.0 1,550 2.2000 n/a",
    ]
    assert [line.split()[0] for line in lines[:1]] == ["peak"]
    assert "RSS" in lines[1]
    assert max(map(len, lines)) <= 100
