"""Event simulation of a pipeline: when each operation runs, step time, bubble, and peak micro-batches by stage.

    >>> times = ChunkTimes(forward_seconds=1.0, backward_seconds=1.0, weight_seconds=1.0)
    >>> run = simulate("1f1b", PipelineSize(stages=4, micro_batches=8), [times] * 4)
    >>> run.step_seconds, round(run.bubble_fraction, 4), run.peak_micro_batches  # (4-1) / (8+4-1) = 0.2727
    (33.0, 0.2727, (4, 3, 2, 1))

A stage runs its operations one after the other, in the order of its schedule. One that needs a tensor of another stage
starts when that has arrived: transfers take time and occupy no stage. Left out: the time in which transfers and kernels
slow each other down, data loading, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate

from toolkit.simulate.pipeline_schedules import LETTERS, NEEDED, OperationOrder, PipelineSize, operation_order

# Predicted throughput over measured, minus one, of 1F1B, interleaved 1F1B and zero-bubble schedules on 8 to 32 A100s
# (zero-bubble paper, Table 4 against Table 5, https://arxiv.org/abs/2401.10241; tests/simulate/test_pipeline_step.py).
PREDICTED_OVER_MEASURED = (0.04, 0.18)
NOT_RUN = -1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTimes:
    """Times of one micro-batch in one chunk of the model: in a stage, if it has one chunk."""

    forward_seconds: float
    backward_seconds: float
    """Gradient of the input."""
    weight_seconds: float
    """Gradient of the weights."""

    @property
    def seconds(self) -> float:
        """All of a micro-batch's work in the chunk."""
        return self.forward_seconds + self.backward_seconds + self.weight_seconds

    def by_kind(self) -> tuple[float, float, float, float]:
        """Return the seconds of each kind of operation, in the order of `LETTERS`."""
        whole = self.backward_seconds + self.weight_seconds
        return self.forward_seconds, self.backward_seconds, whole, self.weight_seconds

    def divided(self, parts: int) -> ChunkTimes:
        """Return the times of one of several equal parts."""
        return ChunkTimes(**{name: seconds / parts for name, seconds in asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """One simulated step."""

    order: OperationOrder
    times: Sequence[ChunkTimes]
    """By chunk of the model."""
    end_seconds: Sequence[float]
    """By operation; a whole backward ends where the gradient of its input does."""

    @property
    def size(self) -> PipelineSize:
        return self.order.size

    @cached_property
    def step_seconds(self) -> float:
        """The longest time that a stage takes from its first start to its last end.

        That is the time from one step to the next if no stage waits for all others before its optimizer step; with
        such a wait it is `makespan_seconds`.
        """
        spans = []
        for operations in self.order.operations:
            _, chunk, _ = self.order.decode(operations[0])
            start = self.end_seconds[operations[0]] - self.times[chunk].forward_seconds
            spans.append(self.end_seconds[operations[-1]] - start)
        return max(spans)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the first operation of any stage to the last."""
        return max(self.end_seconds)

    @property
    def work_seconds(self) -> float:
        """Mean work of a stage: the step without any bubble."""
        return self.size.micro_batches * sum(times.seconds for times in self.times) / self.size.stages

    @property
    def bubble_fraction(self) -> float:
        """Share of `step_seconds` in which the average stage is idle."""
        return max(0.0, 1 - self.work_seconds / self.step_seconds)  # rounding may leave less

    @cached_property
    def peak_micro_batches(self) -> tuple[float, ...]:
        """By stage, the most micro-batches whose activations it holds at once: from forward to weight gradient.

        A micro-batch that only some of a stage's chunks hold counts as that fraction.
        """
        chunks, each = self.size.chunks, [1] * self.size.num_chunks
        peaks = (self.peak_held(stage, each) for stage in range(self.size.stages))
        return tuple(peak if chunks == 1 else peak / chunks for peak in peaks)

    def peak_held(self, stage: int, held_by_chunk: Sequence[int]) -> int:
        """Return the most that a stage holds at once, if one micro-batch in each chunk holds so much."""
        size = self.size
        change = [sign * held for sign in (1, 0, -1, -1) for held in held_by_chunk]  # F, I, B, W
        return max(accumulate(change[operation // size.micro_batches] for operation in self.order.operations[stage]))

    def stage_operations(self, stage: int) -> Iterator[tuple[float, float, int, int]]:
        """Yield start and end in seconds, kind and micro-batch of each operation of a stage, in order."""
        for operation in self.order.operations[stage]:
            kind, chunk, micro_batch = self.order.decode(operation)
            end = self.end_seconds[operation]
            yield end - self.times[chunk].by_kind()[kind], end, kind, micro_batch


def simulate(
    schedule: str, size: PipelineSize, times: Sequence[ChunkTimes], *, transfer_seconds: float = 0.0
) -> PipelineRun:
    """Return one step: times are those of each chunk, transfers between two stages take `transfer_seconds`.

    Raises ToolkitError for a schedule that is impossible with these sizes.
    """
    order = operation_order(schedule, size)
    return PipelineRun(order=order, times=times, end_seconds=_end_seconds(order, times, transfer_seconds))


def _end_seconds(order: OperationOrder, times: Sequence[ChunkTimes], transfer_seconds: float) -> list[float]:
    """Each stage runs until it needs a tensor that is not there yet, and again once that exists."""
    per_row = order.size.micro_batches
    seconds = [chunk.by_kind()[kind] for kind in range(len(LETTERS)) for chunk in times]
    needs, delays, writes = _dependencies(order, transfer_seconds)
    ends = [NOT_RUN] * (len(seconds) * per_row)
    progress, free = [0] * order.size.stages, [0.0] * order.size.stages
    waiting: dict[int, int] = {}
    ready = list(range(order.size.stages))
    while ready:
        stage = ready.pop()
        operations, now = order.operations[stage], free[stage]
        for place in range(progress[stage], len(operations)):
            operation = operations[place]
            row = operation // per_row
            if needs[row]:
                needed = operation + needs[row]
                end = ends[needed]
                if end < 0:
                    waiting[needed] = stage
                    progress[stage] = place
                    break
                now = max(now, end + delays[row])
            now += seconds[row]
            written = operation + writes[row]
            ends[operation] = ends[written] = now
            if written in waiting:
                ready.append(waiting.pop(written))
        else:
            progress[stage] = len(operations)
        free[stage] = now
    assert not waiting, f"{order.schedule} with {order.size} never ends"
    return ends


def _dependencies(order: OperationOrder, transfer_seconds: float) -> tuple[list[int], list[float], list[int]]:
    """By kind and chunk, the way from an operation to the one that it needs, the delay, and the way to its result."""
    size, stages = order.size, [order.stage_of(chunk) for chunk in range(order.size.num_chunks)]
    rows = len(LETTERS) * size.num_chunks
    needs, delays, writes = [0] * rows, [0.0] * rows, [0] * rows
    for kind, result, step in NEEDED:
        for chunk, stage in enumerate(stages):
            row, neighbour, first = kind * size.num_chunks + chunk, chunk + step, size.row(kind, chunk).start
            writes[row] = size.row(result, chunk).start - first
            if 0 <= neighbour < size.num_chunks:
                needs[row] = size.row(result, neighbour).start - first
                delays[row] = transfer_seconds if stages[neighbour] != stage else 0.0
    return needs, delays, writes
