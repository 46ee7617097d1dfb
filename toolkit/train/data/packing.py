"""Pack rows into sequences of at most `max_seq_length` tokens whose documents do not attend to each other.

>>> best_fit([3, 5, 2, 4], max_tokens=7)
[[1, 2], [3, 0]]

Position ids restart at 0 with each document of a pack; transformers turns that into a block-diagonal mask (sdpa, eager,
flex). Attention of variable length (flash attention, `sdpa_varlen`) takes the lengths of the documents instead.
`train/data/document_isolation.py` verifies it on the live model.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import datasets
import torch

from toolkit.errors import ToolkitError
from toolkit.models.attention import needs_no_mask
from toolkit.observe.attest.tensors import without_adapters

TokenRow = dict[str, Any]
"""A tokenised row or pack: `input_ids`, `labels`, and the columns of its data set."""

UNPACKABLE_HINT = "leave `--packing` out; `--train_sampling_strategy group_by_length` also pads less"


def best_fit(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Return the row indices of each pack: best-fit decreasing, longest rows first.

    The packs depend on the lengths alone. Every epoch shuffles the packs, but not the rows in them.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left in a pack, and its index; sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens = lengths[index]
        place = bisect_left(free, (tokens, -1))
        left, pack = free.pop(place) if place < len(free) else (max_tokens, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        if left > tokens:
            insort(free, (left - tokens, pack))
    return packs


@dataclass(slots=True)
class OpenPack:
    """Rows of a sequence that is not full yet."""

    free_tokens: int
    rows: list[TokenRow] = field(default_factory=list)


class OpenPacks:
    """Packs rows that arrive one by one: each goes into the fullest pack that has space for it.

    >>> packs = OpenPacks(max_tokens=3, at_most=1)
    >>> [packs.add({"input_ids": tokens}) for tokens in ([1, 2], [3])]
    [None, [{'input_ids': [1, 2]}, {'input_ids': [3]}]]
    """

    def __init__(self, *, max_tokens: int, at_most: int) -> None:
        self.max_tokens, self.at_most = max_tokens, at_most
        self.packs: list[OpenPack] = []
        """In the order in which they were opened."""

    def add(self, row: TokenRow) -> list[TokenRow] | None:
        """Add a row; return the rows of the fullest pack if it is full or more than `at_most` packs are open."""
        tokens = len(row["input_ids"])
        pack = min(
            (pack for pack in self.packs if pack.free_tokens >= tokens), key=attrgetter("free_tokens"), default=None
        )
        if pack is None:
            pack = OpenPack(self.max_tokens)
            self.packs.append(pack)
        pack.rows.append(row)
        pack.free_tokens -= tokens
        if len(self.packs) <= self.at_most and pack.free_tokens:
            return None
        fullest = min(self.packs, key=attrgetter("free_tokens"))
        self.packs.remove(fullest)
        return fullest.rows

    def restore(self, packs: Iterable[list[TokenRow]]) -> None:
        """Restore open packs, in their order."""
        for rows in packs:
            self.packs.append(OpenPack(self.max_tokens - sum(len(row["input_ids"]) for row in rows), rows))


def joined(rows: Sequence[TokenRow]) -> TokenRow:
    """Concatenate rows, with the length of each under `documents`."""
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "documents": [len(row["input_ids"]) for row in rows],
        "rows": [row["row"] for row in rows if "row" in row],
    }


class PackedRows(torch.utils.data.Dataset[TokenRow]):  # type: ignore[misc]
    """Dataset of packs, joined on access."""

    def __init__(self, rows: datasets.Dataset, *, max_tokens: int) -> None:
        self.rows = rows
        self.packs = best_fit(rows["length"][:], max_tokens=max_tokens)
        self.fill_fraction = sum(rows["length"][:]) / (len(self.packs) * max_tokens)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> TokenRow:
        columns = self.rows[self.packs[index]]
        return joined([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


def check_model_packs(model: Any) -> None:
    """Raise ToolkitError for an architecture without position ids: its documents would attend to each other.

    An architecture that takes them and leaks anyway is found by the run-time verification.
    """
    plain = without_adapters(model)
    if "position_ids" not in inspect.signature(plain.forward).parameters:
        raise ToolkitError(
            f"{type(plain).__name__} cannot isolate packed rows: it takes no position ids", hint=UNPACKABLE_HINT
        )


def packs_into_one_row(model: Any) -> bool:
    """Return True for attention that takes the lengths of documents, which are those of a single row."""
    return needs_no_mask(getattr(model.config, "_attn_implementation", None))
