"""The report is a pure function of results.json: exact lines for a fixture of four rows worked by hand."""

from __future__ import annotations

import copy
import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from toolkit.compare.loading import load_results
from toolkit.compare.report import console_table, notes, summary_sentence, write_report
from toolkit.compare.report.cells import byte_unit
from toolkit.compare.report.csvfile import csv_text
from toolkit.compare.report.html import html_text
from toolkit.compare.report.markdown import markdown_text
from toolkit.compare.report.plot import plot_png
from toolkit.compare.results import (
    Disk,
    Environment,
    Failure,
    Figures,
    FlopsPerToken,
    Job,
    Ladder,
    Method,
    Probe,
    Results,
    Row,
    Timeline,
    TrialRow,
)
from toolkit.errors import ToolkitError

ROOT = Path(__file__).parent.parent
FIXTURE = Path(__file__).parent / "fixtures" / "results_small.json"
SCHEMA = json.loads((ROOT / "toolkit/compare/results.schema.json").read_text("utf-8"))
GIB = 2**30


@pytest.fixture
def results() -> Results:
    """ddp 400 tokens/s and 16 MiB; zero2 300 and 10 MiB; zero3 out of memory; fsdp2 differs."""
    return load_results(FIXTURE)


@pytest.fixture
def gpu_results(results: Results) -> Results:
    """The same on two GPUs, a thousand times larger."""
    results["environment"].update(device="cuda", gpus=[{"name": "NVIDIA H100", "memory_bytes": 80 * GIB}] * 2)
    for row in results["rows"]:
        if row["status"] == "completed":
            row.update(peak_allocated_bytes=40 * GIB, peak_reserved_bytes=48 * GIB, parameter_bytes=4 * GIB)
    return results


@pytest.fixture
def made_up() -> Results:
    """Two and four H100s with every figure there is, made up by hand: no machine measured them."""
    return load_results(FIXTURE.with_name("results_made_up_gpus.json"))


def only(results: Results, *presets: str) -> Results:
    """The results of some presets."""
    results["rows"] = [row for row in results["rows"] if row["preset"] in presets]
    return results


def console_lines(results: Results) -> list[str]:
    from rich.console import Console

    console = Console(width=100, no_color=True, file=None, record=True, force_terminal=False, quiet=False)
    with console.capture() as captured:
        console.print(console_table(results))
    return [line.rstrip() for line in captured.get().splitlines()]


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


# Summary


def test_summary_ranks_only_rows_that_finished_and_trained_the_same_problem(results: Results) -> None:
    assert summary_sentence(results) == (
        "On 2 CPU processes, the 2 of 4 presets that can be compared ran at 300 (zero2) to 400 tokens/s (ddp) in"
        " single runs, unranked; zero2 holds 62 % of ddp's model-state bytes a rank at 0.75 x its speed;"
        " 1 did not finish (zero3: out_of_memory); 1 did not train the same problem (fsdp2);"
        " speeds on CPU (gloo) say nothing about GPUs."
    )


def test_summary_of_gpus_names_them_and_has_no_word_on_cpus(gpu_results: Results) -> None:
    assert summary_sentence(only(gpu_results, "ddp", "zero2")).startswith(
        "On 2 × NVIDIA H100, 2 presets ran at 300 (zero2) to 400 tokens/s (ddp) in single runs, unranked; zero2 holds"
    )
    assert "CPU" not in summary_sentence(gpu_results)


def test_summary_claims_no_order_between_equal_speeds(results: Results) -> None:
    results["rows"][1]["tokens_per_second"] = 400.3  # shown as 400
    assert "ddp and zero2 ran at the same highest speed of" in summary_sentence(results)


def test_summary_claims_no_order_for_a_lone_row(results: Results) -> None:
    assert "ddp ran at 400 tokens/s, with no comparable row beside it" in summary_sentence(
        only(results, "ddp", "fsdp2")
    )


def repeat(results: Results, *presets: str, ranked: bool = True) -> Results:
    """Rows with intervals of 10 % to each side; with `ranked` the comparison says that they are separated."""
    rows = [row for row in results["rows"] if row["preset"] in presets]
    for rank, row in enumerate(rows, 1):
        middle = row["tokens_per_second"] or 0.0
        row.update(repeats=3, tokens_per_second_interval=[middle * 0.9, middle * 1.1], rank=rank if ranked else None)
        row["difference"] = "reference" if row["preset"] == "ddp" else "no difference seen"
    return results


