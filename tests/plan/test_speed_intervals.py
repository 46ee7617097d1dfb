"""Intervals of speeds cover as many of a source that was left out as they say; `pytest -s` prints each group."""

import statistics

import pytest
from left_out_speeds import (
    COVERED,
    by,
    coverage_of_sources,
    held_out_coverage,
    left_out_speeds,
    quantile_over_sources,
    table,
)


def test_intervals_cover_nine_of_ten_speeds_of_a_source_that_was_left_out() -> None:
    for name in ("bound", "source"):
        print(*(" | ".join(row) for row in table(by(name), name)), sep="\n")
    for speed in left_out_speeds():
        if not speed.is_inside:
            print(f"outside: {speed.name} {speed.source} {speed.bound} {speed.error:+.0%} needs {speed.needed:.2f}")
    held_out = held_out_coverage()
    print("held out:", {name: f"{share:.0%}" for name, share in held_out.items()})
    print(f"factor over all sources: {quantile_over_sources(left_out_speeds()):.2f}")
    assert coverage_of_sources(list(left_out_speeds())) >= COVERED
    assert statistics.mean(held_out.values()) == pytest.approx(COVERED, abs=0.1)
