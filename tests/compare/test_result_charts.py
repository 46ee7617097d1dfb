"""Bars are drawn to scale, curves stay inside their box, and labels stand where they belong."""

from __future__ import annotations

import re

import pytest
from results_documents import GIB, Document, bars, html_text, widths


def test_a_memory_bar_is_the_peak_in_parts_against_capacity_and_plan(made_up: Document) -> None:
    """68 % of the line are the longest of all: ddp's plan of 86.3 GiB. zero2 n2 peaks at 55 GiB."""
    memory, _ = bars(html_text(made_up), "zero2 n2")
    parameters, gradients, optimizer, rest, _ = widths(memory)
    scale = 68 / 86.3
    assert sum((parameters, gradients, optimizer, rest)) == pytest.approx(55 * scale, abs=0.05)
    assert parameters == pytest.approx(8e9 / GIB * scale, abs=0.01)
    assert (optimizer / parameters, gradients / parameters) == pytest.approx((3, 0.5), abs=0.01)
    assert f'<u class="tick" style="left:{56.5 * scale:.2f}%">' in memory
    assert f'<u class="capacity" style="left:{81559 / 1024 * scale:.2f}%">' in memory


def test_a_row_that_ran_out_of_memory_shows_what_was_measured_and_planned(made_up: Document) -> None:
    memory, speeds = bars(html_text(made_up), "ddp")
    assert "out_of_memory in step, 74.10 GiB measured" in memory
    assert 'class="hatch"' in memory
    assert '<u class="tick" style="left:68.00%">' in memory
    assert "<i" not in speeds


def test_offloaded_states_are_not_drawn_as_gpu_memory(made_up: Document) -> None:
    made_up["rows"][1]["peak_allocated_bytes"] = 20 * GIB
    memory, _ = bars(html_text(made_up), "zero2 n2")
    assert len(widths(memory)) == 2  # the peak, and the room up to the plan's mark
    assert "20.00 GiB (model states, host included: 33.53)" in memory


def test_a_speed_has_its_interval_and_one_without_parity_has_no_bar(made_up: Document) -> None:
    page = html_text(made_up)
    speeds = bars(page, "zero3 n4")[1]
    scale = 68 / 50571.5  # the longest: the upper end of zero2 n4
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
    assert widths(bars(page, "zero2 n4")[1])[0] == pytest.approx(68 / 1.5, abs=0.01)  # the fastest


def test_the_scaling_chart_names_each_number_of_processes_where_it_stands(made_up: Document) -> None:
    for row in list(made_up["rows"]):
        if row["world_size"] == 4:
            made_up["rows"].append(row | {"world_size": 8, "trial": f"{row['preset']}-n8", "speed_up": 3.0})
    chart = html_text(made_up).split("<h2>Scaling</h2>")[1].split("</div></div>")[0]
    assert re.findall(r"left:([\d.]+)%;translate:-(\d+)%\">(\d)<", chart) == [
        ("0.00", "0", "2"),
        ("33.33", "33", "4"),
        ("100.00", "100", "8"),
    ]
