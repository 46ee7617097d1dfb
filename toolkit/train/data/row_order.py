"""The order of rows in training: groups of similar length, and steps that all have the same number of rows.

>>> list(WholeSteps([3, 1, 2, 0, 4], global_batch_size=2, drop_last=False))
[3, 1, 2, 0, 4, 3]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededLengthGroups(LengthGroupedSampler):  # type: ignore[misc]
    """Sampler of rows grouped by similar length, in an order that follows from seed and epoch alone.

    transformers draws from the process's own random state, which dropout advances differently on each rank: from the
    second epoch on, ranks would split the rows differently, train on some twice and on others never.
    """

    def __init__(self, batch_size: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(super().__iter__())


class WholeSteps(Sampler[int]):  # type: ignore[misc]
    """Rows of another sampler, with a last step of each epoch that has as many rows as all others.

    The rows of every step then follow from the global batch alone. accelerate fills up the last micro-batches instead,
    with other rows for every division of the batch into ranks and accumulation steps.
    """

    def __init__(self, rows: Any, *, global_batch_size: int, drop_last: bool) -> None:
        self.rows, self.global_batch_size, self.drop_last = rows, global_batch_size, drop_last

    def __len__(self) -> int:
        steps, rest = divmod(len(self.rows), self.global_batch_size)
        return (steps + bool(rest and not self.drop_last)) * self.global_batch_size

    def __iter__(self) -> Iterator[int]:
        order = list(self.rows)
        return islice(cycle(order), len(self))

    def set_epoch(self, epoch: int) -> None:
        """Draw another order of the rows."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


def keep_order(loader: Any, *, global_batch_size: int | None) -> None:
    """Make a loader that accelerate has prepared keep the order of an epoch where a run resumes, in whole steps.

    None leaves the last step of an epoch as accelerate fills it up.
    """
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    rows = getattr(batches, "sampler", None)
    if rows is None:  # a batch sampler of transformers' own, which divides the rows itself
        return
    if global_batch_size is not None:
        rows = WholeSteps(rows, global_batch_size=global_batch_size, drop_last=batches.drop_last)
    # On every level: accelerate 1.15 looks for `set_epoch` two levels deep, and a resumed loader has one more.
    loader.set_sampler(rows)
