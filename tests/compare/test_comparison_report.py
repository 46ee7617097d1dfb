"""Reports are self-contained, escape every value, show exact figures, and claim what the comparison does.

results.json is read again as it was written; what cannot be used is refused by name.
"""

from __future__ import annotations

import copy
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
    summary_sentence,
    write_report,
)

from toolkit.__main__ import main
from toolkit.compare.commands import write_report_again
from toolkit.compare.results import Results, load_results
from toolkit.compare.rows import Row, RunRecord
from toolkit.errors import ToolkitError


def test_markdown_has_each_row_s_figures_and_its_difference_from_the_baseline(results: Document) -> None:
    lines = markdown_text(results).splitlines()
    assert lines[0] == "# Comparison: 4 presets on 2 CPU processes"
    assert lines[6:8] == [
        "| ddp | completed | 400 | 0.500 | 4.0 | 4.0 | 8.0 | 1,500 | 2.0000 | 1.00 |",
        "| zero2 | completed | 300 | 0.667 | 4.0 | 2.0 | 4.0 | 1,600 | 2.0000 | 0.75 |",
    ]
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
    assert (page.count("<details"), page.count("<details open>")) == (6, 1)  # one per row with a profile


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
    write_report(results, tmp_path)
    assert [row["ratio_to_reference"] for row in read(tmp_path)["rows"]][2:] == [None, None]
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text("utf-8").splitlines()))
    for row in rows[2:]:
        assert row["ratio_to_reference"] == ""
        assert next(line for line in console_lines(results) if line.startswith(row["preset"])).endswith("n/a")


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


# The summary


def test_summary_ranks_only_rows_that_completed_and_trained_the_same_problem(results: Document) -> None:
    assert summary_sentence(results) == (
        "On 2 CPU processes, the 2 of 4 presets that can be compared ran at 300 (zero2) to 400 tokens/s (ddp) in"
        " single runs, unranked; zero2 holds 38 % fewer model-state bytes than ddp at 0.75 times its speed;"
        " 1 did not complete (zero3: out_of_memory); 1 did not train the same problem (fsdp2);"
        " CPU speeds (gloo) say nothing about GPU speeds."
    )


def repeat(results: Document, *presets: str, ranked: bool = True) -> Document:
    """Rows with intervals of 10 % to each side; with `ranked` the comparison says that they are separated."""
    rows = [row for row in results["rows"] if row["preset"] in presets]
    for rank, row in enumerate(rows, 1):
        middle = row["tokens_per_second"] or 0.0
        row.update(repeats=3, tokens_per_second_interval=[middle * 0.9, middle * 1.1], rank=rank if ranked else None)
        row["difference"] = "reference" if row["preset"] == "ddp" else "no difference seen"
    return results


def test_summary_calls_one_fastest_only_where_the_comparison_ranks_it(results: Document) -> None:
    ranked = summary_sentence(repeat(copy.deepcopy(results), "ddp", "zero2"))
    assert "ddp is the fastest that fits (400 tokens/s)" in ranked
    assert "zero2 holds 38 % fewer model-state bytes than ddp for 25 %" in ranked
    unranked = summary_sentence(repeat(results, "ddp", "zero2", ranked=False))
    assert "no difference in speed is seen between ddp and zero2, the fastest of the 2 of 4" in unranked
    assert "zero2 holds 38 % fewer model-state bytes than ddp with no difference seen in speed" in unranked
    results["rows"][1]["difference"] = "slower"  # separated from the reference, and there are only two
    assert "for 25 % less speed" in summary_sentence(results)


def test_summary_ranks_nothing_when_the_baseline_failed(results: Document) -> None:
    results["rows"][0].update(status="failed", parity=None)
    results["rows"][1]["parity"] = None
    sentence = summary_sentence(results)
    assert "none of 4 presets can be ranked" in sentence
    assert "2 did not complete (ddp: failed, zero3: out_of_memory)" in sentence
    assert "1 could not be checked against the baseline (zero2)" in sentence


def test_summary_names_what_differs_by_design_and_that_nothing_was_compared(results: Document) -> None:
    results["rows"][1].update(group="ddp_comm_hook int8", parity=None)
    assert "1 not ranked here, different by design (zero2 (ddp_comm_hook int8))" in summary_sentence(results)
    assert "could not be checked" not in summary_sentence(results)
    # an empty comparison
    results["rows"] = []
    assert summary_sentence(results) == "Nothing was compared: there are no rows."
    assert "Nothing was measured." in html_text(results)


def test_summary_of_repeated_gpus_says_what_is_fastest_and_what_less_memory_costs(made_up: Document) -> None:
    assert summary_sentence(made_up) == (
        "On 2 × NVIDIA H100 80GB HBM3, zero2 is the fastest that fits (27,000 tokens/s); fsdp2 uses 31 % less"
        " memory than zero2 for 8 % less speed; on 4 × NVIDIA H100 80GB HBM3, zero2 is the fastest of 3 presets (50,220"
        " tokens/s); fsdp2 uses 44 % less memory than zero2 for 5 % less speed; from 2 to 4 processes zero2"
        " becomes 1.86 times as fast (93 % of ideal); 1 did not complete (ddp: out_of_memory);"
        " 1 did not train the same problem (zero1)."
    )


def test_notes_of_gpus_say_what_mfu_counts_the_price_and_throttling(made_up: Document) -> None:
    said = "\n".join(notes(made_up))
    assert "Cost: per million non-padding tokens, at 2.5 per GPU-hour." in said
    assert "MFU counts all parameters and causal attention, padding included" in said
    assert "GPU clocks were reduced during timed steps: zero2 n2 (software power cap), zero2 n4 (" in said


# Reading results.json


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


@pytest.mark.parametrize("model", [Results, Row, RunRecord])
def test_every_key_is_declared_with_its_meaning(model: type[Results | Row | RunRecord]) -> None:
    assert all((field.description or "").endswith(".") for field in model.model_fields.values())
