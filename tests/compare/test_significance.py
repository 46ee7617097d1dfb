"""Intervals of speeds and ratios, against tables and sampling and on a preset compared with itself; then ranks."""

import math
import random
import statistics

import pytest
from comparison_records import aggregate_rows, comparison, row_beside_ddp, trial

from toolkit.compare.significance import difference, mean_interval, ratio_confidence, ratio_interval, student_t


def test_student_t_equals_the_published_tables() -> None:
    tables = {0.95: {1: 12.706, 2: 4.303, 10: 2.228}, 0.99: {2: 9.925, 4: 4.604, 30: 2.750}}
    for confidence, quantiles in tables.items():
        found = {freedom: student_t(confidence, freedom) for freedom in quantiles}
        assert found == pytest.approx(quantiles, abs=5e-4)


def test_intervals_worked_out_by_hand() -> None:
    # logs 0, 0, 0.03: mean 0.01, standard deviation 0.017320508, over sqrt 3 is 0.01; t(0.95, 2) = 4.302653
    own = [1.0, 1.0, math.exp(0.03)]
    low, high = mean_interval(own) or (0, 0)
    assert (math.log(low), math.log(high)) == pytest.approx((0.01 - 0.04302653, 0.01 + 0.04302653), abs=1e-7)
    # equal variances 0.0003: error sqrt(2 * 0.0001), 4 degrees of freedom, t(0.99, 4) = 4.604095
    low, high = ratio_interval(own, [2 * figure for figure in own], 0.99) or (0, 0)
    half = 4.604095 * math.sqrt(2e-4)
    assert (math.log(2 * low), math.log(2 * high)) == pytest.approx((-half, half), abs=1e-6)
    assert difference((low, high)) == "slower"
    # more rows need a higher confidence
    assert [ratio_confidence(n) for n in (0, 1, 5, 10)] == pytest.approx([0.99, 0.99, 0.99, 0.995])


def figures(rng: random.Random, repeats: int, *, between: float, within: float, steps: int = 30) -> list[float]:
    """Speeds of trials whose level varies by `between` from trial to trial, and whose steps vary by `within`."""
    levels = [rng.gauss(0, between) for _ in range(repeats)]
    return [1 / math.exp(statistics.median(rng.gauss(level, within) for _ in range(steps))) for level in levels]


@pytest.mark.parametrize(
    ("between", "within"),
    [(0.05, 0.02), *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(0.003, 0.05), (0.0, 0.1)])],
)
def test_a_preset_differs_from_itself_in_at_most_two_of_a_hundred(between: float, within: float) -> None:
    """An interval over pooled steps would claim a difference in most of those whose trials vary."""
    rng, claims, comparisons = random.Random(0), 0, 400
    for _ in range(comparisons):
        a, b = (figures(rng, 3, between=between, within=within) for _ in range(2))
        claims += difference(ratio_interval(a, b, ratio_confidence(1))) != "no difference seen"
    assert claims <= 0.02 * comparisons


def test_a_difference_of_five_percent_is_mostly_seen_if_trials_vary_by_half_a_percent() -> None:
    rng, seen = random.Random(0), 0
    for _ in range(100):
        a, b = (figures(rng, 3, between=0.005, within=0.02) for _ in range(2))
        seen += difference(ratio_interval([1.05 * f for f in a], b, 0.99)) == "faster"
    assert seen >= 75


def test_all_speeds_count_the_same_steps() -> None:
    """The baseline ran two slow steps more; its speed leaves them out, because the other row stopped before them."""
    short = [trial("other", 0, step_seconds=[9.0, 0.7, *[0.5] * 4], timed_step_numbers=[3, 4, 5, 6])]
    slow_end = [trial("ddp", 0, step_seconds=[9.0, 0.7, 0.5, 0.5, 0.5, 0.5, 5.0, 5.0])]
    rows = aggregate_rows(comparison("ddp", "other", repeats=1), *slow_end, *short)
    assert rows["ddp-n2"].tokens_per_second == pytest.approx(400)
    assert rows["other-n2"].ratio_to_reference == pytest.approx(1.0)


def test_scaling_is_relative_to_the_fewest_processes_of_the_same_preset() -> None:
    """fsdp2 needs two processes, so next to ddp with one and two it has no efficiency of 100 %."""
    trials = [trial("ddp", r, world_size=n, slower=1.25 if n == 2 else 1) for n in (1, 2) for r in range(3)]
    trials += [trial("fsdp2", r) for r in range(3)]
    rows = aggregate_rows(comparison("ddp", "fsdp2", world_sizes=(1, 2), scaling="weak"), *trials)
    found = {name: (row.speed_up, row.scaling_efficiency) for name, row in rows.items()}
    assert found == {"ddp-n1": (1.0, 1.0), "ddp-n2": pytest.approx((1.6, 0.8)), "fsdp2-n2": (None, None)}


def test_rows_are_ranked_only_if_intervals_separate_them() -> None:
    trials = [trial("ddp", repeat) for repeat in range(3)]
    trials += [trial("slow", repeat, slower=1.5) for repeat in range(3)]
    rows = aggregate_rows(comparison("ddp", "slow"), *trials)
    assert [(row.rank, row.difference) for row in rows.values()] == [(1, "reference"), (2, "slower")]
    trials += [trial("alike", repeat, slower=1.001) for repeat in range(3)]
    rows = aggregate_rows(comparison("ddp", "slow", "alike"), *trials)
    assert [row.rank for row in rows.values()] == [None, 3, None]
    assert rows["alike-n2"].difference == "no difference seen"


def test_single_runs_support_no_claim() -> None:
    row = row_beside_ddp(repeats=1, slower=2.0)
    assert row.ratio_to_reference == pytest.approx(0.5)
    claims = ("ratio_interval", "difference", "rank", "tokens_per_second_interval", "step_seconds_interval")
    assert [getattr(row, key) for key in claims] == [None] * 5
