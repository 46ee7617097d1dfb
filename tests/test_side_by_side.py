"""A plan beside a rehearsal: parts are matched by the plan's words, and differences are planned over found."""

from __future__ import annotations

import pytest

from toolkit.runs.side_by_side import Difference, side_by_side

PLAN = {
    **{"parameter_bytes": 80, "gradient_bytes": 100, "optimizer_bytes": 200},
    "phases": {
        "backward": {
            **{"parameter_bytes": 80, "gradient_bytes": 0, "optimizer_bytes": 200, "activation_bytes": 300},
            **{"logits_bytes": 50, "buffer_bytes": 40, "allocated_bytes": 670},
        }
    },
}


def test_states_are_compared_to_the_byte() -> None:
    rows = side_by_side(PLAN, {"parameter_bytes": 100, "gradient_bytes": 100, "optimizer_bytes": 160})
    assert [(row.part, row.planned_bytes, row.rehearsed_bytes) for row in rows] == [
        ("parameter", 80, 100),
        ("gradient", 100, 100),
        ("optimizer", 200, 160),
    ]
    assert [row.difference for row in rows] == pytest.approx([-0.2, 0.0, 0.25])


def test_what_fake_tensors_tell_apart_is_put_together_in_the_plan_s_words() -> None:
    parts = {"parameter": 80, "optimizer": 200, "forward": 250, "backward": 50, "gathered": 30, "reduction": 10}
    peaks = {"backward": {"total_bytes": 700, "parts": parts | {"logits": 80}}}
    rows = {row.part: row for row in side_by_side(PLAN, {"peaks": peaks})}
    assert set(rows) == {
        *(f"backward: {part}" for part in ("parameter", "gradient", "optimizer", "activation", "logits", "buffer")),
        "backward: allocated",
    }
    assert rows["backward: activation"].difference == 0
    assert rows["backward: buffer"].rehearsed_bytes == 40
    assert rows["backward: gradient"].difference == 0  # nothing planned, nothing found
    assert rows["backward: allocated"].as_row() == {
        **{"part": "backward: allocated", "planned_bytes": 670, "rehearsed_bytes": 700},
        "difference": pytest.approx(-30 / 700),
    }


def test_a_gpu_s_peaks_are_compared_whole() -> None:
    found = {"phase_peaks": {"backward": {"peak_allocated_bytes": 600, "peak_reserved_bytes": 900}}}
    assert [(row.part, row.rehearsed_bytes) for row in side_by_side(PLAN, found)] == [("backward: allocated", 600)]


def test_a_part_that_only_the_plan_has_has_no_ratio() -> None:
    assert Difference(part="logits", planned_bytes=5, rehearsed_bytes=0).difference is None
