"""The order of operations by schedule, against torch's own, and schedules that are impossible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.simulate.pipeline_schedules import (
    LETTERS,
    SCHEDULES,
    OperationOrder,
    PipelineSize,
    check_schedule,
    chunks_of,
    operation_order,
)

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
TORCH_NAMES |= {"zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
TORCH_LETTERS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "FULL_BACKWARD": "B", "BACKWARD_WEIGHT": "W"}
SIZES = [(stages, count) for stages in (2, 3, 8) for count in (1, 3, 4, 8, 12, 17)]
Operation = tuple[str, int, int]


def size_of(schedule: str, stages: int, micro_batches: int, chunks: int = 2) -> PipelineSize:
    return PipelineSize(stages=stages, micro_batches=micro_batches, chunks=chunks_of(schedule, chunks))


def own_operations(order: OperationOrder, stage: int) -> list[Operation]:
    decoded = map(order.decode, order.operations[stage])
    return [(LETTERS[kind], chunk, micro_batch) for kind, chunk, micro_batch in decoded]


def torch_operations(actions: list[Any]) -> Iterator[Operation]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:  # a forward beside a backward
            yield from torch_operations(action.sub_actions)
        elif action.computation_type.name in TORCH_LETTERS:
            yield TORCH_LETTERS[action.computation_type.name], action.stage_index, action.microbatch_index


@pytest.mark.parametrize(
    ("schedule", "chunks"), [*((schedule, 2) for schedule in TORCH_NAMES), ("interleaved_1f1b", 3)]
)
def test_the_order_is_torchs_and_the_same_sizes_are_refused(schedule: str, chunks: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    compared = 0
    for stages, count in SIZES:
        size = size_of(schedule, stages, count, chunks)
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
            assert own_operations(order, stage) == theirs
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_a_zero_bubble_schedule_delays_weight_gradients_by_the_stage(schedule: str) -> None:
    scale = {"zb_h1": 1, "zb_h2": 2}[schedule]
    order = operation_order(schedule, size_of(schedule, 4, 12))
    for stage in range(4):
        done = own_operations(order, stage)
        assert [letter for letter, _, _ in done].index("I") == scale * (3 - stage) + 1
        before_first_weight = done[: done.index(("W", stage, 0))]
        assert sum(letter == "I" for letter, _, _ in before_first_weight) == 1 + scale * stage


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_passes_every_chunk_once_in_each_direction(schedule: str) -> None:
    size = size_of(schedule, 4, 12)
    order = operation_order(schedule, size)
    done = [operation for stage in range(4) for operation in own_operations(order, stage)]
    every = sorted((chunk, micro_batch) for chunk in range(size.num_chunks) for micro_batch in range(12))
    for letters in ("F", "IB", "WB"):
        assert sorted((chunk, number) for letter, chunk, number in done if letter in letters) == every
