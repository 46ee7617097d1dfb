"""Read back from the live model whether packed documents keep to themselves.

Two documents in one pack must have the losses that each has alone, and those must not move when the neighbour's
tokens change. Three short forwards without gradients, before the first step; every rank takes part.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import AttestationFailed
from toolkit.train.batches import BATCH_FACTS, IGNORED
from toolkit.train.packing import UNPACKABLE_HINT

Facts = dict[str, Any]

DOCUMENT_TOKENS = (19, 26, 13)
"""The first two share a pack, the third has one of its own, so that there is padding too."""

# Mean absolute difference of a token's loss. fp32 is seen at 1e-6; a leak in a random tiny model at 1e-2.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}
# By a neighbour's tokens alone, in the same shapes, an isolated document's losses do not move at all.
NEIGHBOUR_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def read_packing(trainer: Any, *, compute_dtype: str) -> Facts:
    """`packing`: `isolated` or `leaks`, and the differences that say so."""
    model, collate = trainer.model_wrapped, trainer.data_collator
    first, second, third = (_document(trainer, seed) for seed in range(3))
    other = _document(trainer, 3)[: len(first)]
    was_training = model.training
    model.eval()
    try:
        together = _losses(trainer, collate([_pack(first, second), _pack(third)]))
        beside_another = _losses(trainer, collate([_pack(other, second), _pack(third)]))
        alone = [_losses(trainer, collate([_pack(document)]))[0] for document in (first, second, third)]
    finally:
        model.train(was_training)
    from_alone = max(_difference(*pair) for pair in zip(together, alone, strict=True))
    by_neighbour = _difference(together[1], beside_another[1])
    isolated = from_alone <= LOSS_TOLERANCE[compute_dtype] and by_neighbour <= NEIGHBOUR_TOLERANCE[compute_dtype]
    return {
        "packing": "isolated" if isolated else "leaks",
        "packing_loss_difference": from_alone,
        "packing_neighbour_difference": by_neighbour,
    }


def check_isolated(facts: Facts, attn_implementation: Any) -> None:
    """End the run before its first step where documents see each other."""
    if facts["packing"] == "isolated":
        return
    raise AttestationFailed(
        "packed rows do not keep to themselves: a token's loss differs by"
        f" {facts['packing_loss_difference']:.2g} from the row alone, and by"
        f" {facts['packing_neighbour_difference']:.2g} when its neighbour changes (attention {attn_implementation})",
        hint=UNPACKABLE_HINT,
    )


def _document(trainer: Any, seed: int) -> list[int]:
    """Tokens drawn the same on every rank, without touching the run's own random state."""
    vocabulary = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False).config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(vocabulary, (DOCUMENT_TOKENS[seed % 3],), generator=generator).tolist())


def _pack(*documents: list[int]) -> Facts:
    tokens = [token for document in documents for token in document]
    return {"input_ids": tokens, "labels": tokens, "documents": list(map(len, documents)), "rows": []}


def _losses(trainer: Any, batch: Facts) -> list[torch.Tensor]:
    """Each document's losses, token by token."""
    for name in (BATCH_FACTS, "logits_to_keep", "shift_labels"):
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
    """A document ends where a target is left out: at the next one's first token, or at padding."""
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
