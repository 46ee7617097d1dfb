"""Tables show the columns that some row has; bars are to scale, curves inside their box, labels where they belong.

Two comparisons side by side: claims only where intervals separate, and only for one job.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from results_documents import GIB, Document, answer_text, bars, before_and_after, html_text, markdown_text, read, widths


def test_a_column_that_no_row_has_is_left_out_and_a_table_without_figures_too(results: Document) -> None:
    page = html_text(results)
    assert "MFU" not in page
    assert "peak\ndriver" not in page
    results["method"]["repeats"] = 2
    assert "<h2>Speed</h2>" in html_text(results)
    for row in results["rows"]:
        row.update(status="failed")
    assert "<h2>Speed</h2>" not in html_text(results)


def test_rows_of_a_split_model_show_their_layout_and_their_batch(made_up: Document) -> None:
    assert "layout" not in markdown_text(made_up)
    completed = [row for row in made_up["rows"] if row["status"] == "completed"]
    for row in completed:
        row.update(layout=None, per_device_train_batch_size=8)
    completed[-1].update(layout="dp_shard 2 x tp 2", per_device_train_batch_size=16)
    page = markdown_text(made_up)
    header, _, *lines = [line for line in page.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in header.split("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[: len(made_up["rows"])]]
    layout, batch = columns.index("layout"), columns.index("per-GPU batch")
    found = [(row[layout], row[batch]) for row in cells if row[batch] != "n/a"]
    assert found == [*[("n/a", "8")] * (len(completed) - 1), ("dp_shard 2 x tp 2", "16")]
    assert "a batch is larger by as many ranks" in page


def test_a_batch_search_shows_its_sizes_and_the_failure_of_the_smallest_that_does_not_run(made_up: Document) -> None:
    assert "Largest per-GPU batch" not in html_text(made_up) + markdown_text(made_up)
    failure: Any = {"kind": "out_of_memory", "phase": "backward", "step": 0, "rank": 0}
    failure |= {"predicted_bytes": 84 * GIB, "measured_bytes": 78 * GIB}
    ran = {"status": "completed", "message": None, "failure": None}
    ended = {"status": "out_of_memory", "message": "no room", "failure": failure}
    for row, sizes in zip(made_up["rows"][1:3], ({4: ran, 6: ended, 8: ended}, {4: ran, 8: ran}), strict=True):
        row["per_device_train_batch_size"] = max(size for size, outcome in sizes.items() if outcome is ran)
        row["probes"] = [{"per_device_train_batch_size": size, **outcome} for size, outcome in sizes.items()]
    lines = markdown_text(made_up).splitlines()
    assert "| zero2 n2 | 4 | 4, 6, 8 | 6 | out_of_memory | backward | 84.00 | 78.00 |" in lines
    assert "| zero3 n2 | 8 | 4, 8 | none |  |  |  |  |" in lines
    assert "the largest per-GPU batch that runs is 4 (zero2 n2), 8 (zero3 n2)" in answer_text(made_up)


# Charts


def test_a_memory_bar_is_the_peak_in_parts_against_capacity_and_plan(made_up: Document) -> None:
    """The longest of all is ddp's plan of 86.3 GiB. zero2 n2 peaks at 55 GiB."""
    memory, _ = bars(html_text(made_up), "zero2 n2")
    parameters, gradients, optimizer, rest = widths(memory)
    scale = 100 / 86.3
    assert sum((parameters, gradients, optimizer, rest)) == pytest.approx(55 * scale, abs=0.05)
    assert parameters == pytest.approx(8e9 / GIB * scale, abs=0.01)
    assert (optimizer / parameters, gradients / parameters) == pytest.approx((3, 0.5), abs=0.01)
    assert f'<u class="tick" style="left:{56.5 * scale:.2f}%">' in memory
    assert f'<u class="capacity" style="left:{81559 / 1024 * scale:.2f}%">' in memory


def test_a_row_that_ran_out_of_memory_shows_what_was_measured_and_planned(made_up: Document) -> None:
    memory, speeds = bars(html_text(made_up), "ddp")
    assert "out_of_memory in step, 74.10 GiB measured" in memory
    assert 'class="hatch"' in memory
    assert '<u class="tick" style="left:100.00%">' in memory
    assert "<i" not in speeds


def test_a_speed_has_its_interval_and_one_without_parity_has_no_bar(made_up: Document) -> None:
    page = html_text(made_up)
    speeds = bars(page, "zero3 n4")[1]
    scale = 100 / 50571.5  # the longest: the upper end of zero2 n4
    low, high = 44208.3, 45191.7
    found = re.search(r'class="span" style="left:([\d.]+)%;width:([\d.]+)%', speeds)
    assert found is not None
    assert (float(found[1]), float(found[2])) == pytest.approx((low * scale, (high - low) * scale), abs=0.02)
    assert "44,700 (44,208 to 45,192)" in speeds
    assert "<i" not in bars(page, "zero1")[1]