def test_summary_calls_one_fastest_only_where_the_comparison_ranks_it(results: Results) -> None:
    assert "fastest" not in summary_sentence(results)
    ranked = summary_sentence(repeat(copy.deepcopy(results), "ddp", "zero2"))
    assert "ddp is the fastest that fits (400 tokens/s); zero2 holds 38 % fewer model-state bytes for 25 %" in ranked
    unranked = summary_sentence(repeat(results, "ddp", "zero2", ranked=False))
    assert "no difference in speed is seen between ddp and zero2, the fastest of the 2 of 4" in unranked
    assert "zero2 holds 38 % fewer model-state bytes with no difference seen in speed" in unranked
    results["rows"][1]["difference"] = "slower"  # separated from the reference, and there are only two
    assert "for 25 % less speed" in summary_sentence(results)


def test_summary_ranks_nothing_between_a_repeated_row_and_a_single_one(results: Results) -> None:
    assert "in single runs, unranked" in summary_sentence(repeat(results, "ddp"))


def test_summary_ranks_nothing_when_the_reference_failed(results: Results) -> None:
    results["rows"][0].update(status="failed", parity=None)
    results["rows"][1]["parity"] = None
    sentence = summary_sentence(results)
    assert "none of 4 presets can be ranked" in sentence
    assert "2 did not finish (ddp: failed, zero3: out_of_memory)" in sentence
    assert "1 could not be checked against the reference (zero2)" in sentence
    assert "fastest" not in sentence


def test_summary_tells_what_cannot_run_from_what_failed(results: Results) -> None:
    results["rows"][2].update(status="not_supported", message="zeropp needs 8 processes")
    sentence = summary_sentence(results)
    assert "1 cannot run here (zero3)" in sentence
    assert "did not finish" not in sentence


def test_summary_says_what_differs_by_design(results: Results) -> None:
    results["rows"][1].update(group="ddp_comm_hook int8", parity=None)
    assert "different by design, so not ranked here: zero2 (ddp_comm_hook int8)" in summary_sentence(results)
    assert "could not be checked" not in summary_sentence(results)


def test_summary_never_compares_different_process_counts(results: Results) -> None:
    faster = copy.deepcopy(results["rows"][0])
    faster.update(world_size=4, trial="ddp-n4-r0", tokens_per_second=900.0)
    results["rows"] = [*results["rows"][:2], faster]
    sentence = summary_sentence(results)
    assert "On 2 CPU processes, 2 presets ran at 300 (zero2) to 400 tokens/s (ddp) in single runs" in sentence
    assert "on 4 CPU processes, ddp ran at 900 tokens/s, with no comparable row" in sentence


def test_no_rows_is_said(results: Results) -> None:
    results["rows"] = []
    assert summary_sentence(results) == "Nothing was compared: there are no rows."
    assert "Nothing was measured." in html_text(results)
    assert plot_png(results).startswith(b"\x89PNG")


def test_notes_say_that_single_runs_are_not_ranked_by_significance(results: Results) -> None:
    assert notes(results)[0] == "Single runs, not ranked by significance: a small difference may be noise."


# Console


def test_console_table_is_exact_at_100_columns(results: Results) -> None:
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


def test_console_table_names_the_allocator_on_a_gpu(gpu_results: Results) -> None:
    lines = console_lines(gpu_results)
    assert "alloc." in lines[1]
    assert " ".join(lines[4].split()) == "ddp completed 400 0.500 4.00 <0.01 <0.01 40.00 2.0000 1.00"


def test_longest_preset_and_status_fit_on_one_line(results: Results) -> None:
    results["rows"][2].update(preset="zero3_cpu_offload", status="host_out_of_memory")
    results["rows"][0].update(parameter_bytes=513 * 2**20, optimizer_bytes=1026 * 2**20)
    assert any(line.startswith("zero3_cpu_offload  host_out_of_memory  ") for line in console_lines(results))


def test_console_shows_hostile_text_as_text(results: Results) -> None:
    results["rows"][2]["message"] = "[red]not markup[/red]\x1b[31m"
    results["reference"] = "[b]"
    assert "zero3: out_of_memory: [red]not markup[/red] [31m" in console_lines(results)


