"""Data parallelism event by event: who computes which gradient, from which weights, when it is applied, who waits.

Four policies, over the same compute times:

- `synchronous`: an update is the mean of all workers' gradients.
- `backup_workers`: of N + b workers, an update is the mean of the first N gradients; a late worker finishes its batch,
  drops the gradient, and joins the update in progress (Chen et al. 2016, https://arxiv.org/abs/1604.00981).
- `bounded_staleness`: each gradient is applied when it arrives; a worker may be at most `staleness` batches ahead of
  the slowest (stale synchronous parallel, Ho et al. 2013).
- `asynchronous`: the same without a bound (Downpour SGD, Dean et al. 2012).

    >>> import numpy
    >>> slow = numpy.array([[1.0] * 4, [2.0] * 4])
    >>> simulate(Policy(name="synchronous"), slow, steps=2).seconds
    4.0

A small network is really trained under the updates: a classifier of seeded Gaussian clusters with two hidden layers, by
plain SGD. It shows the order in which policies reach a loss, and what staleness costs it; it predicts no figure of
another model.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
from numpy.typing import NDArray

FloatArray = NDArray[numpy.float64]
Array = NDArray[numpy.float32]
Weights = tuple[Array, ...]
Curve = tuple[tuple[float, float], ...]  # seconds of the simulation, and the loss over the test rows then

MOST_BACKUP_WORKERS = 32  # more are dearer than the stragglers they hide


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How gradients of several workers become updates."""

    name: str
    number: int = 0  # of workers that `backup_workers` does not wait for; of batches ahead in `bounded_staleness`

    @property
    def is_synchronous(self) -> bool:
        """True if an update is a mean of gradients of one version of the weights."""
        return self.name in ("synchronous", "backup_workers")

    @property
    def label(self) -> str:
        return f"{self.name} {self.number}" if self.name in ("backup_workers", "bounded_staleness") else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update of the weights: by the mean of its workers' gradients; of one worker in the asynchronous policies."""

    seconds: float
    version: int  # number of updates that the weights had when the workers read them
    workers: Sequence[int]
    batches: Sequence[int]  # number of each worker's batch, from 0


