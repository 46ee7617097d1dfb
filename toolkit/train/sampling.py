"""The order of rows where it follows their lengths: the same on every rank and in every epoch of the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededLengthGroups(LengthGroupedSampler):  # type: ignore[misc]
    """Rows of similar length in one batch, shuffled by seed and epoch.

    transformers draws from the process's own random state, which dropout moves differently on each rank: from the
    second epoch on ranks would cut the rows differently, train some twice and others not at all.
    """

    def __init__(self, batch_size: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(super().__iter__())