# Honesty


@pytest.mark.parametrize(("index", "preset"), [(2, "zero3"), (3, "fsdp2")])
def test_a_row_that_failed_or_differs_never_has_a_ratio(
    results: Results, tmp_path: Path, index: int, preset: str
) -> None:
    results["rows"][index]["ratio_to_reference"] = 2.0
    files = write_report(results, tmp_path)
    assert load_results(files.results_json)["rows"][index]["ratio_to_reference"] is None
    rows = list(csv.DictReader(files.results_csv.read_text("utf-8").splitlines()))
    assert (rows[index]["preset"], rows[index]["ratio_to_reference"]) == (preset, "")
    assert next(line for line in console_lines(results) if line.startswith(preset)).endswith("n/a")
    assert results["rows"][index]["ratio_to_reference"] == 2.0  # the caller's dict is left alone


def test_nan_is_unknown_and_the_json_stays_strict(results: Results, tmp_path: Path) -> None:
    results["rows"][2].update(status="diverged", losses=[2.5, float("nan")], last_loss=float("nan"))
    found = json.loads(write_report(results, tmp_path).results_json.read_text("utf-8"), parse_constant=pytest.fail)
    assert (found["rows"][2]["losses"], found["rows"][2]["last_loss"]) == ([2.5, None], None)


