"""Intervals of medians, speeds and ratios, against tables, against sampling, and on a preset beside itself."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from toolkit.compare.intervals import (
    centre,
    difference,
    interval,
    next_interval,
    ratio_confidence,
    ratio_interval,
    student_t,
)
from toolkit.runs.median import is_within, median_interval


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 10, 2.228), (0.99, 2, 9.925), (0.99, 4, 4.604), (0.99, 30, 2.750)],
)
def test_student_t_is_the_tables(confidence: float, freedom: float, expected: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(expected, abs=5e-4)


def test_student_t_lies_between_its_neighbours_for_a_fraction() -> None:
    assert student_t(0.99, 4) < student_t(0.99, 3.5) < student_t(0.99, 3)


def test_an_interval_by_hand() -> None:
    # logs 0, 0, 0.03: mean 0.01, standard deviation 0.017320508, over sqrt 3 is 0.01; t(0.95, 2) = 4.302653
    low, high = interval([1.0, 1.0, math.exp(0.03)]) or (0, 0)
    assert (math.log(low), math.log(high)) == pytest.approx((0.01 - 0.04302653, 0.01 + 0.04302653), abs=1e-7)


def test_a_ratio_by_hand() -> None:
    # equal variances 0.0003: error sqrt(2 * 0.0001), 4 degrees of freedom, t(0.99, 4) = 4.604095
    own, other = [1.0, 1.0, math.exp(0.03)], [2.0, 2.0, 2 * math.exp(0.03)]
    low, high = ratio_interval(own, other, 0.99) or (0, 0)
    half = 4.604095 * math.sqrt(2e-4)
    assert (math.log(2 * low), math.log(2 * high)) == pytest.approx((-half, half), abs=1e-6)
    assert difference((low, high)) == "slower"


def test_one_repeat_claims_nothing() -> None:
    assert interval([3.0]) is None
    assert ratio_interval([3.0], [1.0, 1.0], 0.99) is None
    assert difference(None) is None


@pytest.mark.parametrize(
    ("ratio", "said"), [((1.01, 1.2), "faster"), ((0.8, 0.99), "slower"), ((0.99, 1.01), "no difference seen")]
)
def test_a_difference_is_claimed_only_where_one_is_outside(ratio: tuple[float, float], said: str) -> None:
    assert difference(ratio) == said


def test_many_rows_need_more_confidence() -> None:
    assert [ratio_confidence(n) for n in (0, 1, 5, 10)] == pytest.approx([0.99, 0.99, 0.99, 0.995])


def figures(rng: random.Random, repeats: int, *, between: float, within: float, steps: int = 30) -> list[float]:
    """Speeds of trials whose level varies by `between` from trial to trial, and whose steps vary by `within`."""
    found = []
    for _ in range(repeats):
        level = rng.gauss(0, between)
        found.append(1 / math.exp(statistics.median(rng.gauss(level, within) for _ in range(steps))))
    return found


@pytest.mark.parametrize(("between", "within"), [(0.05, 0.02), (0.003, 0.05), (0.0, 0.1)])
def test_a_preset_beside_itself_differs_in_at_most_two_of_a_hundred(between: float, within: float) -> None:
    """An interval over pooled steps would claim most of those whose trials vary."""
    rng, claims, comparisons = random.Random(0), 0, 400
    for _ in range(comparisons):
        a, b = (figures(rng, 3, between=between, within=within) for _ in range(2))
        claims += difference(ratio_interval(a, b, ratio_confidence(1))) != "no difference seen"
    assert claims <= 0.02 * comparisons


def test_a_preset_that_drifts_with_its_neighbour_claims_no_more() -> None:
    rng, claims = random.Random(1), 0
    for _ in range(400):
        drift = [math.exp(rng.gauss(0, 0.1)) for _ in range(3)]
        a, b = ([f * d for f, d in zip(figures(rng, 3, between=0.01, within=0), drift, strict=True)] for _ in range(2))
        claims += difference(ratio_interval(a, b, 0.99)) != "no difference seen"
    assert claims <= 8


def test_a_twentieth_is_mostly_seen_where_trials_vary_by_half_a_hundredth() -> None:
    rng, seen = random.Random(0), 0
    for _ in range(100):
        a, b = (figures(rng, 3, between=0.005, within=0.02) for _ in range(2))
        seen += difference(ratio_interval([1.05 * f for f in a], b, 0.99)) == "faster"
    assert seen >= 75


def test_one_more_trial_lands_in_its_interval_as_often_as_it_says() -> None:
    rng, inside = random.Random(0), 0
    for _ in range(400):
        *three, one = figures(rng, 4, between=0.02, within=0.0, steps=1)
        low, high = next_interval(three) or (0, 0)
        inside += low <= one <= high
    assert 0.92 * 400 <= inside <= 0.98 * 400


def test_the_centre_is_the_geometric_mean() -> None:
    assert centre([1.0, 4.0]) == pytest.approx(2.0)


def test_a_medians_interval_is_what_resampling_gives() -> None:
    rng = random.Random(0)
    values = [rng.expovariate(1) for _ in range(41)]
    medians = sorted(statistics.median(rng.choices(values, k=41)) for _ in range(4_000))
    assert median_interval(values) == (medians[100], medians[3_900])


def test_a_medians_interval_holds_for_thousands_of_steps() -> None:
    values = [1 + i / 10_000 for i in range(5000)]
    low, high = median_interval(values) or (0, 0)
    # the order statistics at n/2 -+ 1.96 sqrt(n)/2 = 2500 -+ 69
    assert (low, high) == pytest.approx((1.2431, 1.2569), abs=3e-4)


def test_steps_are_enough_when_their_median_is_known() -> None:
    assert is_within([1.0] * 10, 0.01)
    assert not is_within([1.0, 1.2] * 5, 0.01)
    assert not is_within([], 0.01)
