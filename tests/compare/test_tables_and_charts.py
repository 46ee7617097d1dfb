"""Tables show the columns that some row has; bars are to scale, labels where they belong."""

import re
from typing import Any

import pytest
from results_documents import GIB, Document, answer_text, bars, html_text, markdown_text, widths


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
