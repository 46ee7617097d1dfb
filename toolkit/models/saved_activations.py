"""Bytes that a forward pass saves for its backward pass: one type for formulas and for counted models.

    >>> SavedBytes(fixed=1000, per_token=40, per_position=2).token_bytes(16)
    72

`toolkit.models.activations` fills these types from formulas, `toolkit.models.count_activations` by running a model on
fake tensors; `tests/models/test_activations.py` compares the two for every architecture that has formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MASKS = ("none", "padding", "window")
"""Attention masks: none; of padding or packed documents; of a sliding window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Bytes as a function of the batch: constant, plus per token, plus per token and position of its row."""

    fixed: int = 0
    """Independent of the batch: mostly bf16 copies of weights."""
    per_token: int = 0
    per_position: float = 0.0
    """Per token and position of its row: masks, and the scores of attention that saves them."""

    def token_bytes(self, seq_length: int) -> int:
        """Return the bytes of one token in rows of this length, without the constant part."""
        return self.per_token + round(self.per_position * seq_length)

    def plus(self, other: SavedBytes, times: float = 1) -> SavedBytes:
        """Return this plus `times` the other."""
        return SavedBytes(
            fixed=self.fixed + round(times * other.fixed),
            per_token=self.per_token + round(times * other.per_token),
            per_position=self.per_position + times * other.per_position,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedActivations:
    """Activations of one model under one compute dtype, training method and attention mask."""

    layers: SavedBytes
    """All decoder layers together."""
    largest_layer: SavedBytes
    """The layer that saves most."""
    backward: SavedBytes
    """What that layer allocates in addition during its own backward pass."""
    outer: SavedBytes
    """Outside the layers, without logits: the final norm and the input of the head."""
    logit_bytes: int
    """Bytes saved per logit before the loss, for example by a soft cap."""

    def plus(self, other: SavedActivations, times: float) -> SavedActivations:
        """Return this plus `times` the other; bytes per logit are this one's."""
        return SavedActivations(
            layers=self.layers.plus(other.layers, times),
            largest_layer=self.largest_layer.plus(other.largest_layer, times),
            backward=self.backward.plus(other.backward, times),
            outer=self.outer.plus(other.outer, times),
            logit_bytes=self.logit_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedActivations:
    """Everything that `toolkit.models.count_activations` counted for one model."""

    saved: Mapping[tuple[bool, bool, str], SavedActivations]
    """By autocast (against bf16 weights), LoRA (against full fine-tuning) and mask, one of `MASKS`."""
    per_rank: Mapping[bool, SavedActivations]
    """What one more rank of all LoRA adapters adds, by autocast."""
    counted_rank: int
    """LoRA rank of the entries in `saved`."""

    def at(self, *, autocast: bool, lora_r: int | None, mask: str) -> SavedActivations:
        """Return the activations for any LoRA rank: what adapters save is linear in it."""
        mask = mask if (autocast, False, mask) in self.saved else "none"
        found = self.saved[autocast, lora_r is not None, mask]
        return found if lora_r is None else found.plus(self.per_rank[autocast], lora_r - self.counted_rank)


def read_counted(rows: Sequence[Mapping[str, Any]], rank: int) -> CountedActivations | None:
    """Return the activations in the JSON rows of `count_activations`; None if there are none."""
    if not rows:
        return None
    return CountedActivations(
        saved={(row["autocast"], row["lora"], row["mask"]): _read_row(row) for row in rows if not row["per_rank"]},
        per_rank={row["autocast"]: _read_row(row) for row in rows if row["per_rank"]},
        counted_rank=rank,
    )


def _read_row(row: Mapping[str, Any]) -> SavedActivations:
    def part(name: str) -> SavedBytes:
        fixed, per_token, per_position = row[name]
        return SavedBytes(fixed=fixed, per_token=per_token, per_position=per_position)

    return SavedActivations(
        layers=part("layers"),
        largest_layer=part("largest_layer"),
        backward=part("backward"),
        outer=part("outer"),
        logit_bytes=row["logit_bytes"],
    )
