"""Batches of rows: order, padding, labels, and the recorded contents.

The rows of every step follow from seed, epoch and global batch, however many ranks there are.
"""

import copy
import hashlib
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from toolkit.observe.batches import BATCH_FACTS, IGNORED, BatchFacts, ObservedCollator
from toolkit.train.data.collation import Collator, SeededLengthGroups, batch_facts, keep_order

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "row": 4},
    {"input_ids": [8, 9], "labels": [8, 9], "row": 2},
]


def test_a_batch_is_padded_on_the_right_and_its_contents_are_recorded(tokenizer: Any) -> None:
    before = copy.deepcopy(tokenizer.init_kwargs), tokenizer.padding_side, tokenizer.pad_token
    pad = tokenizer.pad_token_id
    batch = ObservedCollator(Collator(tokenizer), batch_facts)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, pad]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    content = torch.tensor([[5, 6, 7, 8, 9, pad], [IGNORED, 6, 7, 8, 9, IGNORED]]).numpy().tobytes()
    assert batch[BATCH_FACTS] == BatchFacts(
        tokens=6,
        non_padding_tokens=5,
        supervised_tokens=3,  # 6, 7 and 9: nothing predicts the first token of a row
        sha256=hashlib.sha256(content).hexdigest(),
        rows=(4, 2),
    )
    assert before == (tokenizer.init_kwargs, tokenizer.padding_side, tokenizer.pad_token)


NUM_ROWS, GLOBAL_BATCH, SEED = 21, 4, 42
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
    rows = list(range(NUM_ROWS))
    sampler = SeededLengthGroups(GLOBAL_BATCH, LENGTHS[:NUM_ROWS], seed=SEED) if by_length else RandomSampler(rows)
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
    steps: dict[int, set[int]] = {}
    for rank in range(ranks):
        loader = loader_of(rank, ranks, micro_batch, **order)
        if skipped:
            loader = skip_first_batches(loader, skipped * accumulation)
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            steps.setdefault(number // accumulation, set()).update(batch.tolist())
    return list(steps.values())


@pytest.mark.parametrize("order", [{}, {"by_length": True}, {"drop_last": True}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_division_of_the_batch_has_the_same_rows_in_every_step(order: dict[str, bool], epoch: int) -> None:
    alone = steps_of(1, 1, epoch=epoch, **order)
    assert len(alone) == (5 if order.get("drop_last") else 6)
    assert alone != steps_of(1, 1, epoch=epoch + 1, **order)
    assert all(len(step) == GLOBAL_BATCH for step in alone)
    for ranks, micro_batch in [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]:
        assert steps_of(ranks, micro_batch, epoch=epoch, **order) == alone
        assert steps_of(ranks, micro_batch, epoch=epoch, skipped=2, **order) == alone[2:]


@pytest.mark.parametrize("by_length", [True, False])
def test_a_run_that_resumes_in_the_second_epoch_takes_that_epochs_order(by_length: bool) -> None:
    order = {"by_length": by_length, "whole": False}
    assert steps_of(2, 2, epoch=1, skipped=2, **order) == steps_of(2, 2, epoch=1, **order)[2:]
