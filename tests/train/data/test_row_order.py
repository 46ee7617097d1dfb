"""The rows of every step follow from seed, epoch and global batch, however many ranks there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from toolkit.train.data.row_order import SeededLengthGroups, WholeSteps, keep_order

ROWS, GLOBAL_BATCH, SEED = 21, 4, 42
LENGTHS = [index % 50 + 1 for index in range(200)]


def test_length_groups_are_every_row_once_in_an_order_of_seed_and_epoch() -> None:
    sampler = SeededLengthGroups(4, LENGTHS, seed=1)
    torch.manual_seed(0)
    first = list(sampler)
    torch.manual_seed(99)  # another rank's random state
    assert list(sampler) == first
    assert sorted(first) == list(range(200))
    sampler.set_epoch(1)
    assert list(sampler) != first
    padded = sum(4 * max(LENGTHS[index] for index in first[start : start + 4]) for start in range(0, 200, 4))
    assert sum(LENGTHS) / padded > 0.9  # observed: 0.93; random batches of these lengths: 0.64


def loader_of(
    rank: int, ranks: int, micro_batch: int, *, by_length: bool = False, drop_last: bool = False, whole: bool = True
) -> Any:
    """A rank's loader as the Trainer makes it."""
    rows = list(range(ROWS))
    sampler = SeededLengthGroups(GLOBAL_BATCH, LENGTHS[:ROWS], seed=SEED) if by_length else RandomSampler(rows)
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=micro_batch, sampler=sampler, drop_last=drop_last),
        num_processes=ranks,
        process_index=rank,
        use_seedable_sampler=True,
        data_seed=SEED,
    )
    keep_order(loader, global_batch_size=GLOBAL_BATCH if whole else None)
    return loader


def steps_of(ranks: int, micro_batch: int, *, epoch: int, skipped: int = 0, **order: bool) -> list[set[int]]:
    """The rows of each step of an epoch over all ranks, after `skipped` steps, as the Trainer takes them."""
    accumulation = GLOBAL_BATCH // ranks // micro_batch
    steps: list[set[int]] = []
    for rank in range(ranks):
        loader = loader_of(rank, ranks, micro_batch, **order)
        if skipped:
            loader = skip_first_batches(loader, skipped * accumulation)
        loader.set_epoch(epoch)
        batches = [batch.tolist() for batch in loader]
        assert len(batches) % accumulation == 0
        for step in range(len(batches) // accumulation):
            own = {row for batch in batches[step * accumulation : (step + 1) * accumulation] for row in batch}
            if len(steps) == step:
                steps.append(set())
            steps[step] |= own
    return steps


@pytest.mark.parametrize("order", [{}, {"by_length": True}, {"drop_last": True}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_division_of_the_batch_has_the_same_rows_in_every_step(order: dict[str, bool], epoch: int) -> None:
    alone = steps_of(1, 1, epoch=epoch, **order)
    assert len(alone) == (5 if order.get("drop_last") else 6)
    assert all(len(step) == GLOBAL_BATCH for step in alone)
    for ranks, micro_batch in [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]:
        assert steps_of(ranks, micro_batch, epoch=epoch, **order) == alone
        assert steps_of(ranks, micro_batch, epoch=epoch, skipped=2, **order) == alone[2:]


@pytest.mark.parametrize("by_length", [True, False])
def test_a_run_that_resumes_in_the_second_epoch_takes_that_epochs_order(by_length: bool) -> None:
    order = {"by_length": by_length, "whole": False}
    assert steps_of(2, 2, epoch=1, skipped=2, **order) == steps_of(2, 2, epoch=1, **order)[2:]


def test_epochs_have_different_orders() -> None:
    assert steps_of(2, 2, epoch=0) != steps_of(2, 2, epoch=1)


def test_the_last_step_is_filled_up_with_the_first_rows_of_its_epoch() -> None:
    whole = WholeSteps([3, 1, 2, 0, 4], global_batch_size=4, drop_last=False)
    assert (list(whole), len(whole)) == ([3, 1, 2, 0, 4, 3, 1, 2], 8)
