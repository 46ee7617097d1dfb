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
from measured_jobs import rows


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


# Each is of the planner as the ones before had mended it.
@pytest.mark.parametrize(
    ("half", "at_first_look", "outside"),
    [
        ("fifth", (59, 77), []),
        ("sixth", (14, 15), ["gputest-8b-full-rtx-pro-6000"]),
        ("seventh", (63, 70), ["aws-8b-32xh100", "aws-mistral-32xh100", "math-8b-qlora", "math-8b-full"]),
        ("eighth", (9, 9), []),
    ],
)
def test_speeds_that_nobody_had_used_are_inside_of_their_intervals_since_they_were_seen(
    half: str, at_first_look: tuple[int, int], outside: list[str]
) -> None:
    """Written down before any was planned: their intervals at first look are in the fixture."""
    unseen = {row["id"]: row for row in rows("reported_speeds") if row["half"] == half}
    ends = [[float(row[name]) for name in ("first_low", "tokens_per_second", "first_high")] for row in unseen.values()]
    assert (sum(sorted(each) == each for each in ends), len(ends)) == at_first_look
    assert [speed.name for speed in left_out_speeds() if speed.name in unseen and not speed.is_inside] == outside
