"""What a forward keeps for its backward, where it was counted and not written down as a formula.

    >>> Kept(fixed=1000, per_token=40, per_position=2).token_bytes(16)
    72

`toolkit.train.kept` counts it on fake tensors, in the child process that also counts the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Bytes as a sum of three: whatever the batch, for each token, and for each token and position of its row."""

    fixed: int
    """bf16 copies of weights, above all."""
    per_token: int
    per_position: float
    """Masks, and the scores of attention that keeps them."""

    def token_bytes(self, seq_length: int) -> int:
        """Of one token in rows of that length, without what is fixed."""
        return self.per_token + round(self.per_position * seq_length)

    def plus(self, other: Kept, times: float) -> Kept:
        """This and so many times the other."""
        return Kept(
            fixed=self.fixed + round(times * other.fixed),
            per_token=self.per_token + round(times * other.per_token),
            per_position=self.per_position + times * other.per_position,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptByModel:
    """Of one kind of compute, of training and of mask."""

    layers: Kept
    """All layers together."""
    largest: Kept
    """The layer that keeps most."""
    working: Kept
    """What that layer needs beside while it goes backward."""
    outer: Kept
    """Outside the layers, without logits."""


Key = tuple[bool, bool, str]
"""Autocast or bf16 weights; adapters or all weights; the mask: `none`, `padding` or `window`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """All that was counted of a model."""

    kept: Mapping[Key, KeptByModel]
    per_rank: Mapping[bool, KeptByModel]
    """What one more rank of all adapters adds, by compute."""
    counted_rank: int
    """The rank of the adapters in `kept`."""
    logit_bytes: int
    """Of each logit, before the loss."""

    def of(self, *, autocast: bool, lora_r: int | None, mask: str) -> KeptByModel:
        """Adapters of any rank: what they keep grows with it."""
        found = self.kept[autocast, lora_r is not None, mask if (autocast, False, mask) in self.kept else "none"]
        if lora_r is None:
            return found
        more, times = self.per_rank[autocast], lora_r - self.counted_rank
        return KeptByModel(
            layers=found.layers.plus(more.layers, times),
            largest=found.largest.plus(more.largest, times),
            working=found.working.plus(more.working, times),
            outer=found.outer.plus(more.outer, times),
        )


def counted_of(rows: Sequence[Mapping[str, Any]], rank: int) -> Counted | None:
    """Out of the child's JSON; None where nothing could be counted."""
    if not rows:
        return None
    kept = {(row["autocast"], row["lora"], row["mask"]): _by_model(row) for row in rows if not row["per_rank"]}
    return Counted(
        kept=kept,
        per_rank={row["autocast"]: _by_model(row) for row in rows if row["per_rank"]},
        counted_rank=rank,
        logit_bytes=rows[0]["logit_bytes"],
    )


def _by_model(row: Mapping[str, Any]) -> KeptByModel:
    def one(name: str) -> Kept:
        fixed, per_token, per_position = row[name]
        return Kept(fixed=fixed, per_token=per_token, per_position=per_position)

    return KeptByModel(layers=one("layers"), largest=one("largest"), working=one("working"), outer=one("outer"))
