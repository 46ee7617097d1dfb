"""Facts of each batch, counted on the CPU where it is made: tokens, a digest, row numbers.

They are taken beside the batches of somebody's script, which it has as it would have them alone (`counted_batches`).
Our own script's collator adds them to its batches, with the numbers of the rows:

>>> batch = ObservedCollator(lambda rows: {"input_ids": torch.tensor(rows)})([[1, 2], [3, 4]])
>>> batch[BATCH_FACTS].tokens, batch[BATCH_FACTS].supervised_tokens
(4, None)
"""

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from toolkit.engines.tensors import raw_bytes, without_adapters

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


def labels_padding(inputs: Any) -> bool:
    """Return True if a batch has labels where its `attention_mask` hides a token, which a model's own loss counts."""
    tensors = dict(named_tensors(inputs))
    labels, mask = tensors.get("labels"), tensors.get("attention_mask")
    if labels is None or mask is None or labels.shape != mask.shape or labels.dim() != 2:
        return False
    return not labels.is_floating_point() and bool(((labels != IGNORED) & (mask == 0)).any())


class ObservedCollator:
    """Our own script's collator, which adds `BatchFacts` to each batch under `BATCH_FACTS`."""

    def __init__(self, collator: Callable[[Any], Any], count: CountBatch = tensor_facts) -> None:
        self.collator, self.count = collator, count

    def __call__(self, rows: Sequence[Any]) -> Any:
        batch = self.collator(rows)
        if isinstance(batch, MutableMapping):
            batch[BATCH_FACTS] = self.count(rows, batch)
        return batch


def take_facts(batch: Any) -> BatchFacts | None:
    """Remove the facts from a batch before the model sees it, and return them; None where it has none."""
    facts: BatchFacts | None = batch.pop(BATCH_FACTS, None) if isinstance(batch, MutableMapping) else None
    return facts


# -- batches of somebody's loaders

iterate_loader = DataLoaderShard.__iter__  # accelerate's own iteration over a prepared loader
_COUNTED = "counted by a worker"


def counted_batches(loader: Any, count: CountBatch) -> Iterator[tuple[Any, BatchFacts | None]]:
    """Yield the batches of a prepared loader as it does by itself, each with its facts.

    A batch without tensors has none. Workers count their own batches, unless they outlive this iteration.
    """
    facts: deque[BatchFacts | None] = deque()
    inner = loader.base_dataloader
    begin = inner.__iter__

    def base_batches() -> Iterator[Any]:
        del inner.__iter__  # what follows sees the loader as it is
        collate = inner.collate_fn
        # A worker that is spawned imports this module by name, which a script's own package may have.
        if inner.num_workers and not inner.persistent_workers and __name__ in sys.modules:
            inner.collate_fn = _CountingCollator(collate, count)
        try:
            batches = begin()
        finally:
            inner.collate_fn = collate
        return _uncounted(batches, count, facts)

    inner.__iter__ = base_batches
    for number, batch in enumerate(iterate_loader(loader)):
        if number == 0:
            for _ in range(loader.skip_batches):
                facts.popleft()
        yield batch, facts.popleft()


def _uncounted(batches: Iterator[Any], count: CountBatch, facts: deque[BatchFacts | None]) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, (tuple, list)) and len(batch) == 3 and isinstance(batch[0], str) and batch[0] == _COUNTED:
            facts.append(None if batch[1] is None else BatchFacts(**batch[1]))
            yield batch[2]
        else:
            facts.append(facts_of(count, batch))
            yield batch


def facts_of(count: CountBatch, batch: Any) -> BatchFacts | None:
    """Return a batch's facts; None without tensors: rows of TRL's GRPO, objects of a class of one's own."""
    return count((), batch) if next(named_tensors(batch), None) is not None else None


class _CountingCollator:
    """A worker's collator: each batch comes with its facts."""

    def __init__(self, collate: Callable[[Any], Any], count: CountBatch) -> None:
        self.collate, self.count = collate, count

    def __call__(self, rows: Any) -> tuple[str, dict[str, Any] | None, Any]:
        batch = self.collate(rows)
        facts = facts_of(self.count, batch)
        return _COUNTED, None if facts is None else asdict(facts), batch
