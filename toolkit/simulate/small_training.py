"""A small network that is really trained, in NumPy, under the updates of a simulated timeline.

It is a classifier of seeded Gaussian clusters with two hidden layers, trained by plain SGD. It shows the order in which
policies reach a loss, and what staleness or compression costs it; it predicts no figure of another model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.simulate.synchronization import Gradient, PolicyRun

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]
    Weights = tuple[Array, ...]

INPUTS, CLASSES, CLUSTERS_PER_CLASS = 32, 10, 4
LAYERS = (INPUTS, 64, 64, CLASSES)
# Standard deviation of a cluster over that of the clusters' centers: classes overlap, so that no batch is learned to 0.
CLUSTER_SPREAD = 1.5
TRAIN_ROWS, TEST_ROWS = 8192, 2048
BATCH_ROWS = 16
"""Rows of one worker's batch."""
LEARNING_RATE_PER_ROW = 0.0005
LARGEST_LEARNING_RATE = 0.8
"""By default the rate of a global batch grows with its rows (the linear scaling rule of Goyal et al. 2017), until
training becomes unstable."""
CURVE_POINTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """Loss over the test rows at a time of the simulation."""

    seconds: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class SmallProblem:
    """Rows of a seeded classification problem, and the weights that every training starts from."""

    seed: int

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """Inputs and classes of the training rows, then of the test rows."""
        import numpy

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
        import numpy

        generator = numpy.random.default_rng(self.seed + 1)
        return tuple(
            (generator.normal(size=size) * math.sqrt(2 / size[0])).astype(numpy.float32) for size in layer_shapes()
        )

    def batch(self, start: int, rows: int) -> tuple[Any, Any]:
        """Return inputs and classes of training rows from `start`; after the last row the first one follows."""
        import numpy

        inputs, classes = self.rows
        index = numpy.arange(start, start + rows) % TRAIN_ROWS
        return inputs[index], classes[index]

    def epochs(self, *, rows: int, count: int) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of some epochs, each in an order of its own."""
        import numpy

        generator = numpy.random.default_rng(self.seed + 2)
        inputs, classes = self.rows
        for _ in range(count):
            order = generator.permutation(TRAIN_ROWS)
            for start in range(0, TRAIN_ROWS - rows + 1, rows):
                index = order[start : start + rows]
                yield inputs[index], classes[index]

    def test_loss(self, weights: Weights) -> float:
        """Return the mean loss over the test rows."""
        inputs, classes = self.rows
        return loss(weights, inputs[TRAIN_ROWS:], classes[TRAIN_ROWS:])

    def test_error(self, weights: Weights) -> float:
        """Return the share of test rows whose class is not the most probable one."""
        inputs, classes = self.rows
        *_, probabilities = _forward(weights, inputs[TRAIN_ROWS:])
        return float((probabilities.argmax(axis=1) != classes[TRAIN_ROWS:]).mean())


def layer_shapes() -> tuple[tuple[int, int], ...]:
    """Return the shape of each weight matrix."""
    return tuple(itertools.pairwise(LAYERS))


def loss(weights: Weights, inputs: Array, classes: Any) -> float:
    """Return the mean cross-entropy."""
    import numpy

    *_, probabilities = _forward(weights, inputs)
    chosen = numpy.take_along_axis(probabilities, classes[:, None], axis=1)
    return float(-numpy.log(numpy.maximum(chosen, 1e-30)).mean())


def gradients(weights: Weights, inputs: Array, classes: Any) -> Weights:
    """Return the gradient of the mean loss; with a leading axis of workers, one gradient per worker."""
    import numpy

    *layers, probabilities = _forward(weights, inputs)
    chosen = classes[..., None]
    error = probabilities
    numpy.put_along_axis(error, chosen, numpy.take_along_axis(error, chosen, axis=-1) - 1, axis=-1)
    error /= classes.shape[-1]
    found = []
    for weight, layer in zip(reversed(weights), reversed(layers), strict=True):
        found.append(layer.swapaxes(-1, -2) @ error)
        error = (error @ weight.T) * (layer > 0)
    return tuple(reversed(found))


def _forward(weights: Weights, inputs: Array) -> list[Any]:
    """Inputs of each layer, then the probabilities of the classes."""
    import numpy

    layers = [inputs]
    for weight in weights[:-1]:
        layers.append(numpy.maximum(layers[-1] @ weight, 0))
    scores = layers[-1] @ weights[-1]
    exponentials = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    return [*layers, exponentials / exponentials.sum(axis=-1, keepdims=True)]


def train(timeline: PolicyRun, problem: SmallProblem, *, learning_rate: float) -> tuple[LossPoint, ...]:
    """Train under a timeline's updates, and return the loss at about `CURVE_POINTS` times.

    Batch k of worker w has the same rows in every policy. A gradient that is applied alone has the learning rate
    divided by the gradients of a global batch, so that a batch of rows moves the weights as far under every policy.
    The curve ends early where the loss is not finite.
    """
    import numpy

    weights, curve = problem.initial_weights, [LossPoint(seconds=0.0, loss=problem.test_loss(problem.initial_weights))]
    held: list[Weights] = [weights] * timeline.workers
    readers = _readers(timeline)
    every = max(1, len(timeline.updates) // CURVE_POINTS)
    share = 1.0 if timeline.policy.is_synchronous else 1 / timeline.gradients_per_step
    with numpy.errstate(all="ignore"):
        for number, update in enumerate(timeline.updates, 1):
            inputs, classes = _update_rows(problem, update.gradients, timeline.workers)
            step = gradients(held[update.gradients[0].worker], inputs, classes)
            rate = numpy.float32(learning_rate * share)
            weights = tuple(weight - rate * gradient for weight, gradient in zip(weights, step, strict=True))
            for worker in readers.get(number, ()):
                held[worker] = weights
            if number % every == 0 or number == len(timeline.updates):
                curve.append(LossPoint(seconds=update.seconds, loss=problem.test_loss(weights)))
                if not math.isfinite(curve[-1].loss):
                    return tuple(curve[:-1])
    return tuple(curve)


def _update_rows(problem: SmallProblem, used: Sequence[Gradient], workers: int) -> tuple[Any, Any]:
    """Rows of an update's gradients, all read from the same weights."""
    import numpy

    starts = [(gradient.batch * workers + gradient.worker) * BATCH_ROWS for gradient in used]
    index = (numpy.array(starts)[:, None] + numpy.arange(BATCH_ROWS)).ravel() % TRAIN_ROWS
    inputs, classes = problem.rows
    return inputs[index], classes[index]


def _readers(timeline: PolicyRun) -> dict[int, list[int]]:
    """Number of updates -> workers that read the weights then."""
    readers: dict[int, list[int]] = {}
    for update in timeline.updates:
        for gradient in update.gradients:
            readers.setdefault(gradient.version, []).append(gradient.worker)
    return readers


def seconds_to_loss(curve: Sequence[LossPoint], target: float) -> float | None:
    """Return the first time at which the loss is at most `target`; None where it never is."""
    return next((point.seconds for point in curve if point.loss <= target), None)
