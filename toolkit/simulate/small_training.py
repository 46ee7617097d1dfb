"""A small network that is really trained, in NumPy, under the updates of a simulated policy.

It is a classifier of seeded Gaussian clusters with two hidden layers, trained by plain SGD. It shows the order in which
policies reach a loss, and what staleness costs it; it predicts no figure of another model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
from numpy.typing import NDArray

from toolkit.simulate.synchronization import PolicyRun

Array = NDArray[numpy.float32]
Weights = tuple[Array, ...]
Curve = tuple[tuple[float, float], ...]
"""Seconds of the simulation, and the loss over the test rows then."""

INPUTS, CLASSES, CLUSTERS_PER_CLASS = 32, 10, 4
LAYERS = tuple(itertools.pairwise((INPUTS, 64, 64, CLASSES)))
"""Shape of each weight matrix."""
NUM_PARAMS = sum(map(math.prod, LAYERS))
# Standard deviation of a cluster over that of the clusters' centers: classes overlap, so that no batch is learned to 0.
CLUSTER_SPREAD = 1.5
TRAIN_ROWS, TEST_ROWS = 8192, 2048
BATCH_ROWS = 16
"""Rows of one worker's batch."""
LEARNING_RATE_PER_ROW = 0.0005  # the linear scaling rule of Goyal et al. 2017, https://arxiv.org/abs/1706.02677
LARGEST_LEARNING_RATE = 0.8  # training becomes unstable above
CURVE_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class SmallProblem:
    """Rows of a seeded classification problem, and the weights that every training starts from."""

    seed: int

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """Inputs and classes of the training rows, then of the test rows."""
        generator = numpy.random.default_rng(self.seed)
        clusters = CLASSES * CLUSTERS_PER_CLASS
        centers = generator.normal(size=(clusters, INPUTS))
        classes = generator.integers(CLASSES, size=clusters)
        cluster = generator.integers(clusters, size=TRAIN_ROWS + TEST_ROWS)
        inputs = centers[cluster] + CLUSTER_SPREAD * generator.normal(size=(len(cluster), INPUTS))
        return inputs.astype(numpy.float32), classes[cluster]

    @cached_property
    def initial_weights(self) -> Weights:
        """Weights with the variance that keeps activations of rectified units (He et al. 2015)."""
        generator = numpy.random.default_rng(self.seed + 1)
        return tuple((generator.normal(size=size) * math.sqrt(2 / size[0])).astype(numpy.float32) for size in LAYERS)

    def batches(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and classes of some workers' batches; after the last training row the first one follows."""
        inputs, classes = self.rows
        index = (numpy.array(numbers)[:, None] * BATCH_ROWS + numpy.arange(BATCH_ROWS)).ravel() % TRAIN_ROWS
        return inputs[index], classes[index]

    def test_loss(self, weights: Weights) -> float:
        """Return the mean loss over the test rows."""
        inputs, classes = self.rows
        return loss(weights, inputs[TRAIN_ROWS:], classes[TRAIN_ROWS:])


def default_learning_rate(workers: int) -> float:
    """Return a rate that grows with the rows of a global batch, as far as training stays stable."""
    return min(LEARNING_RATE_PER_ROW * BATCH_ROWS * workers, LARGEST_LEARNING_RATE)


def loss(weights: Weights, inputs: Array, classes: Any) -> float:
    """Return the mean cross-entropy."""
    *_, probabilities = _forward(weights, inputs)
    chosen = probabilities[numpy.arange(len(classes)), classes]
    return float(-numpy.log(numpy.maximum(chosen, 1e-30)).mean())


def gradients(weights: Weights, inputs: Array, classes: Any) -> Weights:
    """Return the gradient of the mean loss."""
    *layers, error = _forward(weights, inputs)
    error[numpy.arange(len(classes)), classes] -= 1
    error /= len(classes)
    by_layer = []
    for weight, layer in zip(reversed(weights), reversed(layers), strict=True):
        by_layer.append(layer.T @ error)
        error = (error @ weight.T) * (layer > 0)
    return tuple(reversed(by_layer))


def _forward(weights: Weights, inputs: Array) -> list[Any]:
    """Inputs of each layer, then the probabilities of the classes."""
    layers = [inputs]
    for weight in weights[:-1]:
        layers.append(numpy.maximum(layers[-1] @ weight, 0))
    scores = layers[-1] @ weights[-1]
    exponentials = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    return [*layers, exponentials / exponentials.sum(axis=-1, keepdims=True)]


def train(run: PolicyRun, problem: SmallProblem, *, learning_rate: float) -> Curve:
    """Train under a policy's updates, and return the loss at about `CURVE_POINTS` times.

    Batch k of worker w has the same rows in every policy. A gradient that is applied alone has the learning rate
    divided by the gradients of a global batch, so that a batch of rows moves the weights as far under every policy.
    The curve ends early where the loss is not finite.
    """
    weights, curve = problem.initial_weights, [(0.0, problem.test_loss(problem.initial_weights))]
    read: list[Weights] = [weights] * run.workers
    readers: dict[int, list[int]] = {}  # by number of updates, the workers that read the weights then
    for update in run.updates:
        readers.setdefault(update.version, []).extend(update.workers)
    every = max(1, len(run.updates) // CURVE_POINTS)
    rate = numpy.float32(learning_rate * (1.0 if run.policy.is_synchronous else 1 / run.gradients_per_step))
    with numpy.errstate(all="ignore"):
        for number, update in enumerate(run.updates, 1):
            pairs = zip(update.workers, update.batches, strict=True)
            numbers = [batch * run.workers + worker for worker, batch in pairs]
            step = gradients(read[update.workers[0]], *problem.batches(numbers))
            weights = tuple(weight - rate * gradient for weight, gradient in zip(weights, step, strict=True))
            for worker in readers.get(number, ()):
                read[worker] = weights
            if number % every == 0 or number == len(run.updates):
                curve.append((update.seconds, problem.test_loss(weights)))
                if not math.isfinite(curve[-1][1]):
                    return tuple(curve[:-1])
    return tuple(curve)
