"""Curves stay inside their box, and labels stand where they belong."""

from __future__ import annotations

import re

from results_documents import Document, html_text


def test_a_slow_down_stays_inside_the_scaling_chart(made_up: Document) -> None:
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
