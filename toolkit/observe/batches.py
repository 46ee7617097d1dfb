"""Facts of each batch, counted on the CPU where the collator makes it: tokens, a digest, row numbers.

>>> batch = ObservedCollator(lambda rows: {"input_ids": torch.tensor(rows)})([[1, 2], [3, 4]])
>>> batch[BATCH_FACTS].tokens, batch[BATCH_FACTS].supervised_tokens
(4, None)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.observe.attest.tensors import raw_bytes

IGNORED = -100  # the label that PyTorch's cross entropy ignores
BATCH_FACTS = "batch_facts"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """The contents of one batch of this rank; None where a batch does not show it."""

    tokens: int | None  # all tokens, with padding
    non_padding_tokens: int | None
    supervised_tokens: int | None  # labels that are not ignored after the causal shift
    sha256: str  # fingerprint of the batch: equal wherever the same rows are trained on in the same order
    rows: tuple[int, ...] = ()
    """Indices of the rows in the data set as it was read; of all documents if rows are packed."""


CountBatch = Callable[[Sequence[Any], MutableMapping[str, Any]], BatchFacts]
"""Returns the facts of a batch, given the rows that the collator had and the batch that it made."""


def tensor_facts(rows: Sequence[Any], batch: MutableMapping[str, Any]) -> BatchFacts:
    """Count a batch of any script: the digest is of all tensors by name, shape and content."""
    del rows
    digest, tensors = hashlib.sha256(), {name: batch[name] for name in sorted(batch) if torch.is_tensor(batch[name])}
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor))

    def total(ending: str, count: Callable[[torch.Tensor], Any]) -> int | None:
        counts = [int(count(tensor)) for name, tensor in tensors.items() if name.endswith(ending)]
        return sum(counts) if counts else None

    return BatchFacts(
        tokens=total("input_ids", torch.numel),
        non_padding_tokens=total("attention_mask", torch.sum),
        supervised_tokens=total("labels", lambda labels: (labels[..., 1:] != IGNORED).sum()),
        sha256=digest.hexdigest(),
    )


class ObservedCollator:
    """A Trainer's collator that adds `BatchFacts` to each batch under `BATCH_FACTS`; it has all attributes of its own.

    Where a collator returns the rows themselves (TRL's GRPO), nothing is added.
    """

    def __init__(self, collator: Callable[[Any], Any], count: CountBatch = tensor_facts) -> None:
        self.collator, self.count = collator, count

    def __call__(self, rows: Sequence[Any]) -> Any:
        batch = self.collator(rows)
        if isinstance(batch, MutableMapping):
            batch[BATCH_FACTS] = self.count(rows, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name in ("collator", "count"):  # while it is unpickled in a worker of the data loader
            raise AttributeError(name)
        return getattr(self.collator, name)


def take_facts(batch: Any) -> BatchFacts | None:
    """Remove the facts from a batch before the model sees it, and return them; None where it has none."""
    facts: BatchFacts | None = batch.pop(BATCH_FACTS, None) if isinstance(batch, MutableMapping) else None
    return facts
