"""Facts of each batch, counted on the CPU where the collator makes it: tokens, a digest, row numbers.

>>> batch = ObservedCollator(lambda rows: {"input_ids": torch.tensor(rows)})([[1, 2], [3, 4]])
>>> batch[BATCH_FACTS].tokens, batch[BATCH_FACTS].supervised_tokens
(4, None)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.observe.attest.tensors import raw_bytes, without_adapters

IGNORED = -100  # the label that PyTorch's cross entropy ignores
BATCH_FACTS = "batch_facts"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """The contents of one batch of this rank; None where a batch does not show it."""

    tokens: int | None  # all tokens, with padding
    non_padding_tokens: int | None
    supervised_tokens: int | None  # labels that are not ignored, after the shift of a causal language model
    sha256: str  # fingerprint of the batch: equal wherever the same rows are trained on in the same order
    rows: tuple[int, ...] = ()
    """Indices of the rows in the data set as it was read; of all documents if rows are packed."""


CountBatch = Callable[[Sequence[Any], MutableMapping[str, Any]], BatchFacts]
"""Returns the facts of a batch, given the rows that the collator had and the batch that it made."""


def tensor_facts(rows: Sequence[Any], batch: Any, *, label_shift: int | None = None) -> BatchFacts:
    """Count a batch of any script: the digest is of all tensors by name, shape and content.

    `label_shift` is the model's (see below): without it no supervised token is counted.
    """
    del rows
    digest, found = hashlib.sha256(), dict(named_tensors(batch))
    for name, tensor in found.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor))
    ids = {name: tensor for name, tensor in found.items() if name.endswith("input_ids")}
    masks = [found.get(name.removesuffix("input_ids") + "attention_mask") for name in ids]
    masked = [
        int(m.sum()) for m, each in zip(masks, ids.values(), strict=True) if m is not None and m.shape == each.shape
    ]
    labels = [labels for name, labels in found.items() if name.endswith("labels") and labels.dim() > 1]
    supervised = [int((each[..., label_shift:] != IGNORED).sum()) for each in labels if label_shift is not None]
    return BatchFacts(
        tokens=sum(map(torch.numel, ids.values())) if ids else None,
        non_padding_tokens=sum(masked) if ids and len(masked) == len(ids) else None,
        supervised_tokens=sum(supervised) if supervised else None,
        sha256=digest.hexdigest(),
    )


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch in the order of their names: `input_ids`, or `0.pixel_values` within a list.

    >>> [name for name, _ in named_tensors({"labels": torch.ones(2), "images": [torch.ones(1)]})]
    ['images.0', 'labels']
    """
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        inner = sorted(value.items(), key=lambda item: str(item[0])) if isinstance(value, Mapping) else enumerate(value)
        for key, each in inner:
            yield from named_tensors(each, f"{name}.{key}" if name else str(key))


def label_shift_of(model: Any) -> int | None:
    """Return the positions by which a model shifts its labels: 1 for a causal language model, 0 where every label is
    its own position's, None where the class does not show it."""
    plain = without_adapters(model)
    name = type(plain).__name__
    if getattr(getattr(plain, "config", None), "is_encoder_decoder", False):
        return 0
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return 1
    return 0 if name.endswith(("ForTokenClassification", "ForMaskedLM")) else None


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
