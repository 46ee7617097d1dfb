"""Verify on the live model that packed documents do not attend to each other.

Two documents in one pack must have the losses that each has alone, and those must not move when the neighbour's
tokens change. Takes a few short forwards without gradients before the first step; every rank takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionMaskInterface

from toolkit.errors import AttestationFailed
from toolkit.observe.attest.readings import Values
from toolkit.observe.attest.tensors import compute_dtype, dtype_name
from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.observe.compiler_events import uncompiled_forward
from toolkit.train.data.collation import SUPERVISED_POSITIONS, PackCollator
from toolkit.train.data.packing import UNPACKABLE_HINT

DOCUMENT_TOKENS = (19, 26, 13)
"""Lengths of the test documents. The first two share a pack; the third has its own, which adds padding."""

# Mean absolute difference of a token's loss. Observed: 1e-6 in fp32; 1e-2 for a leak in a random tiny model.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}
# With other neighbour tokens in the same shapes an isolated document's losses do not change at all.
NEIGHBOUR_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def verify_packing(trainer: Any) -> Values:
    """Return the isolation of documents in the Trainer's packs; `packing` alone, and None, where nothing is packed.

    Raises AttestationFailed if documents attend to each other.
    """
    if not isinstance(getattr(trainer.data_collator, "collator", None), PackCollator):
        return {"packing": None}
    with uncompiled_forward():
        reading = read_packing(trainer, compute_dtype=dtype_name(compute_dtype(trainer.args)))
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    check_isolated(reading, getattr(plain.config, "_attn_implementation", None))
    return reading


def read_packing(trainer: Any, *, compute_dtype: str) -> Values:
    """Measure the isolation of documents in the collator's packs."""
    model, collate = trainer.model_wrapped, trainer.data_collator
    first, second, third = (_document(trainer, seed) for seed in range(3))
    other = _document(trainer, 3)[: len(first)]
    was_training = model.training
    model.eval()
    try:
        with recorded_masks() as masks:
            packed = _losses(trainer, collate([_pack(first, second), _pack(third)]))
        other_neighbour = _losses(trainer, collate([_pack(other, second), _pack(third)]))
        alone = [_losses(trainer, collate([_pack(document)]))[0] for document in (first, second, third)]
    finally:
        model.train(was_training)
    from_alone = max(_difference(*pair) for pair in zip(packed, alone, strict=True))
    by_neighbour = _difference(packed[1], other_neighbour[1])
    isolated = from_alone <= LOSS_TOLERANCE[compute_dtype] and by_neighbour <= NEIGHBOUR_TOLERANCE[compute_dtype]
    return {
        "packing": "isolated" if isolated else "leaks",
        "packing_loss_difference": from_alone,
        "packing_neighbour_difference": by_neighbour,
        "packing_mask_bytes": sum(map(mask_bytes, masks)),
    }


def check_isolated(reading: Values, attn_implementation: Any) -> None:
    """Raise AttestationFailed if documents attend to each other."""
    if reading["packing"] == "isolated":
        return
    raise AttestationFailed(
        "packed rows are not isolated: a token's loss differs by"
        f" {reading['packing_loss_difference']:.2g} from the row alone, and by"
        f" {reading['packing_neighbour_difference']:.2g} when its neighbour changes (attention {attn_implementation})",
        hint=UNPACKABLE_HINT,
    )


@contextmanager
def recorded_masks() -> Iterator[list[Any]]:
    """Record every mask that transformers makes, by whichever attention function asks for it."""
    functions, masks = dict(AttentionMaskInterface._global_mapping), []

    def recorded(function: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            masks.append(function(*args, **kwargs))
            return masks[-1]

        return make

    for name, function in functions.items():
        AttentionMaskInterface.register(name, recorded(function))
    try:
        yield masks
    finally:
        for name, function in functions.items():
            AttentionMaskInterface.register(name, function)


def mask_bytes(mask: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of FlexAttention's `BlockMask`."""
    parts = mask.as_tuple() if hasattr(mask, "as_tuple") else (mask,)
    return sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, torch.Tensor))


def _document(trainer: Any, seed: int) -> list[int]:
    """The same random tokens on every rank, drawn without touching the run's own random state."""
    vocabulary = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False).config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(vocabulary, (DOCUMENT_TOKENS[seed % 3],), generator=generator).tolist())


def _pack(*documents: list[int]) -> dict[str, Any]:
    tokens = [token for document in documents for token in document]
    return {"input_ids": tokens, "labels": tokens, "documents": list(map(len, documents)), "rows": []}


def _losses(trainer: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Per-token losses of each document."""
    for name in (BATCH_FACTS, SUPERVISED_POSITIONS):
        batch.pop(name, None)
    targets = batch.pop("labels")
    inputs = trainer._prepare_inputs(batch)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = trainer.model_wrapped(**inputs).logits.float().cpu()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none"
    ).view(len(targets), -1)
    return _by_document(losses, targets[:, 1:])


def _by_document(losses: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """A document ends at an ignored target: the next document's first token, or padding."""
    documents: list[torch.Tensor] = []
    for row_losses, row_targets in zip(losses, targets, strict=True):
        current: list[torch.Tensor] = []
        for loss, target in zip(row_losses, row_targets.tolist(), strict=True):
            if target != IGNORED:
                current.append(loss)
            elif current:
                documents, current = [*documents, torch.stack(current)], []
        documents += [torch.stack(current)] if current else []
    return documents


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())
