"""Schedules of a pipeline: the order of each stage's forwards and backwards, and the step that it gives, simulated.

    >>> size = PipelineSize(stages=2, micro_batches=3)
    >>> first, second = operation_order("1f1b", size)
    >>> " ".join(f"{LETTERS[kind]}{number}" for kind, _, number in map(size.decode, first))
    'F0 F1 B0 F2 B1 B2'

A stage is one GPU, or one group of GPUs that split its layers. It has one chunk of the model, or several: chunk 0 is
the first of the model. The orders are those of torch.distributed.pipelining (`tests/simulate/` compares them).

    >>> times = ChunkTimes(forward_seconds=1.0, backward_seconds=2.0)
    >>> run = simulate("1f1b", PipelineSize(stages=4, micro_batches=8), [times] * 4)
    >>> run.step_seconds, round(run.bubble_fraction, 4), run.peak_micro_batches  # (4-1) / (8+4-1) = 0.2727
    (33.0, 0.2727, (4, 3, 2, 1))

A stage runs its operations one after the other. One that needs a tensor of another stage starts when that has arrived:
transfers take time and occupy no stage. Left out: the time in which transfers and kernels slow each other down, data
loading, and the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from toolkit.errors import ToolkitError
from toolkit.job.argument_values import check_word
from toolkit.parallel.pipeline_schedule import INTERLEAVED, ONE_F_ONE_B, SCHEDULES, PipelineSettings, interleaved_rounds

FORWARD, BACKWARD = KINDS = range(2)
LETTERS = "FB"  # of each kind of operation
# Larger values are typing errors; more operations take minutes.
LARGEST = {"--stages": 4096, "--micro-batches": 2**20, "--chunks": 256}
MOST_OPERATIONS = 2**24
# Predicted throughput over measured, minus one, of 1F1B and interleaved 1F1B on 8 to 32 A100s
# (zero-bubble paper, Table 4 against Table 5, https://arxiv.org/abs/2401.10241; tests/simulate).
PREDICTED_OVER_MEASURED = (0.04, 0.18)
NOT_RUN = -1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSize:
    """Stages of a pipeline, chunks of the model on each, and micro-batches of a step.

    An operation is a number: `row(kind, chunk)[micro_batch]`.
    """

    stages: int
    micro_batches: int
    chunks: int = 1

    @property
    def num_chunks(self) -> int:
        return self.stages * self.chunks

    def row(self, kind: int, chunk: int) -> range:
        """Return the consecutive numbers that a chunk's operations of one kind have."""
        first = (kind * self.num_chunks + chunk) * self.micro_batches
        return range(first, first + self.micro_batches)

    def decode(self, operation: int) -> tuple[int, int, int]:
        """Return kind, chunk and micro-batch of an operation."""
        row, micro_batch = divmod(operation, self.micro_batches)
        return (*divmod(row, self.num_chunks), micro_batch)


def operation_order(schedule: str, size: PipelineSize) -> list[list[int]]:
    """Return each stage's operations, in order. Raises ToolkitError for a schedule that cannot run with these sizes."""
    check_schedule(schedule, size)
    settings, orders = PipelineSettings(ranks=size.stages, schedule=schedule, chunks=size.chunks), []
    per_round = settings.per_round(size.micro_batches)
    for stage in range(size.stages):
        chunks, warmup = settings.stages_of(stage), settings.warmup(stage, size.micro_batches)
        forwards, backwards = (
            [
                operation
                for start in range(0, size.micro_batches, per_round)
                for chunk in order
                for operation in size.row(kind, chunk)[start : start + per_round]
            ]
            for kind, order in ((FORWARD, chunks), (BACKWARD, chunks[::-1]))
        )
        turns = itertools.chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        orders.append([*forwards[:warmup], *turns, *backwards[max(0, len(forwards) - warmup) :]])
    return orders


def check_schedule(schedule: str, size: PipelineSize) -> None:
    """Raise ToolkitError for an unknown schedule, for sizes out of range, and for those that it cannot run with."""
    check_word("--schedule", schedule, SCHEDULES)
    for (option, largest), value in zip(LARGEST.items(), (size.stages, size.micro_batches, size.chunks), strict=True):
        if not 1 <= value <= largest:
            raise ToolkitError(f"{option} is {value:,}, expected 1 to {largest:,}")
    operations = len(KINDS) * size.num_chunks * size.micro_batches
    if operations > MOST_OPERATIONS:
        raise ToolkitError(f"{operations:,} operations are too many to simulate, expected at most {MOST_OPERATIONS:,}")
    if schedule == INTERLEAVED and size.chunks < 2:
        raise ToolkitError(f"--chunks is {size.chunks}, but {schedule} needs 2 or more", hint="`--chunks 2`, or 1f1b")
    stages, count = size.stages, size.micro_batches
    what = f"--micro-batches is {count}, but {schedule} on {stages} stages"
    if schedule == ONE_F_ONE_B and count < stages:
        raise ToolkitError(f"{what} needs {stages} or more", hint=f"`--micro-batches {stages}`")
    rounds = interleaved_rounds(count, ranks=stages)
    if schedule == INTERLEAVED and count % rounds:
        raise ToolkitError(f"{what} runs them in {rounds} equal rounds", hint=f"`--micro-batches {stages * rounds}`")