def test_the_unit_of_a_table_follows_its_largest_size() -> None:
    assert byte_unit([None, 2**20]).cell(3 * 2**20 // 2).text == "1.5"
    assert byte_unit([10 * GIB]).cell(3 * 2**29).text == "1.50"
    assert byte_unit([]).cell(None).text == "n/a"
    assert (byte_unit([]).cell(1).text, byte_unit([]).cell(0).text) == ("<0.1", "0.0")


# Files


def test_report_writes_five_files_and_writing_again_changes_nothing(results: Results, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(first) == ["comparison.png", "report.html", "report.md", "results.csv", "results.json"]
    write_report(load_results(tmp_path), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == first


def test_a_folder_that_cannot_be_written_is_named(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match=r"cannot write .*results\.json"):
        write_report(results, tmp_path / "file")


def test_an_undecodable_byte_in_a_message_breaks_no_file(results: Results, tmp_path: Path) -> None:
    results["rows"][2]["message"] = b"\xff killed".decode("utf-8", "surrogateescape")
    assert load_results(write_report(results, tmp_path).results_json)["rows"][2]["message"] == "? killed"


def test_report_needs_neither_torch_nor_matplotlib_to_be_imported() -> None:
    heavy = "[name for name in ('torch', 'matplotlib', 'rich') if name in sys.modules]"
    code = f"import sys, toolkit.compare.report; print({heavy})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"


def test_csv_columns_are_frozen(results: Results) -> None:
    header, *lines = csv_text(results).splitlines()
    assert header == (
        "trial,preset,world_size,status,message,parity,parity_message,tokens_per_second,tokens_per_second_per_gpu,"
        "tokens_per_cpu_second,supervised_tokens_per_second,padding_fraction,timed_steps,step_seconds_median,"
        "step_seconds_p90,num_params,num_trainable_params,parameter_bytes,gradient_bytes,optimizer_bytes,"
        "peak_allocated_bytes,peak_reserved_bytes,peak_host_bytes,peak_rank,first_loss,last_loss,ratio_to_reference,"
        "wall_seconds,timed_seconds,run_folder,command,group,repeats,difference,rank,rank_skew,speed_up,"
        "scaling_efficiency,non_padding_tokens_per_second,peak_driver_bytes,allocator_retries,energy_joules,"
        "attestation_sha256,startup_seconds,planned_peak_bytes,planned_allocated_bytes,mfu,mfu_full_attention,hfu,cost_per_million_tokens,"
        "communication_fraction,exposed_communication_fraction,save_seconds,save_bytes,per_device_train_batch_size"
    )
    assert len(lines) == 4  # the message with a line break is one line too
    assert lines[1].startswith("zero2-n2,zero2,2,completed,,agrees,,300.0,150.0,120.0,112.5,0.25,2,0.6667,0.72,")


# Markdown


def test_markdown_table_is_exact(results: Results) -> None:
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


def test_markdown_shows_each_difference_to_the_reference(results: Results) -> None:
    lines = markdown_text(results).splitlines()
    assert "| fsdp2 | parity failed | 2.750000 | +1.0e-01 | 2.200000 | +1.0e-01 |" in lines
    assert "| zero3 | n/a | 2.500000 | 0 | 2.500000 | n/a |" in lines  # it never reached the reference's last step


def test_markdown_holds_hostile_text(results: Results) -> None:
    text = markdown_text(results)
    assert r"models/&lt;b&gt;tiny\|llama&lt;/b&gt;" in text
    assert "````text\n<script>alert('loss')</script> | CUDA out of memory.\nTried to allocate" in text
    assert "first loss 2.75 against 2.5 of ddp \\| relative 1e-1, allowed 1e-5 &lt;b&gt;" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert text.count("](comparison.png)") == 1


# HTML


def test_html_asks_nothing_of_the_network(results: Results) -> None:
    page = html_text(results)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// A press", ""))
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attributes)


def test_html_escapes_what_it_shows(results: Results) -> None:
    page = html_text(results)
    assert page.count("<script>") == 1  # its own
    assert "&lt;script&gt;alert(&#x27;loss&#x27;)&lt;/script&gt; | CUDA out of memory.\nTried to allocate" in page
    assert "models/&lt;b&gt;tiny|llama&lt;/b&gt;" in page


def test_html_escapes_names_in_attributes_and_charts(results: Results) -> None:
    for row in results["rows"]:
        row["preset"] = f'"><img src=x onerror=alert(1)>{row["preset"]}'
    results["environment"]["device"] = "cuda"
    assert "img" not in {tag for tag, _ in Tags(html_text(results)).found}


def test_html_tables_scroll_by_themselves_and_sort_by_number(results: Results) -> None:
    page = html_text(results)
    assert page.count("<table") == page.count('<div class="scroll"><table') == 10
    assert '<td class="num" data-value="400.0">400</td>' in page
    assert '<td class="num">n/a</td>' in page


def test_html_marks_a_failed_row_instead_of_drawing_it(results: Results) -> None:
    bars = [line for line in html_text(results).splitlines() if 'class="bar"' in line and ">zero3<" in line]
    assert len(bars) == 2  # memory and speed
    assert all("out_of_memory" in bar and "<i" not in bar for bar in bars)


# A full page: several world sizes, intervals, what was planned, a profile, failures


def bars(page: str, label: str) -> list[str]:
    return [line for line in page.splitlines() if 'class="bar"' in line and f">{label}<" in line]


def widths(bar: str) -> list[float]:
    return [float(found) for found in re.findall(r"<i[^>]*width:([\d.]+)%", bar)]


def test_summary_of_repeated_gpus_says_what_is_fastest_and_what_less_memory_costs(made_up: Results) -> None:
    assert summary_sentence(made_up) == (
        "On 2 × NVIDIA H100 80GB HBM3, zero2 is the fastest that fits (27,000 tokens/s); fsdp2 uses 31 % less"
        " memory for 8 % less speed; on 4 × NVIDIA H100 80GB HBM3, zero2 is the fastest of 3 presets (50,220"
        " tokens/s); fsdp2 uses 44 % less memory for 5 % less speed; from 2 to 4 processes zero2 becomes 1.86 times"
        " as fast (93 % of ideal); 1 did not finish (ddp: out_of_memory); 1 did not train the same problem (zero1)."
    )


def test_a_memory_bar_is_the_peak_in_parts_against_capacity_and_plan(made_up: Results) -> None:
    """68 % of the line are the longest of all: ddp's plan of 86.3 GiB. zero2 n2 peaks at 55 GiB."""
    memory, _ = bars(html_text(made_up), "zero2 n2")
    parameters, gradients, optimizer, rest, _ = widths(memory)
    scale = 68 / 86.3
    assert sum((parameters, gradients, optimizer, rest)) == pytest.approx(55 * scale, abs=0.05)
    assert parameters == pytest.approx(8e9 / GIB * scale, abs=0.01)
    assert (optimizer / parameters, gradients / parameters) == pytest.approx((3, 0.5), abs=0.01)
    assert f'<u class="tick" style="left:{56.5 * scale:.2f}%">' in memory
    assert f'<u class="capacity" style="left:{81559 / 1024 * scale:.2f}%">' in memory


def test_a_row_that_ran_out_of_memory_shows_what_was_measured_and_planned(made_up: Results) -> None:
    memory, speeds = bars(html_text(made_up), "ddp")
    assert "out_of_memory in step, 74.10 GiB measured" in memory
    assert 'class="hatch"' in memory
    assert '<u class="tick" style="left:68.00%">' in memory
    assert "<i" not in speeds


def test_without_a_plan_there_is_no_marker(made_up: Results) -> None:
    for row in made_up["rows"]:
        row["planned_allocated_bytes"] = None
    made_up["rows"] = made_up["rows"][1:]
    page = html_text(made_up)
    assert 'class="tick"' not in page
    assert ">planned<" not in page


def test_offloaded_states_are_not_drawn_as_gpu_memory(made_up: Results) -> None:
    made_up["rows"][1]["peak_allocated_bytes"] = 20 * GIB
    memory, _ = bars(html_text(made_up), "zero2 n2")
    assert len(widths(memory)) == 2  # the peak, and the room up to the plan's mark
    assert "20.00 GiB (model states, host included: 33.53)" in memory


def test_a_speed_has_its_interval_and_one_without_parity_has_no_bar(made_up: Results) -> None:
    page = html_text(made_up)
    speeds = bars(page, "zero3 n4")[1]
    scale = 68 / 50571.5  # the longest: the upper end of zero2 n4
    low, high = 44208.3, 45191.7
    found = re.search(r'class="span" style="left:([\d.]+)%;width:([\d.]+)%', speeds)
    assert found is not None
    assert (float(found[1]), float(found[2])) == pytest.approx((low * scale, (high - low) * scale), abs=0.02)
    assert "44,700 (44,208 to 45,192)" in speeds
    assert "<i" not in bars(page, "zero1")[1]


def test_scaling_and_timeline_are_there_only_with_something_to_show(made_up: Results, results: Results) -> None:
    full, small = html_text(made_up), html_text(results)
    for heading in ("<h2>Scaling</h2>", "<h2>One step of every rank</h2>", "<h3>GPU links</h3>"):
        assert heading in full
        assert heading not in small
    assert full.count("<details") == 6  # one a row with a profile, the first open
    assert full.count("<details open>") == 1
    assert full.count('class="rank"><b>rank 3') == 3


def test_the_full_page_stays_self_contained_and_names_each_replay(made_up: Results) -> None:
    page = html_text(made_up)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page.replace("// A press", ""))
    assert "toolkit compare --replay DIR --row zero2-n4" in page
    assert "power limit 700 W" in page
    assert "NV18" in page


def test_notes_of_gpus_say_what_mfu_counts_the_price_and_throttling(made_up: Results) -> None:
    said = notes(made_up)
    assert "Cost: of a million non-padding tokens, at 2.5 a GPU-hour." in said
    assert any(note.startswith("MFU: all parameters and causal attention, padding included") for note in said)
    held = "GPU clocks were held down during timed steps: zero2 n2 (software power cap), zero2 n4 (software power cap)."
    assert held in said


def test_markdown_of_repeated_rows_has_intervals_mfu_and_cost(made_up: Results) -> None:
    lines = markdown_text(made_up).splitlines()
    assert lines[0] == "# Comparison: 5 presets on 2 and 4 × NVIDIA H100 80GB HBM3"
    assert (
        "| fsdp2 n2 | completed | 24,840 | 24,641–25,039 | 31.6 % | 0.0635 | 1.319 | 7.45 | 7.45 | 14.90 | 37.95"
        " | 1.3999 | 0.92 |"
    ) in lines
    assert "| ddp | out_of_memory | 15.00 | 36.10 | 44.60 | n/a | allocated |" in lines  # the ladder


def test_the_made_up_mfu_is_what_its_own_numbers_give(made_up: Results) -> None:
    """The fixture is worked by hand: 4e9 parameters, 36 layers of width 2560, 2048 tokens, an H100's 989 TFLOP/s."""
    row = made_up["rows"][1]
    causal = 6 * 4_000_000_000 + 6 * 36 * 2560 * 2048
    assert row["flops_per_token"] is not None
    assert row["flops_per_token"]["causal"] == causal
    assert row["mfu"] == pytest.approx(13_500 * causal / 989e12, rel=1e-4)


# Plot


def test_plot_draws_intervals(made_up: Results) -> None:
    assert plot_png(made_up).startswith(b"\x89PNG\r\n")


def test_plot_is_a_png_for_hostile_names_too(results: Results) -> None:
    results["rows"][0]["preset"] = r"$\frac{ddp$"
    assert plot_png(results).startswith(b"\x89PNG\r\n")


# Schema


@pytest.mark.parametrize("fixture", ["results", "gpu_results", "made_up"])
def test_schema_accepts_the_fixture(fixture: str, request: pytest.FixtureRequest) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(request.getfixturevalue(fixture), SCHEMA)


@pytest.mark.parametrize(
    "change",
    [{"ratio_to_reference": 1.0}, {"status": "exploded"}, {"peak_host_bytes": 1.5}, {"preset": None}],
    ids=["ratio of a failed row", "unknown status", "fraction of a byte", "no preset"],
)
def test_schema_refuses(results: Results, change: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    results["rows"][2].update(change)  # type: ignore[typeddict-item]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(results, SCHEMA)


def test_schema_types_and_docs_name_the_same_keys() -> None:
    parts = SCHEMA["properties"]
    shapes = [
        (SCHEMA, Results),
        (parts["environment"], Environment),
        (parts["job"], Job),
        (parts["rows"]["items"], Row),
        (parts["rows"]["items"]["properties"]["failure"], Failure),
        (parts["trials"]["items"], TrialRow),
        (parts["method"], Method),
        (parts["environment"]["properties"]["disk"], Disk),
        (parts["rows"]["items"]["properties"]["memory_ladder"], Ladder),
        (parts["rows"]["items"]["properties"]["flops_per_token"], FlopsPerToken),
        (parts["rows"]["items"]["properties"]["timeline"], Timeline),
        (parts["rows"]["items"]["properties"]["probes"]["items"], Probe),
    ]
    for schema, shape in shapes:
        assert list(schema["properties"]) == schema["required"] == list(shape.__annotations__)
    docs = (ROOT / "docs/results.md").read_text("utf-8")
    for schema, _ in shapes:
        for key, value in schema["properties"].items():
            assert re.search(rf"^\| `{key}` \| .* \| {re.escape(value['description'])} \|$", docs, re.MULTILINE), key


# Loading


def test_loading_a_missing_file_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"cannot read .*results.json: No such file") as raised:
        load_results(tmp_path)
    assert raised.value.hint == "name a folder of `toolkit compare` that holds results.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1,\n oops', r"line 2: not JSON"),
        ("[1]", "has no schema_version"),
        ('{"schema_version": 2}', "has schema_version 2; this toolkit reads 1"),
        ('{"schema_version": 1, "rows": []}', "results has no created, reference, environment, job"),
    ],
    ids=["broken", "foreign", "newer", "incomplete"],
)
def test_loading_refuses_what_it_cannot_use(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(ToolkitError, match=message):
        load_results(file)


def test_loading_names_the_row_and_the_key(results: Results, tmp_path: Path) -> None:
    del results["rows"][1]["preset"]  # type: ignore[misc]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ToolkitError, match=r"rows\[1\] has no preset"):
        load_results(tmp_path)


def test_loading_reads_results_from_before_trials_were_repeated(results: Results, tmp_path: Path) -> None:
    old: dict[str, Any] = json.loads(json.dumps(results))
    del old["trials"], old["method"]
    old["rows"] = [{key: row[key] for key in Figures.__annotations__} for row in old["rows"]]
    old["rows"][3].update(parity="differs", tokens_per_second=800.0)
    (tmp_path / "results.json").write_text(json.dumps(old))
    read = load_results(tmp_path)
    assert [row["repeats"] for row in read["rows"]] == [1, 1, 0, 1]
    assert {row["difference"] for row in read["rows"]} == {None}
    assert (read["rows"][3]["parity"], read["rows"][3]["tokens_per_second"]) == ("parity failed", None)
    assert read["trials"][0]["timed_step_numbers"] == [3, 4]
    assert (read["rows"][0]["mfu"], read["price_per_gpu_hour"], read["environment"]["disk"]) == (None, None, None)


def test_loading_welcomes_keys_that_it_does_not_know(tmp_path: Path) -> None:
    newer = json.loads(FIXTURE.read_text("utf-8")) | {"comment": "more keys may be added"}
    (tmp_path / "results.json").write_text(json.dumps(newer))
    assert load_results(tmp_path)["reference"] == "ddp"


# What reads badly


def test_a_column_that_no_row_has_is_left_out_and_a_table_without_figures_too(results: Results) -> None:
    page = html_text(results)
    assert "MFU" not in page
    assert "peak\ndriver" not in page
    for row in results["rows"]:
        row.update(status="failed")
    assert "<h2>Speed</h2>" not in html_text(results)


def test_a_slow_down_stays_inside_the_scaling_chart(made_up: Results) -> None:
    for row in made_up["rows"]:
        if row["speed_up"] is not None and row["world_size"] == 4:
            row["speed_up"] = 0.8
    chart = html_text(made_up).split("<h2>Scaling</h2>")[1].split("</svg>")[0]
    assert "<span>0.80×</span>" in chart
    heights = [
        float(point.split(",")[1]) for points in re.findall(r'points="([^"]+)"', chart) for point in points.split()
    ]
    assert min(heights) >= 0
    assert max(heights) <= 300


def test_the_scaling_chart_names_each_number_of_processes_where_it_stands(made_up: Results) -> None:
    for row in list(made_up["rows"]):
        if row["world_size"] == 4:
            made_up["rows"].append(row | {"world_size": 8, "trial": f"{row['preset']}-n8", "speed_up": 3.0})  # type: ignore[arg-type,operator]
    chart = html_text(made_up).split("<h2>Scaling</h2>")[1].split("</div></div>")[0]
    assert re.findall(r"left:([\d.]+)%;translate:-(\d+)%\">(\d)<", chart) == [
        ("0.00", "0", "2"),
        ("33.33", "33", "4"),
        ("100.00", "100", "8"),
    ]


def test_an_interval_far_beyond_the_others_ends_open_and_leaves_the_bars_their_room(made_up: Results) -> None:
    made_up["rows"][1]["tokens_per_second_interval"] = [2_000.0, 400_000.0]
    page = html_text(made_up)
    speeds = bars(page, "zero2 n2")[1]
    assert 'class="span open"' in speeds
    assert "27,000 (2,000 to 400,000)" in speeds
    assert widths(bars(page, "zero2 n4")[1])[0] == pytest.approx(68 / 1.5, abs=0.01)  # the fastest


def test_what_cannot_run_here_is_no_alarm(made_up: Results) -> None:
    made_up["rows"][0].update(status="not_supported", message="needs CUDA kernels", failure=None)
    page = html_text(made_up)
    assert '<td class="status">not_' not in page
    assert all('class="alarm' not in bar for bar in bars(page, "ddp"))
    assert "steps with a loss" not in page


def test_a_search_shows_what_it_tried_and_how_the_smallest_that_does_not_run_ended(made_up: Results) -> None:
    assert "Largest micro-batch" not in html_text(made_up) + markdown_text(made_up)
    failure: Any = {"kind": "out_of_memory", "phase": "backward", "step": 0, "rank": 0}
    failure |= {"predicted_bytes": 84 * GIB, "measured_bytes": 78 * GIB}
    for row, sizes in zip(made_up["rows"][1:3], ({4: 0, 6: 1, 8: 1}, {4: 0, 8: 0}), strict=True):
        row["per_device_train_batch_size"] = max(size for size, failed in sizes.items() if not failed)
        row["probes"] = [
            {
                "per_device_train_batch_size": size,
                "status": "out_of_memory" if failed else "completed",
                "message": "no room" if failed else None,
                "failure": failure if failed else None,
            }
            for size, failed in sizes.items()
        ]
    lines = markdown_text(made_up).splitlines()
    assert "| zero2 n2 | 4 | 4, 6, 8 | 6 | out_of_memory | backward | 84.00 | 78.00 |" in lines
    assert "| zero3 n2 | 8 | 4, 8 | none |  |  |  |  |" in lines
    assert "the largest micro-batch that runs is 4 (zero2 n2), 8 (zero3 n2)" in summary_sentence(made_up)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    jsonschema.validate(made_up, SCHEMA)