def test_an_interval_far_beyond_the_others_ends_open_and_does_not_shrink_the_other_bars(made_up: Document) -> None:
    made_up["rows"][1]["tokens_per_second_interval"] = [2_000.0, 400_000.0]
    page = html_text(made_up)
    speeds = bars(page, "zero2 n2")[1]
    assert 'class="span open"' in speeds
    assert "27,000 (2,000 to 400,000)" in speeds
    assert widths(bars(page, "zero2 n4")[1])[0] == pytest.approx(100 / 1.5, abs=0.01)  # the fastest


def test_a_long_curve_is_thinned_in_the_page(results: Document) -> None:
    short = len(html_text(results))
    results["rows"][0]["losses"] = [2.0, 1.0] * 50_000
    results["rows"][1]["losses"] = [None]  # a line without points
    assert len(html_text(results)) < short + 2100 * len("1000.0,300.0 ")


# Two comparisons


@pytest.fixture
def after(made_up: Document) -> Document:
    """Another torch: zero2 n2 at 1.1 times its speed, the others as before."""
    results = copy.deepcopy(made_up)
    results["environment"]["versions"]["torch"] = "2.14.0"
    row = results["rows"][1]
    low, high = row["tokens_per_second_interval"] or (0.0, 0.0)
    row.update(tokens_per_second=29_700.0, tokens_per_second_interval=[low * 1.1, high * 1.1])
    return results


def test_what_became_faster_is_claimed_only_where_intervals_separate(made_up: Document, after: Document) -> None:
    paired = before_and_after(made_up, after)
    assert paired.summary == (
        "Of 8 rows in both, 1 became faster (zero2-n2: 1.10), 0 became slower, no difference is seen in 5."
    )
    assert paired.pairs[1].interval == pytest.approx((1.1 * 26_838 / 27_162, 1.1 * 27_162 / 26_838))


def test_single_runs_support_no_claim_and_show_no_speeds_of_a_cpu(results: Document) -> None:
    assert before_and_after(results, results).summary == "4 rows are in both."
    assert "| 400 |" not in before_and_after(results, results).rendered("md")
    results["environment"]["device"] = "cuda"
    assert before_and_after(results, results).summary == (
        "4 rows are in both; nothing is claimed of 2 single runs (ddp-n2, zero2-n2)."
    )


def test_a_row_that_failed_after_the_upgrade_is_named(made_up: Document, after: Document) -> None:
    after["rows"][2].update(status="out_of_memory", tokens_per_second=None, tokens_per_second_interval=None)
    after["rows"].pop()
    said = before_and_after(made_up, after).summary
    assert "zero3-n2: completed before, out_of_memory after" in said
    assert "only before: fsdp2-n4" in said


def test_a_table_holds_both_values_and_what_differs_in_the_environment(made_up: Document, after: Document) -> None:
    after["environment"]["gpus"][0]["driver"] = "580.1"
    both = before_and_after(made_up, after)
    lines = both.rendered("md").splitlines()
    row = "| zero2-n2 | 27,000 | 29,700 | 1.100 | 1.087–1.113 | faster | 55.00 | 55.00 | 1.3999 | 1.3999 |"
    assert {row, "| torch | 2.13.0 | 2.14.0 |"} <= set(lines)
    (_, gpus_before, gpus_after), _ = both.environment
    assert ("570.86.15" in gpus_before, "580.1" in gpus_after) == (True, True)


def test_the_command_reports_one_job_and_refuses_others(
    made_up: Document, after: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, results in (("a", made_up), ("b", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    code, out, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 0, err
    assert "torch: 2.13.0 -> 2.14.0" in out
    assert (tmp_path / "b" / "before-and-after.html").is_file()
    after["job"].update(seed=7, training_arguments=["--max_steps", "99"])
    (tmp_path / "b" / "results.json").write_text(json.dumps(after))
    code, _, err = run_command(["report", str(tmp_path / "a"), str(tmp_path / "b")], capsys)
    assert code == 2
    assert "do not train the same job: seed 42 and 7; training arguments " in err


def test_a_report_again_can_be_given_a_price(
    made_up: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(made_up))
    code, _, err = run_command(["report", str(tmp_path), "--price-per-gpu-hour", "5"], capsys)
    assert code == 0, err
    again = read(tmp_path)
    assert again["price_per_gpu_hour"] == 5
    cost = again["rows"][1]["cost_per_million_tokens"]
    assert cost == pytest.approx(5 * 2 / 3600 / (27_000 * 0.88) * 1e6)