# -- One step, event by event


class ChunkTimes(NamedTuple):
    """Times of one micro-batch in one chunk of the model, by kind of operation: in a stage, if it has one chunk."""

    forward_seconds: float
    backward_seconds: float

    def divided(self, parts: int) -> ChunkTimes:
        """Return the times of one of several equal parts."""
        return ChunkTimes(*(seconds / parts for seconds in self))


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """One simulated step."""

    schedule: str
    size: PipelineSize
    operations: Sequence[Sequence[int]]  # by stage, in order
    times: Sequence[ChunkTimes]  # by chunk of the model
    end_seconds: Sequence[float]  # by operation

    @cached_property
    def step_seconds(self) -> float:
        """The longest time that a stage takes from its first start to its last end.

        That is the time from one step to the next if no stage waits for all others before its optimizer step; with
        such a wait it is `makespan_seconds`.
        """
        ends, spans = self.end_seconds, []
        for operations, first_chunk in zip(self.operations, self.times, strict=False):  # stage 0 has chunk 0
            spans.append(ends[operations[-1]] - (ends[operations[0]] - first_chunk.forward_seconds))
        return max(spans)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the first operation of any stage to the last."""
        return max(self.end_seconds)

    @property
    def work_seconds(self) -> float:
        """Mean work of a stage: the step without any bubble."""
        return self.size.micro_batches * sum(map(sum, self.times)) / self.size.stages

    @property
    def bubble_fraction(self) -> float:
        """Share of `step_seconds` in which the average stage is idle."""
        return max(0.0, 1 - self.work_seconds / self.step_seconds)  # rounding may leave less

    @cached_property
    def peak_micro_batches(self) -> tuple[float, ...]:
        """By stage, the most micro-batches whose activations it holds at once: from forward to backward.

        A micro-batch that only some of a stage's chunks hold counts as that fraction.
        """
        chunks, each = self.size.chunks, [1] * self.size.num_chunks
        peaks = (self.peak_held(stage, each) for stage in range(self.size.stages))
        return tuple(peak if chunks == 1 else peak / chunks for peak in peaks)

    def peak_held(self, stage: int, held_by_chunk: Sequence[int]) -> int:
        """Return the most that a stage holds at once, if one micro-batch in each chunk holds so much."""
        change = [sign * held for sign in (1, -1) for held in held_by_chunk]  # F, B
        rows = (operation // self.size.micro_batches for operation in self.operations[stage])
        return max(itertools.accumulate(change[row] for row in rows))

    def stage_operations(self, stage: int) -> Iterator[tuple[float, float, str]]:
        """Yield start and end in seconds, and the letter of each operation of a stage, in order."""
        for operation in self.operations[stage]:
            kind, chunk, _ = self.size.decode(operation)
            end = self.end_seconds[operation]
            yield end - self.times[chunk][kind], end, LETTERS[kind]


def simulate(
    schedule: str, size: PipelineSize, times: Sequence[ChunkTimes], *, transfer_seconds: float = 0.0
) -> PipelineRun:
    """Return one step: times are those of each chunk, transfers between two stages take `transfer_seconds`.

    Raises ToolkitError for a schedule that is impossible with these sizes.
    """
    order, per_row, chunks = operation_order(schedule, size), size.micro_batches, range(size.num_chunks)
    seconds = [chunk[kind] for kind in KINDS for chunk in times]
    # By kind and chunk, the way from an operation to the neighbour's that it needs: neighbours are on other stages.
    needs = [step * per_row if chunk + step in chunks else 0 for step in (-1, 1) for chunk in chunks]
    delay = transfer_seconds if size.stages > 1 else 0.0
    ends = [NOT_RUN] * (len(seconds) * per_row)

    def run(operations: Sequence[int]) -> Iterator[bool]:
        """Run a stage, and yield where it waits for an operation of another stage."""
        now = 0.0
        for operation in operations:
            row = operation // per_row
            if needs[row]:
                while ends[operation + needs[row]] < 0:
                    yield True
                now = max(now, ends[operation + needs[row]] + delay)
            now += seconds[row]
            ends[operation] = now

    running = [run(operations) for operations in order]
    while running:
        running = [stage for stage in running if next(stage, False)]
    return PipelineRun(schedule=schedule, size=size, operations=order, times=times, end_seconds=ends)
