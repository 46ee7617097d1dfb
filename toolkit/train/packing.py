"""Rows joined into sequences of at most `max_seq_length` tokens, none of which looks across into its neighbour.

>>> best_fit([3, 5, 2, 4], max_tokens=7)
[[1, 2], [3, 0]]

A pack's documents are told apart by position ids that begin again at 0: transformers turns those into a
block-diagonal mask (sdpa, eager, flex) or into lengths (flash attention). The attestation reads back that it did.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch

from toolkit.errors import ToolkitError

Row = dict[str, Any]
UNPACKABLE_HINT = "leave `--packing` out; `--train_sampling_strategy group_by_length` also pads less"


def best_fit(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of the rows of each pack: longest rows first, each into the fullest pack that still has room.

    Depends on nothing but the lengths; the packs are shuffled every epoch, their rows stay together.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left in a pack, and which pack; sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens = lengths[index]
        place = bisect_left(room, (tokens, -1))
        left, pack = room.pop(place) if place < len(room) else (max_tokens, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        if left > tokens:
            insort(room, (left - tokens, pack))
    return packs


@dataclass(slots=True)
class OpenPack:
    """Rows that share a sequence which has room left."""

    room_tokens: int
    rows: list[Row] = field(default_factory=list)


class OpenPacks:
    """Packs of rows that come one by one: each goes into the fullest with room; the fullest is given out.

    >>> packs = OpenPacks(max_tokens=3, at_most=1)
    >>> [packs.add({"input_ids": tokens}) for tokens in ([1, 2], [3])]
    [None, [{'input_ids': [1, 2]}, {'input_ids': [3]}]]
    """

    def __init__(self, *, max_tokens: int, at_most: int) -> None:
        self.max_tokens, self.at_most = max_tokens, at_most
        self.packs: list[OpenPack] = []
        """In the order in which they were opened."""

    def add(self, row: Row) -> list[Row] | None:
        """The rows of a pack that has no room, or of the fullest where more than `at_most` are open."""
        tokens = len(row["input_ids"])
        pack = min((pack for pack in self.packs if pack.room_tokens >= tokens), key=_room, default=None)
        if pack is None:
            pack = OpenPack(self.max_tokens)
            self.packs.append(pack)
        pack.rows.append(row)
        pack.room_tokens -= tokens
        if len(self.packs) <= self.at_most and pack.room_tokens:
            return None
        fullest = min(self.packs, key=_room)
        self.packs.remove(fullest)
        return fullest.rows

    def restore(self, packs: Iterable[list[Row]]) -> None:
        """Open packs as they were, in their order."""
        for rows in packs:
            self.packs.append(OpenPack(self.max_tokens - sum(len(row["input_ids"]) for row in rows), rows))


def _room(pack: OpenPack) -> int:
    return pack.room_tokens


def joined(rows: Sequence[Row]) -> Row:
    """The rows one after the other, with the length of each under `documents`."""
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "documents": [len(row["input_ids"]) for row in rows],
        "rows": [row["row"] for row in rows if "row" in row],
    }


class PackedRows(torch.utils.data.Dataset[Row]):  # type: ignore[misc]
    """Packs of tokenised rows, joined when they are asked for."""

    def __init__(self, rows: datasets.Dataset, *, max_tokens: int) -> None:
        self.rows = rows
        self.packs = best_fit(rows["length"][:], max_tokens=max_tokens)
        self.fill_fraction = sum(rows["length"][:]) / (len(self.packs) * max_tokens)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Row:
        columns = self.rows[self.packs[index]]
        return joined([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


def check_model_packs(model: Any) -> None:
    """Refuse an architecture that does not look at position ids: its documents would run into each other.

    One that does look at them and leaks all the same is found by the attestation.
    """
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(plain.forward).parameters:
        raise ToolkitError(
            f"{type(plain).__name__} cannot keep packed rows apart: it takes no position ids", hint=UNPACKABLE_HINT
        )


def packs_into_one_row(model: Any) -> bool:
    """Whether the attention wants all packs of a batch in one row: flash attention reads no position ids of several."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))


def gives_chosen_logits(model: Any, training: Any) -> bool:
    """Whether the model's head can be asked for some places only, and the loss is its own, in eager mode."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    own_loss = not (training.label_smoothing_factor or training.use_liger_kernel or training.torch_compile)
    return own_loss and "logits_to_keep" in inspect.signature(plain.forward).parameters
