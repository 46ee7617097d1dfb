"""Train the small network synchronously with compressed gradients, and with large batches with and without warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.simulate.gradient_compression import Compression, ErrorFeedback
from toolkit.simulate.small_training import BATCH_ROWS, CURVE_POINTS, LossPoint, SmallProblem, gradients

if TYPE_CHECKING:
    from toolkit.simulate.small_training import Weights


def train_compressed(
    compression: Compression,
    problem: SmallProblem,
    *,
    workers: int,
    steps: int,
    learning_rate: float,
    step_seconds: float,
) -> tuple[LossPoint, ...]:
    """Train synchronously on the same rows with every method; return the loss at about `CURVE_POINTS` steps.

    The curve ends early where the loss is not finite.
    """
    import numpy

    weights, rate = problem.initial_weights, numpy.float32(learning_rate)
    feedback = ErrorFeedback(compression, seed=problem.seed)
    curve = [LossPoint(seconds=0.0, loss=problem.test_loss(weights))]
    every = max(1, steps // CURVE_POINTS)
    with numpy.errstate(all="ignore"):
        for step in range(1, steps + 1):
            inputs, classes = problem.batch((step - 1) * workers * BATCH_ROWS, workers * BATCH_ROWS)
            by_worker = (workers, BATCH_ROWS)
            found = gradients(weights, inputs.reshape(*by_worker, -1), classes.reshape(by_worker))
            weights = tuple(
                weight - rate * change for weight, change in zip(weights, feedback.mean(found), strict=True)
            )
            if step % every == 0 or step == steps:
                curve.append(LossPoint(seconds=step * step_seconds, loss=problem.test_loss(weights)))
                if not math.isfinite(curve[-1].loss):
                    return tuple(curve[:-1])
    return tuple(curve)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeBatchRecipe:
    """SGD with momentum, linear scaling and step decay, as Goyal et al. 2017 (https://arxiv.org/abs/1706.02677)."""

    base_batch_rows: int = 32
    base_learning_rate: float = 0.02
    momentum: float = 0.9
    epochs: int = 10
    warmup_epochs: int = 2
    """Epochs in which the rate rises evenly from the base rate, as in their gradual warm-up (5 of 90)."""
    decay_at: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Shares of the run after which the rate is a tenth: their epochs 30, 60 and 80 of 90."""

    def learning_rate(self, share: float, *, factor: int, warmup: bool) -> float:
        """Return the rate at a share of the run, for a batch `factor` times the base batch.

        >>> recipe = LargeBatchRecipe()
        >>> [round(recipe.learning_rate(share, factor=16, warmup=True), 3) for share in (0.0, 0.1, 0.2, 0.5)]
        [0.02, 0.17, 0.32, 0.032]
        """
        peak, rising = factor * self.base_learning_rate, self.warmup_epochs / self.epochs
        if warmup and share < rising:
            return self.base_learning_rate + (peak - self.base_learning_rate) * share / rising
        return peak * 10.0 ** -sum(share >= mark for mark in self.decay_at)


def train_large_batch(problem: SmallProblem, recipe: LargeBatchRecipe, *, factor: int, warmup: bool) -> Weights:
    """Train with a batch `factor` times the base batch, for the same epochs, and return the weights."""
    import numpy

    weights = problem.initial_weights
    velocity = tuple(numpy.zeros_like(weight) for weight in weights)
    batches = list(problem.epochs(rows=factor * recipe.base_batch_rows, count=recipe.epochs))
    with numpy.errstate(all="ignore"):
        for number, (inputs, classes) in enumerate(batches):
            rate = recipe.learning_rate(number / len(batches), factor=factor, warmup=warmup)
            found = gradients(weights, inputs, classes)
            velocity = tuple(
                numpy.float32(recipe.momentum) * old + new for old, new in zip(velocity, found, strict=True)
            )
            weights = tuple(
                weight - numpy.float32(rate) * moved for weight, moved in zip(weights, velocity, strict=True)
            )
    return weights
