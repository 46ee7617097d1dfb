"""Rows of tokens into padded batches, and what each batch holds, counted before any device sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

IGNORED = -100  # what PyTorch's cross entropy leaves out
BATCH_FACTS = "batch_facts"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What one padded batch holds, counted on the CPU before any device sees it."""

    tokens: int
    """With padding."""
    non_padding_tokens: int
    supervised_tokens: int
    """Labels that are not -100 after the causal shift."""
    sha256: str
    """Of the int64 bytes of the padded input ids, then of the labels: the token order's fingerprint."""
    rows: tuple[int, ...] = ()
    """Numbers of the rows, from 0, in the data set as it was read; of all documents where rows are packed."""


class Collator:
    """Pads rows on the right to the longest of the batch, and says under `BATCH_FACTS` what the batch holds.

    By hand rather than with `tokenizer.pad`, which needs a pad token and follows the tokenizer's padding side.
    """

    def __init__(self, tokenizer: Any) -> None:
        pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        self.pad_id: int = next((token for token in (pad, end) if token is not None), 0)  # masked, so any id will do

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lengths = [len(row["input_ids"]) for row in rows]
        input_ids = _padded([row["input_ids"] for row in rows], self.pad_id)
        labels = _padded([row["labels"] for row in rows], IGNORED)
        attention_mask = _padded([[1] * length for length in lengths], 0)
        facts = _batch_facts(input_ids, labels, rows)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, BATCH_FACTS: facts}


class PackCollator(Collator):
    """Batches of packs, without an attention mask: position ids that begin again say where a document begins.

    Padding is a document of its own. The first token of a document is no target: nothing predicts it.
    """

    def __init__(self, tokenizer: Any, *, one_row: bool = False, supervised_logits: bool = False) -> None:
        super().__init__(tokenizer)
        self.one_row = one_row
        """All packs of a batch behind each other, for attention that takes lengths instead of a mask."""
        self.supervised_logits = supervised_logits
        """Where a batch is one row, ask the model for no logits but those that the loss looks at."""

    def __call__(self, packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = [_chained(packs)] if self.one_row else packs
        input_ids = _padded([row["input_ids"] for row in rows], self.pad_id)
        labels = _padded([_without_first_tokens(row) for row in rows], IGNORED)
        positions = [_positions(row["documents"], input_ids.shape[1]) for row in rows]
        facts = _batch_facts(input_ids, labels, rows)
        position_ids = torch.tensor(positions, dtype=torch.int64)
        batch = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, BATCH_FACTS: facts}
        return batch | _supervised_logits(labels) if self.supervised_logits and len(rows) == 1 else batch


def _supervised_logits(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The places whose next token is supervised, and those tokens, in transformers' words."""
    places = (labels[0, 1:] != IGNORED).nonzero().flatten()
    return {"logits_to_keep": places, "shift_labels": labels[:, places + 1]}


def _chained(packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: list(chain.from_iterable(pack[name] for pack in packs)) for name in packs[0]}


def _without_first_tokens(pack: dict[str, Any]) -> list[int]:
    labels, start = list(pack["labels"]), 0
    for tokens in pack["documents"]:
        labels[start] = IGNORED
        start += tokens
    return labels


def _positions(documents: Sequence[int], width: int) -> list[int]:
    padding = width - sum(documents)
    return list(chain.from_iterable(map(range, [*documents, padding])))


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return padded


def _batch_facts(input_ids: torch.Tensor, labels: torch.Tensor, rows: Sequence[dict[str, Any]]) -> BatchFacts:
    digest = hashlib.sha256(input_ids.numpy().tobytes())
    digest.update(labels.numpy().tobytes())
    numbers = [row["rows"] if "rows" in row else [row["row"]] for row in rows if "rows" in row or "row" in row]
    return BatchFacts(
        tokens=input_ids.numel(),
        non_padding_tokens=sum(len(row["input_ids"]) for row in rows),
        supervised_tokens=int((labels[:, 1:] != IGNORED).sum()),
        sha256=digest.hexdigest(),
        rows=tuple(chain.from_iterable(numbers)),
    )
