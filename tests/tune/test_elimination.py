"""Sequential elimination: its formula by hand, and its rate of errors on recorded trials."""

from __future__ import annotations

import math
import random
import statistics
import sys

import pytest
from launching import ROOT

from toolkit.compare.significance import student_t
from toolkit.tune.elimination import ERROR, after_round, mean_interval, noise, ratio_interval

sys.path.append(str(ROOT / "benchmarks"))

import tune as benchmark


def test_the_confidence_of_a_round_shares_the_error_among_settings_and_rounds() -> None:
    figures = {"a": [0.0, 0.0, 0.01], "b": [0.3, 0.32, 0.31]}
    confidence = 1 - ERROR / (12 * 3 * 4)  # the sum of 1 / (r (r + 1)) over all rounds is 1
    race = after_round(figures, num_settings=12)
    assert race.ratios == {"b": ratio_interval(figures, "b", "a", confidence=confidence)}


def test_the_noise_is_what_is_left_without_settings_and_rounds() -> None:
    # Two settings and two rounds: (a2 - a1) - (b2 - b1) = 0.02 has one degree of freedom and variance 4 s²
    figures = {"a": [0.0, 1.01], "b": [5.0, 5.99]}
    variance, freedom = noise(figures)
    assert freedom == 1
    assert variance == pytest.approx(0.02**2 / 4)
    assert noise({"a": [0.0, 1.0]}) == (0.0, 0)


def test_a_shift_of_a_whole_round_changes_no_ratio() -> None:
    figures = {"a": [0.0, 0.01, 0.02], "b": [0.3, 0.33, 0.29], "c": [0.1, 0.08, 0.11]}
    shifted = {name: [value + at for at, value in enumerate(values)] for name, values in figures.items()}
    one, other = (ratio_interval(each, "b", "a", confidence=0.99) for each in (figures, shifted))
    assert one == pytest.approx(other)


def test_the_interval_is_student_t_around_the_mean_of_the_rounds_of_both() -> None:
    figures = {"a": [0.0, 0.0], "b": [0.3, 0.32], "c": [0.1, 0.09]}
    variance, freedom = noise(figures)
    low, high = ratio_interval(figures, "b", "a", confidence=0.99) or (0.0, 0.0)
    half = student_t(0.99, freedom) * math.sqrt(2 * variance / 2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.31 - half, 0.31 + half))


def test_a_setting_that_varies_more_than_the_others_is_judged_by_its_own_variance() -> None:
    quiet = {f"quiet{number}": [0.0, 0.001 * number, 0.0] for number in range(10)}
    figures = quiet | {"loud": [0.1, 0.5, -0.2]}
    race = after_round(figures, num_settings=11)
    low, high = race.ratios["loud"] if race.leader != "loud" else (0.0, 2.0)
    assert low < 1 < high


def test_one_setting_that_is_slower_leaves_and_the_equal_ones_settle_only_when_the_noise_allows_it() -> None:
    race = after_round({"a": [0.0, 0.001], "b": [0.7, 0.7], "c": [0.0, 0.0]}, num_settings=3)
    assert sorted(race.slower) == ["b"]
    exact = after_round({"a": [0.0] * 3, "b": [0.0, 1e-5, 0.0], "c": [1e-5, 0.0, 0.0]}, num_settings=3)
    assert exact.slower == {}
    assert exact.settled
    noisy = after_round({"a": [0.0, 0.1, 0.0], "b": [0.1, 0.0, 0.1], "c": [0.0, 0.1, 0.1]}, num_settings=3)
    assert not noisy.settled


def test_single_trials_have_no_interval() -> None:
    assert after_round({"a": [0.0], "b": [0.7]}, num_settings=2).ratios == {}
    assert mean_interval({"a": [0.0], "b": [0.7]}, "a") is None


def test_the_mean_has_the_interval_of_the_noise_of_all_settings() -> None:
    low, high = mean_interval({"a": [0.0, 0.2], "b": [1.0, 1.2]}, "a") or (0.0, 0.0)
    half = student_t(0.95, 2) * math.sqrt(0.04 / 2 / 2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.1 - half, 0.1 + half))


@pytest.mark.parametrize("surface", benchmark.surfaces(), ids=lambda surface: surface.name)
def test_searches_on_recorded_trials_eliminate_the_fastest_no_more_often_than_stated(
    surface: benchmark.Surface,
) -> None:
    """A hundred searches on each kind of surface; benchmarks/results/tune.jsonl has a thousand."""
    chance = random.Random(surface.name)
    results = [benchmark.search(surface, chance) for _ in range(100)]
    assert sum(result["wrong"] for result in results) <= 10  # 5 of 100, and two standard deviations
    assert statistics.fmean(result["lost"] for result in results) < 0.1
