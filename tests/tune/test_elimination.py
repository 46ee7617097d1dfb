"""Sequential elimination: its formula by hand, and its rate of errors on recorded trials."""

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from launching import ROOT

from toolkit.compare.significance import student_t
from toolkit.tune.elimination import ERROR, after_round, mean_interval, noise, ratio_interval, spent


def test_the_confidence_of_a_round_shares_the_error_among_settings_and_rounds() -> None:
    figures = {"a": [0.0, 0.0, 0.01], "b": [0.3, 0.32, 0.31]}
    confidence = 1 - 2 * ERROR / 11 * (4 - 1) / 49  # of the second of seven looks, each end
    race = after_round(figures, num_settings=12, num_rounds=8)
    assert race.ratios == {"b": ratio_interval(figures, "b", "a", confidence=confidence)}


@pytest.mark.parametrize("num_rounds", [2, 3, 8, 50])
def test_the_rounds_spend_the_whole_error_and_the_first_none_of_it(num_rounds: int) -> None:
    shares = [spent(number, num_rounds) for number in range(1, num_rounds + 1)]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)


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
    race = after_round(figures, num_settings=11, num_rounds=8)
    low, high = race.ratios["loud"] if race.leader != "loud" else (0.0, 2.0)
    assert low < 1 < high


def test_one_setting_that_is_slower_leaves_and_the_equal_ones_settle_only_when_the_noise_allows_it() -> None:
    race = after_round({"a": [0.0, 0.001], "b": [0.7, 0.7], "c": [0.0, 0.0]}, num_settings=3, num_rounds=8)
    assert sorted(race.slower) == ["b"]
    exact = after_round({"a": [0.0] * 3, "b": [0.0, 1e-5, 0.0], "c": [1e-5, 0.0, 0.0]}, num_settings=3, num_rounds=8)
    assert exact.slower == {}
    assert exact.settled
    noisy = after_round(
        {"a": [0.0, 0.1, 0.0], "b": [0.1, 0.0, 0.1], "c": [0.0, 0.1, 0.1]}, num_settings=3, num_rounds=8
    )
    assert not noisy.settled


def test_single_trials_have_no_interval() -> None:
    assert after_round({"a": [0.0], "b": [0.7]}, num_settings=2, num_rounds=8).ratios == {}
    assert mean_interval({"a": [0.0], "b": [0.7]}, "a") is None


def test_the_mean_has_the_interval_of_the_noise_of_all_settings() -> None:
    low, high = mean_interval({"a": [0.0, 0.2], "b": [1.0, 1.2]}, "a") or (0.0, 0.0)
    half = student_t(0.95, 2) * math.sqrt(0.04 / 2 / 2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.1 - half, 0.1 + half))


# -- simulated searches: twelve settings, whose step times and noise are those of recorded trials

NUM_SETTINGS, ROUNDS, WITHIN = 12, 8, 0.01
Groups = Sequence[Sequence[float]]
"""Logarithms of the trials of one setting, around their mean."""


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record, without its first line of facts."""
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def recorded_noise() -> dict[str, Groups]:
    """Return the noise of recorded trials: tokens per second, CPU-seconds of a step, seconds of a step."""
    speeds = [trials for row in recorded("aa_comparisons") for trials in row["tokens_per_second"].values()]
    cpu_seconds: dict[tuple[str, str], list[float]] = {}
    for row in recorded("overhead"):
        for program, seconds in row.get("median_step_cpu_seconds", {}).items():
            cpu_seconds.setdefault((row["case"], program), []).append(seconds)
    tuned = [row.get("seconds_per_step", ()) for row in recorded("tune_on_two_ranks")]
    trials = {"aa_comparisons": speeds, "overhead": list(cpu_seconds.values()), "tune_on_two_ranks": tuned}
    return {name: [around_mean(group) for group in groups if len(group) > 2] for name, groups in trials.items()}


def around_mean(values: Sequence[float]) -> list[float]:
    """Return the logarithms around their mean, scaled so that their variance is that of the trials."""
    logs = [math.log(value) for value in values]
    scale = math.sqrt(len(logs) / (len(logs) - 1))
    return [(log - statistics.fmean(logs)) * scale for log in logs]


def recorded_differences() -> list[float]:
    """Return logarithms of step times over the fastest one of the same job, of presets and programs."""
    by_job: dict[str, list[float]] = {}
    for row in recorded("peers_two_ranks_in_turns"):
        if speed := (row.get("medians") or {}).get("tokens_per_second"):
            by_job.setdefault(row["job"].partition("-")[2], []).append(speed)
    return [math.log(max(speeds) / speed) for speeds in by_job.values() for speed in speeds]


class Surface(NamedTuple):
    """A kind of simulated search."""

    name: str
    noise: Groups
    differences: Sequence[float]
    """Logarithms from which the true step times are drawn."""
    drift: float = 0.0
    """Standard deviation of what is common to a round."""
    per_setting: bool = False
    """Each setting keeps the noise of one recorded group; otherwise every trial is from any group."""


def surfaces() -> Iterator[Surface]:
    differences, close = recorded_differences(), [number / 100 for number in range(6)]
    for name, groups in recorded_noise().items():
        yield Surface(f"{name}: recorded differences", groups, differences)
        yield Surface(f"{name}: 0 to 5 % apart", groups, close)
        yield Surface(f"{name}: all equal", groups, [0.0])
        yield Surface(f"{name}: 0 to 5 % apart, rounds drift by 10 %", groups, close, drift=0.1)
        yield Surface(f"{name}: 0 to 5 % apart, noise by setting", groups, close, per_setting=True)


def search(surface: Surface, chance: random.Random) -> tuple[bool, float]:
    """Simulate one search. Return True if it eliminated every setting within 1 % of the fastest, and what it lost."""
    names = [f"s{number}" for number in range(NUM_SETTINGS)]
    true = {name: chance.choice(surface.differences) for name in names}
    groups = {name: chance.choice(surface.noise) for name in names}
    pooled = [value for group in surface.noise for value in group]
    figures: dict[str, list[float]] = {name: [] for name in names}
    left = list(names)
    for number in range(ROUNDS):
        shift = chance.gauss(0.0, surface.drift) if surface.drift else 0.0
        for name in left:
            noise = chance.choice(groups[name] if surface.per_setting else pooled)
            figures[name].append(true[name] + shift + noise)
        if number == 0:
            continue
        race = after_round(figures, num_settings=NUM_SETTINGS, num_rounds=ROUNDS)
        left = [name for name in left if name not in race.slower]
        if len(left) == 1 or race.settled:
            break
    best = min(true.values())
    leader = min(left, key=lambda name: statistics.fmean(figures[name]))
    return all(true[name] > best + math.log1p(WITHIN) for name in left), true[leader] - best


@pytest.mark.parametrize("surface", surfaces(), ids=lambda surface: surface.name)
def test_searches_on_recorded_trials_eliminate_the_fastest_no_more_often_than_stated(surface: Surface) -> None:
    """A hundred searches on each kind of surface; benchmarks/results/tune.jsonl has three hundred."""
    chance = random.Random(surface.name)
    results = [search(surface, chance) for _ in range(100)]
    assert sum(is_wrong for is_wrong, _ in results) <= 10  # 5 of 100, and two standard deviations
    assert statistics.fmean(lost for _, lost in results) < 0.1
