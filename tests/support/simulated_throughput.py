"""Simulated steps of the zero-bubble paper's configurations (https://arxiv.org/abs/2401.10241), and its throughputs.

`zero_bubble.csv`: rows of its Table 5, computed bubble rates, with the times of its Table 9.
`zero_bubble_throughput.csv`: the same rows of its Table 4, measured sequences per second and GPU, with the sizes of
micro-batches of its Table 3.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.parallel.pipeline_schedule import INTERLEAVED
from toolkit.simulate.pipeline_schedules import ChunkTimes, PipelineRun, PipelineSize, simulate

FIXTURES = Path(__file__).parents[1] / "fixtures"
MEASURED = {"1f1b": "measured_1f1b", "interleaved_1f1b": "measured_interleaved_1f1b"}


def rows(name: str) -> list[dict[str, float]]:
    with (FIXTURES / name).open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


BUBBLES, THROUGHPUTS = rows("zero_bubble.csv"), rows("zero_bubble_throughput.csv")


def step(
    schedule: str, stages: int, micro_batches: int, times: ChunkTimes, *, chunks: int = 2, transfer: float = 0.0
) -> PipelineRun:
    size = PipelineSize(stages=stages, micro_batches=micro_batches, chunks=chunks if schedule == INTERLEAVED else 1)
    return simulate(schedule, size, [times.divided(size.chunks)] * size.num_chunks, transfer_seconds=transfer)


def published_step(schedule: str, row: dict[str, float], chunks: int = 2) -> PipelineRun:
    forward, backward, weight, transfer = (row[f"{name}_ms"] for name in ("forward", "backward", "weight", "transfer"))
    times = ChunkTimes(forward_seconds=forward, backward_seconds=backward + weight)
    return step(schedule, int(row["stages"]), int(row["micro_batches"]), times, chunks=chunks, transfer=transfer)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Sequences per second and GPU, predicted and measured."""

    schedule: str
    run: PipelineRun
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def throughputs() -> Iterator[Throughput]:
    for row, found in zip(BUBBLES, THROUGHPUTS, strict=True):
        for schedule, column in MEASURED.items():
            run = published_step(schedule, row, chunks=int(found["chunks_interleaved"]))
            sequences = run.size.micro_batches * found["sequences_per_micro_batch"]
            predicted = sequences / (run.step_seconds / 1000) / run.size.stages
            yield Throughput(schedule=schedule, run=run, predicted=predicted, measured=found[column])


def throughput_table() -> str:
    head = ("stages", "micro-batches", "schedule", "bubble", "predicted sequences/s per GPU", "measured", "too high by")
    lines = [f"| {' | '.join(head)} |", "| :--- " * len(head) + "|"]
    for each in throughputs():
        size = each.run.size
        lines.append(
            f"| {size.stages} | {size.micro_batches} | `{each.schedule}` | {each.run.bubble_fraction:.4f}"
            f" | {each.predicted:.2f} | {each.measured:g} | {100 * each.error:.1f} % |"
        )
    return "\n".join(lines)