@dataclass(kw_only=True, slots=True)
class PolicyRun:
    """Everything that happened until `steps` times N gradients were applied, N being those of a global batch."""

    policy: Policy
    workers: int
    gradients_per_step: int
    updates: list[Update] = field(default_factory=list)
    waiting_seconds: float = 0.0  # of all workers, as the next two: idle until the update or the slowest worker
    discarded_seconds: float = 0.0  # spent on gradients that were dropped
    communication_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the last update."""
        return self.updates[-1].seconds

    @property
    def steps_per_second(self) -> float:
        """Global batches applied per second; N gradients are a step in every policy."""
        return sum(len(update.workers) for update in self.updates) / self.gradients_per_step / self.seconds

    @property
    def staleness(self) -> Counter[int]:
        """Number of gradients by the updates that came between reading the weights and applying the gradient."""
        ages = Counter[int]()
        for number, update in enumerate(self.updates):
            ages[number - update.version] += len(update.workers)
        return ages


def simulate(policy: Policy, seconds: FloatArray, *, steps: int, communication_seconds: float = 0.0) -> PolicyRun:
    """Run a policy until `steps` global batches are applied.

    `seconds` has the compute time of each worker's batches, of shape (workers, batches); after the last batch a worker
    begins again with the first. `communication_seconds` is one all-reduce, or one worker's push and pull.
    """
    required = len(seconds) - (policy.number if policy.name == "backup_workers" else 0)
    run = PolicyRun(policy=policy, workers=len(seconds), gradients_per_step=required)
    follow = _run_synchronous if policy.is_synchronous else _run_asynchronous
    follow(run, seconds, steps, communication_seconds)
    return run


def best_backup_workers(seconds: FloatArray, *, steps: int, communication_seconds: float = 0.0) -> tuple[int, float]:
    """Return the number of backup workers that applies most gradients per second, and the gain over none.

    The workers stay as many: one more backup worker is one gradient less per update. What a smaller global batch does
    to the loss is left out.
    """
    rates = []
    for count in range(min(len(seconds) - 1, MOST_BACKUP_WORKERS) + 1):
        policy = Policy(name="backup_workers", number=count)
        run = simulate(policy, seconds, steps=steps, communication_seconds=communication_seconds)
        rates.append(run.gradients_per_step / run.seconds)
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best] / rates[0]


def _run_synchronous(run: PolicyRun, seconds: FloatArray, steps: int, communication_seconds: float) -> None:
    """Let each update wait for the first gradients of the current weights."""
    workers, batches = seconds.shape
    number, free, now = numpy.zeros(workers, dtype=int), numpy.zeros(workers), 0.0
    for version in range(steps):
        start = numpy.maximum(now, free)
        duration = seconds[numpy.arange(workers), number % batches]
        finish = start + duration
        first = numpy.sort(numpy.argsort(finish, kind="stable")[: run.gradients_per_step])
        done = float(finish[first].max())
        started = start < done
        free = numpy.where(started, finish, free)
        now = done + communication_seconds
        update = Update(seconds=now, version=version, workers=first.tolist(), batches=number[first].tolist())
        run.updates.append(update)
        run.waiting_seconds += float(numpy.maximum(done - free, 0.0).sum())
        run.discarded_seconds += float(duration[started & ~numpy.isin(numpy.arange(workers), first)].sum())
        run.communication_seconds += workers * communication_seconds
        number += started


def _run_asynchronous(run: PolicyRun, seconds: FloatArray, steps: int, communication_seconds: float) -> None:
    """Apply each gradient when it arrives, and hold back workers that are too far ahead of the slowest."""
    workers, batches = seconds.shape
    gradients = steps * workers
    finished, version = [0] * workers, [0] * workers
    events = [(float(seconds[worker, 0]) + communication_seconds, worker) for worker in range(workers)]
    heapq.heapify(events)
    waits_since: dict[int, float] = {}  # by worker
    workers_at = Counter({0: workers})  # by batches finished
    slowest, bound = 0, run.policy.number if run.policy.name == "bounded_staleness" else gradients
    while len(run.updates) < gradients:
        now, worker = heapq.heappop(events)
        batch = finished[worker]
        run.updates.append(Update(seconds=now, version=version[worker], workers=(worker,), batches=(batch,)))
        run.communication_seconds += communication_seconds
        finished[worker] += 1
        workers_at.update({batch: -1, batch + 1: 1})
        waits_since[worker] = now
        freed = [worker]
        if workers_at[slowest] == 0:
            slowest, freed = slowest + 1, list(waits_since)
        for ready in (worker for worker in freed if finished[worker] - slowest <= bound):
            run.waiting_seconds += now - waits_since.pop(ready)
            version[ready] = len(run.updates)
            duration = float(seconds[ready, finished[ready] % batches]) + communication_seconds
            heapq.heappush(events, (now + duration, ready))
    run.waiting_seconds += sum(run.seconds - since for since in waits_since.values())


# -- The small network

INPUTS, CLASSES, CLUSTERS_PER_CLASS = 32, 10, 4
LAYERS = tuple(itertools.pairwise((INPUTS, 64, 64, CLASSES)))  # shape of each weight matrix
NUM_PARAMS = sum(map(math.prod, LAYERS))
# Standard deviation of a cluster over that of the clusters' centers: classes overlap, so that no batch is learned to 0.
CLUSTER_SPREAD = 1.5
TRAIN_ROWS, TEST_ROWS = 8192, 2048
BATCH_ROWS = 16  # of one worker
# The linear scaling rule of Goyal et al. 2017, https://arxiv.org/abs/1706.02677, per row of a batch.
RATE_PER_WORKER = 0.0005 * BATCH_ROWS
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
    weights = problem.initial_weights
    curve, read = [(0.0, problem.test_loss(weights))], [weights] * run.workers
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
