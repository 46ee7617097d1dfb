"""Compressed gradients and large batches, really trained, against published orderings."""

from __future__ import annotations

import statistics

import numpy
import pytest

from toolkit.simulate.compressed_training import LargeBatchRecipe, train_compressed, train_large_batch
from toolkit.simulate.gradient_compression import parse_compression
from toolkit.simulate.small_training import SmallProblem, train
from toolkit.simulate.step_time_distributions import StepTimes
from toolkit.simulate.synchronization import Policy, simulate

PROBLEM = SmallProblem(seed=0)


def last_loss(method: str, *, learning_rate: float = 0.128) -> float:
    curve = train_compressed(
        parse_compression(method), PROBLEM, workers=16, steps=100, learning_rate=learning_rate, step_seconds=1.0
    )
    return curve[-1].loss


def test_uncompressed_training_is_that_of_the_synchronous_policy() -> None:
    seconds = StepTimes(distribution="constant", step_seconds=1.0).draw(seed=0, workers=16, steps=100)
    timeline = simulate(Policy(name="synchronous"), seconds, steps=100)
    assert last_loss("none") == pytest.approx(train(timeline, PROBLEM, learning_rate=0.128)[-1].loss, rel=1e-3)


@pytest.mark.parametrize(("method", "most"), [("quantize:8", 1.002), ("quantize:4", 1.01), ("quantize:1", 1.05)])
def test_fewer_bits_cost_little_loss_with_error_feedback(method: str, most: float) -> None:
    assert last_loss(method) < most * last_loss("none")


def test_random_elements_cost_more_loss_than_the_largest_ones() -> None:
    none, largest, random = (last_loss(method) for method in ("none", "top_k:0.01", "random_k:0.01"))
    assert none < largest < random
    assert random > 1.3 * none


def test_training_that_diverges_ends_early() -> None:
    curve = train_compressed(
        parse_compression("none"), PROBLEM, workers=2, steps=50, learning_rate=1e6, step_seconds=1.0
    )
    assert curve[-1].seconds < 50
    assert numpy.isfinite(curve[-1].loss)


def test_top_k_costs_less_here_than_measured_under_adam() -> None:
    """A known miss. In docs/evidence/speed-and-memory.md a Llama trained by AdamW with top_k at 1 % ends 60 steps with
    a loss 13 % above the uncompressed one (9.978 against 8.833); the small network, trained by SGD, stays within 10 %.
    """
    assert last_loss("top_k:0.01") < 1.1 * last_loss("none")


def errors(factor: int, seed: int) -> tuple[float, float, float]:
    """Return test errors of the base batch, of a large batch with warm-up, and without."""
    problem, recipe = SmallProblem(seed=seed), LargeBatchRecipe()
    base, gradual, none = (
        problem.test_error(train_large_batch(problem, recipe, factor=number, warmup=warmup))
        for number, warmup in ((1, False), (factor, True), (factor, False))
    )
    return base, gradual, none


def test_goyal_et_al_a_large_batch_needs_warm_up() -> None:
    """https://arxiv.org/abs/1706.02677: ImageNet errors of 23.60 % (batch 256), 23.74 % (8,192, gradual warm-up) and
    24.84 % (8,192, none). The small network has the same order with a batch 16 times as large, over six seeds.

    A known miss: warm-up does not bring its error back to within 0.14 points, since 160 large steps are too few.
    """
    base, gradual, none = (statistics.mean(found) for found in zip(*(errors(16, s) for s in range(6)), strict=True))
    assert base < gradual < none
    assert gradual - base > 0.0014


def test_the_rate_of_a_large_batch_rises_to_its_multiple_and_falls_by_tens() -> None:
    recipe = LargeBatchRecipe(base_learning_rate=0.1, epochs=90, warmup_epochs=5)
    rates = [recipe.learning_rate(epoch / 90, factor=32, warmup=True) for epoch in (0, 5, 29, 31, 61, 81)]
    assert rates == pytest.approx([0.1, 3.2, 3.2, 0.32, 0.032, 0.0032])
    assert recipe.learning_rate(0.0, factor=32, warmup=False) == pytest.approx(3.2)
