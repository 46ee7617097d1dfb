"""The small network: its gradients, and the same training whatever timeline leads to the same updates."""

from __future__ import annotations

import numpy
import pytest

from toolkit.simulate.small_training import SmallProblem, gradients, loss, train
from toolkit.simulate.stragglers import drawn_seconds
from toolkit.simulate.synchronization import Policy, PolicyRun, simulate

PROBLEM = SmallProblem(seed=0)
WORKERS = 8


def synchronous(steps: int) -> PolicyRun:
    seconds = drawn_seconds("lognormal", mean=1.0, spread=0.5, shape=(WORKERS, 2 * steps), seed=0)
    return simulate(Policy(name="synchronous"), seconds, steps=steps)


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
    curve = train(synchronous(5), PROBLEM, learning_rate=0.1)
    assert curve[-1][1] == pytest.approx(PROBLEM.test_loss(weights), rel=1e-6)
    assert len(curve) == 6


def test_stale_gradients_are_those_of_the_weights_that_were_read() -> None:
    """Two workers of which the second is slow: its gradient is that of the initial weights."""
    timeline = simulate(Policy(name="asynchronous"), numpy.array([[1.0], [2.5]]), steps=2)
    share, weights = numpy.float32(0.2 / 2), [PROBLEM.initial_weights]
    for worker, batch, version in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 2, 2)):
        found = gradients(weights[version], *PROBLEM.batches([2 * batch + worker]))
        weights.append(tuple(old - share * step for old, step in zip(weights[-1], found, strict=True)))
    curve = train(timeline, PROBLEM, learning_rate=0.2)
    assert [value for _, value in curve] == pytest.approx([PROBLEM.test_loss(each) for each in weights], rel=1e-5)


def test_training_that_diverges_ends_with_its_last_finite_loss() -> None:
    timeline = synchronous(60)
    curve = train(timeline, PROBLEM, learning_rate=1e5)
    assert curve[-1][0] < timeline.seconds
    assert all(numpy.isfinite(value) for _, value in curve)
