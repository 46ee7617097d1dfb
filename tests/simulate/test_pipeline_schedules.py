"""The order of operations by schedule, against torch's own; steps against the zero-bubble paper and closed forms.

`simulated_throughput` names the paper's tables.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from simulated_throughput import BUBBLES, THROUGHPUTS, published_step, step, throughputs

from toolkit.errors import ToolkitError
from toolkit.parallel.pipeline_schedule import INTERLEAVED, SCHEDULES
from toolkit.simulate.pipeline_schedules import (
    LETTERS,
    PREDICTED_OVER_MEASURED,
    ChunkTimes,
    PipelineSize,
    check_schedule,
    operation_order,
    simulate,
)

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
TORCH_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B"}
SIZES = [(stages, count) for stages in (2, 3, 8) for count in (1, 3, 4, 8, 12, 17)]
EQUAL = ChunkTimes(forward_seconds=1.0, backward_seconds=2.0)
UNEQUAL = ChunkTimes(forward_seconds=3.0, backward_seconds=6.0)
Operation = tuple[str, int, int]


def own_operations(size: PipelineSize, operations: list[int]) -> list[Operation]:
    decoded = map(size.decode, operations)
    return [(LETTERS[kind], chunk, micro_batch) for kind, chunk, micro_batch in decoded]


def torch_operations(actions: list[Any]) -> Iterator[Operation]:
    for action in actions:
        if action is not None and action.computation_type.name in TORCH_LETTERS:
            yield TORCH_LETTERS[action.computation_type.name], action.stage_index, action.microbatch_index


@pytest.mark.parametrize(
    ("schedule", "chunks"), [*((schedule, 2) for schedule in TORCH_NAMES), ("interleaved_1f1b", 3)]
)
def test_the_order_is_torchs_and_the_same_sizes_are_refused(schedule: str, chunks: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    compared = 0
    for stages, count in SIZES:
        size = PipelineSize(stages=stages, micro_batches=count, chunks=chunks if schedule == INTERLEAVED else 1)
        try:
            actions = get_schedule_ops(TORCH_NAMES[schedule], stages, count, size.chunks if size.chunks > 1 else None)
        except ValueError:
            with pytest.raises(ToolkitError):
                check_schedule(schedule, size)
            continue
        order = operation_order(schedule, size)
        for stage in range(stages):
            theirs = list(torch_operations(actions[stage]))
            if schedule == "1f1b" and stage == stages - 1:  # torch 2.13 numbers these forwards from 1 in its picture
                theirs = [(letter, chunk, number - (letter == "F")) for letter, chunk, number in theirs]
            assert own_operations(size, order[stage]) == theirs
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("place", range(len(BUBBLES)))
def test_the_papers_bubbles_are_reproduced_to_four_decimals_and_of_interleaved_1f1b_to_0_004(place: int) -> None:
    row, chunks = BUBBLES[place], int(THROUGHPUTS[place]["chunks_interleaved"])
    assert round(published_step("1f1b", row).bubble_fraction, 4) == row["bubble_1f1b"]
    interleaved = published_step("interleaved_1f1b", row, chunks=chunks).bubble_fraction
    assert interleaved == pytest.approx(row["bubble_interleaved_1f1b"], abs=0.004)


def test_known_miss_every_prediction_is_optimistic_by_the_range_that_is_printed() -> None:
    found = list(throughputs())
    errors = [each.error for each in found]
    assert len(errors) == 12
    assert min(errors) == pytest.approx(PREDICTED_OVER_MEASURED[0], abs=0.005)
    assert max(errors) == pytest.approx(PREDICTED_OVER_MEASURED[1], abs=0.01)
    assert max(found, key=lambda each: each.error).schedule == "interleaved_1f1b"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 8), (16, 100)])
def test_gpipe_and_1f1b_have_the_bubble_of_their_closed_form(schedule: str, stages: int, micro_batches: int) -> None:
    run = step(schedule, stages, micro_batches, UNEQUAL)
    assert run.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert run.makespan_seconds == pytest.approx(run.step_seconds)


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [
        ("gpipe", (12, 12, 12, 12)),
        ("1f1b", (4, 3, 2, 1)),
        ("interleaved_1f1b", (5.5, 4.5, 3.5, 2.5)),  # p·(1 + (p-1)/(p·v)) on the first stage
    ],
)
def test_peak_micro_batches_by_stage(schedule: str, peaks: tuple[float, ...]) -> None:
    run = step(schedule, 4, 12, EQUAL)
    assert run.peak_micro_batches == peaks


def test_a_transfer_delays_the_other_stage_and_not_its_sender() -> None:
    run = step("gpipe", 2, 1, EQUAL, transfer=10.0)
    first, second = (list(run.stage_operations(stage)) for stage in range(2))
    assert [(start, end) for start, end, _ in first] == [(0.0, 1.0), (24.0, 26.0)]
    assert [(start, end) for start, end, _ in second] == [(11.0, 12.0), (12.0, 14.0)]


def test_a_slow_chunk_makes_the_others_wait() -> None:
    slow = ChunkTimes(forward_seconds=2.0, backward_seconds=4.0)
    run = simulate("1f1b", PipelineSize(stages=2, micro_batches=50), [EQUAL, slow])
    assert run.work_seconds == 50 * (3 + 6) / 2
    assert run.step_seconds == 50 * 6 + 3  # the slow stage never waits after its first forward
    assert run.bubble_fraction == pytest.approx(1 - 225 / 303)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_size_that_is_possible_ends(schedule: str) -> None:
    for stages in (1, 2, 5):
        for micro_batches in (2 * stages, 3 * stages, 2 * stages + 30):
            run = step(schedule, stages, micro_batches, UNEQUAL, transfer=0.5)
            assert 0 <= run.bubble_fraction < 1
            assert run.step_seconds <= run.makespan_seconds + 1e-9
