"""Policies of data parallelism, worked out by hand and against closed forms; the small network trained under them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from toolkit.simulate.stragglers import drawn_seconds
from toolkit.simulate.synchronization import (
    Policy,
    PolicyRun,
    SmallProblem,
    best_backup_workers,
    gradients,
    loss,
    simulate,
    train,
)

SYNCHRONOUS = Policy(name="synchronous")
ASYNCHRONOUS = Policy(name="asynchronous")
PROBLEM = SmallProblem(seed=0)
WORKERS = 8


def drawn(distribution: str = "lognormal", *, spread: float = 0.3, workers: int = 8, steps: int = 100) -> Any:
    return drawn_seconds(distribution, mean=1.0, spread=spread, shape=(workers, steps), seed=0)


def applied(timeline: PolicyRun) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """The time of each update, and worker, batch and version of its gradients."""
    rows = []
    for update in timeline.updates:
        pairs = zip(update.workers, update.batches, strict=True)
        rows.append((update.seconds, [(worker, batch, update.version) for worker, batch in pairs]))
    return rows


def test_synchronous_updates_wait_for_the_slowest() -> None:
    timeline = simulate(SYNCHRONOUS, numpy.array([[1.0, 3.0], [2.0, 2.0]]), steps=2, communication_seconds=0.5)
    assert applied(timeline) == [(2.5, [(0, 0, 0), (1, 0, 0)]), (6.0, [(0, 1, 1), (1, 1, 1)])]
    assert timeline.waiting_seconds == 2.0
    assert timeline.communication_seconds == 2.0
    assert timeline.steps_per_second == 2 / 6


def test_a_late_backup_worker_drops_its_gradient_and_joins_the_update_in_progress() -> None:
    # Worker 2 takes 2.5 s for its first batch: it misses updates 1 (at 1 s) and 2 (at 2 s), starts its second batch at
    # 2.5 s with the weights of update 2, and ends at 2.75 s, before worker 1.
    seconds = numpy.array([[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [2.5, 0.25, 1.0]])
    timeline = simulate(Policy(name="backup_workers", number=1), seconds, steps=3)
    assert applied(timeline) == [
        (1.0, [(0, 0, 0), (1, 0, 0)]),
        (2.0, [(0, 1, 1), (1, 1, 1)]),
        (2.75, [(0, 2, 2), (2, 1, 2)]),
    ]
    assert timeline.discarded_seconds == 2.5 + 1.0, "worker 2's first batch, and worker 1's last"
    assert timeline.waiting_seconds == 0.25, "worker 0 before the last update"


def test_an_asynchronous_worker_never_waits_and_its_gradient_is_as_old_as_the_others_are_fast() -> None:
    timeline = simulate(ASYNCHRONOUS, numpy.array([[1.0], [2.5]]), steps=2)
    assert applied(timeline) == [(1.0, [(0, 0, 0)]), (2.0, [(0, 1, 1)]), (2.5, [(1, 0, 0)]), (3.0, [(0, 2, 2)])]
    assert timeline.staleness == {0: 2, 1: 1, 2: 1}
    assert timeline.waiting_seconds == 0.0


def test_a_bounded_worker_waits_for_the_slowest() -> None:
    # One batch ahead at most: worker 0 has finished two at 2 s, and may begin its third when worker 1 finishes one.
    timeline = simulate(Policy(name="bounded_staleness", number=1), numpy.array([[1.0], [2.5]]), steps=2)
    assert [update.seconds for update in timeline.updates] == [1.0, 2.0, 2.5, 3.5]
    assert timeline.waiting_seconds == 0.5
    assert timeline.updates[3].version == 3


def test_a_bound_of_zero_has_the_speed_of_synchronous_training() -> None:
    bounded = simulate(Policy(name="bounded_staleness", number=0), drawn(), steps=50)
    synchronous = simulate(SYNCHRONOUS, drawn(), steps=50)
    assert bounded.seconds == pytest.approx(synchronous.seconds)
    assert bounded.waiting_seconds == pytest.approx(synchronous.waiting_seconds)
    assert {update.version % 8 for update in bounded.updates} == {0}


def test_gradients_of_equal_workers_are_as_stale_as_there_are_other_workers() -> None:
    staleness = simulate(ASYNCHRONOUS, drawn("pareto", workers=16, steps=400), steps=400).staleness
    mean = sum(age * count for age, count in staleness.items()) / sum(staleness.values())
    assert mean == pytest.approx(15, abs=0.1)


@pytest.mark.parametrize(
    "policy", [SYNCHRONOUS, Policy(name="backup_workers", number=2), Policy(name="bounded_staleness", number=1)]
)
def test_all_time_is_computing_waiting_dropped_or_communication(policy: Policy) -> None:
    seconds = drawn(spread=0.5)
    timeline = simulate(policy, seconds, steps=60, communication_seconds=0.1)
    used = sum(seconds[update.workers, update.batches].sum() for update in timeline.updates)
    spent = used + timeline.waiting_seconds + timeline.discarded_seconds + timeline.communication_seconds
    in_flight = 8 * float(seconds.max())  # batches that were begun or dropped around the last update
    assert spent == pytest.approx(8 * timeline.seconds, abs=in_flight)
    assert policy != SYNCHRONOUS or spent == pytest.approx(8 * timeline.seconds)


def test_one_backup_worker_pays_for_one_slow_worker() -> None:
    seconds = numpy.ones((8, 10))
    seconds[7] = 3.0
    best, gain = best_backup_workers(seconds, steps=9)
    assert (best, gain) == (1, pytest.approx(7 / 8 * 3))
    assert best_backup_workers(numpy.ones((8, 10)), steps=10) == (0, 1.0)


@pytest.mark.nightly
def test_chen_et_al_4_of_100_backup_workers_are_the_best_for_a_small_spread_only() -> None:
    """Revisiting distributed synchronous SGD (https://arxiv.org/abs/1604.00981): 96 + 4 converged fastest.

    Their step times are not published as numbers, so that 4 cannot be predicted. It is the best number at some spread
    between 0.05 and 0.15; a known miss is that the model asks for more at larger spreads, since it counts gradients and
    leaves out what a smaller batch costs.
    """
    spreads = {spread: drawn(spread=spread, workers=100, steps=200) for spread in (0.05, 0.06, 0.08, 0.12, 0.3)}
    best = [best_backup_workers(seconds, steps=200)[0] for seconds in spreads.values()]
    assert best == sorted(best), "the heavier the tail, the more backup workers"
    assert 4 in best[:-1]
    assert best[-1] > 4


# -- The small network


def test_the_gradient_is_that_of_finite_differences() -> None:
    weights = tuple(weight.astype(numpy.float64) for weight in PROBLEM.initial_weights)
    inputs, classes = PROBLEM.batches([0])
    for layer, gradient in enumerate(gradients(weights, inputs, classes)):
        moved = [weight.copy() for weight in weights]
        moved[layer][3, 5] += 1e-6
        difference = (loss(tuple(moved), inputs, classes) - loss(weights, inputs, classes)) / 1e-6
        assert gradient[3, 5] == pytest.approx(difference, rel=1e-3, abs=1e-6)


def test_synchronous_training_is_sgd_over_the_rows_in_order() -> None:
    weights = PROBLEM.initial_weights
    for step in range(5):
        found = gradients(weights, *PROBLEM.batches(range(step * WORKERS, (step + 1) * WORKERS)))
        weights = tuple(weight - numpy.float32(0.1) * gradient for weight, gradient in zip(weights, found, strict=True))
    curve = train(simulate(SYNCHRONOUS, drawn(), steps=5), PROBLEM, learning_rate=0.1)
    assert curve[-1][1] == pytest.approx(PROBLEM.test_loss(weights), rel=1e-6)
    assert len(curve) == 6


def test_stale_gradients_are_those_of_the_weights_that_were_read() -> None:
    """Two workers of which the second is slow: its gradient is that of the initial weights."""
    timeline = simulate(ASYNCHRONOUS, numpy.array([[1.0], [2.5]]), steps=2)
    share, weights = numpy.float32(0.2 / 2), [PROBLEM.initial_weights]
    for worker, batch, version in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 2, 2)):
        found = gradients(weights[version], *PROBLEM.batches([2 * batch + worker]))
        weights.append(tuple(old - share * step for old, step in zip(weights[-1], found, strict=True)))
    curve = train(timeline, PROBLEM, learning_rate=0.2)
    assert [value for _, value in curve] == pytest.approx([PROBLEM.test_loss(each) for each in weights], rel=1e-5)
