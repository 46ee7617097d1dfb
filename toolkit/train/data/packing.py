"""Pack rows into sequences of limited length whose documents do not attend to each other.

>>> best_fit([3, 5, 2, 4], max_seq_length=7)
[[1, 2], [3, 0]]

Position ids restart at 0 with each document of a pack; transformers turns that into a block-diagonal mask (sdpa, eager,
flex). Attention of variable length (flash attention, `sdpa_varlen`) takes the lengths of the documents instead.
`verify_packing` verifies it on the live model.
"""

import inspect
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import datasets
import torch
from transformers import AttentionMaskInterface

from toolkit.engines.tensors import compute_dtype, dtype_name, without_adapters
from toolkit.errors import AttestationFailed, ToolkitError
from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.record.reading import RankReading
from toolkit.train.data.collation import SUPERVISED_POSITIONS, PackCollator

TokenRow = dict[str, Any]  # a tokenised row or pack: `input_ids`, `labels`, and the columns of its data set

UNPACKABLE_HINT = "leave `--packing` out; `--train_sampling_strategy group_by_length` also pads less"


def best_fit(lengths: Sequence[int], *, max_seq_length: int) -> list[list[int]]:
    """Return the row indices of each pack, which follow from the lengths alone: best-fit decreasing, longest first."""
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left in a pack, and its index; sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens = lengths[index]
        place = bisect_left(free, (tokens, -1))
        left, pack = free.pop(place) if place < len(free) else (max_seq_length, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        if left > tokens:
            insort(free, (left - tokens, pack))
    return packs


class OpenPacks:
    """Packs rows that arrive one by one: each goes into the fullest pack that has space for it.

    >>> packs = OpenPacks(max_seq_length=3, at_most=1)
    >>> [packs.add({"input_ids": tokens}) for tokens in ([1, 2], [3])]
    [None, [{'input_ids': [1, 2]}, {'input_ids': [3]}]]
    """

    def __init__(self, *, max_seq_length: int, at_most: int, packs: Iterable[list[TokenRow]] = ()) -> None:
        self.max_seq_length, self.at_most = max_seq_length, at_most
        self.packs = list(packs)
        """Rows of sequences that are not full yet, in the order in which they were opened."""

    def add(self, row: TokenRow) -> list[TokenRow] | None:
        """Add a row; return the rows of the fullest pack if it is full or more than `at_most` packs are open."""
        free = [self.max_seq_length - sum(len(each["input_ids"]) for each in pack) for pack in self.packs]
        free.append(self.max_seq_length)  # of a new one
        self.packs.append([])
        fullest = min((i for i, tokens in enumerate(free) if tokens >= len(row["input_ids"])), key=free.__getitem__)
        self.packs[fullest].append(row)
        free[fullest] -= len(row["input_ids"])
        if not self.packs[-1]:
            del self.packs[-1], free[-1]
        if len(self.packs) <= self.at_most and free[fullest]:
            return None
        return self.packs.pop(free.index(min(free)))


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

    def __init__(self, rows: datasets.Dataset, *, max_seq_length: int) -> None:
        self.rows = rows
        self.packs = best_fit(rows["length"][:], max_seq_length=max_seq_length)
        self.fill_fraction = sum(rows["length"][:]) / (len(self.packs) * max_seq_length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> TokenRow:
        columns = self.rows[self.packs[index]]
        return joined([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


def check_model_packs(model: Any) -> None:
    """Raise ToolkitError for an architecture without position ids: its documents would attend to each other."""
    plain = without_adapters(model)
    if "position_ids" not in inspect.signature(plain.forward).parameters:
        what = f"{type(plain).__name__} cannot isolate packed rows: it takes no position ids"
        raise ToolkitError(what, hint=UNPACKABLE_HINT)


DOCUMENT_TOKENS = (19, 26, 13)  # of the test documents: two share a pack, the third has its own, which adds padding

# Mean absolute difference of a token's loss. Observed: 1e-6 in fp32; 1e-2 for a leak in a random tiny model.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}
# With other neighbour tokens in the same shapes an isolated document's losses do not change at all.
NEIGHBOUR_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def verify_packing(trainer: Any) -> RankReading:
    """Return the isolation of documents in the Trainer's packs; `packing` alone, and None, where nothing is packed.

    Two documents in one pack must have the losses that each has alone, and those must not move when the neighbour's
    tokens change. Collective. Raises AttestationFailed if documents attend to each other.
    """
    if not isinstance(getattr(trainer.data_collator, "collator", None), PackCollator):
        return RankReading.of(packing=None)
    model, dtype = trainer.model_wrapped, dtype_name(compute_dtype(trainer.args))
    config = trainer.accelerator.unwrap_model(model, keep_torch_compile=False).config
    # The same random tokens on every rank, drawn without touching the run's own random state.
    draws = [(DOCUMENT_TOKENS[seed % 3], torch.Generator().manual_seed(seed)) for seed in range(4)]
    first, second, third, other = (torch.randint(config.vocab_size, (n,), generator=g).tolist() for n, g in draws)
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            with _recorded_masks() as masks:
                packed = _losses(trainer, [first, second], [third])
            other_neighbour = _losses(trainer, [other, second], [third])
            alone = [_losses(trainer, [document])[0] for document in (first, second, third)]
    finally:
        model.train(was_training)
    pairs = [*zip(packed, alone, strict=True), (packed[1], other_neighbour[1])]
    *from_each, by_neighbour = (float((one - other).abs().mean()) for one, other in pairs)
    from_alone = max(from_each)
    if not (from_alone <= LOSS_TOLERANCE[dtype] and by_neighbour <= NEIGHBOUR_TOLERANCE[dtype]):
        raise AttestationFailed(
            f"packed rows are not isolated: a token's loss differs by {from_alone:.2g} from the row alone, and by"
            f" {by_neighbour:.2g} when its neighbour changes"
            f" (attention {getattr(config, '_attn_implementation', None)})",
            hint=UNPACKABLE_HINT,
        )
    # A mask is a tensor, or FlexAttention's `BlockMask` of several.
    parts = [part for mask in masks for part in (mask.as_tuple() if hasattr(mask, "as_tuple") else (mask,))]
    return RankReading.of(
        packing="isolated",
        packing_loss_difference=from_alone,
        packing_neighbour_difference=by_neighbour,
        packing_mask_bytes=sum(p.untyped_storage().nbytes() for p in parts if isinstance(p, torch.Tensor)),
    )


def _losses(trainer: Any, *packs: list[list[int]]) -> Sequence[torch.Tensor]:
    batch = trainer.data_collator([joined([{"input_ids": tokens, "labels": tokens} for tokens in p]) for p in packs])
    for name in (BATCH_FACTS, SUPERVISED_POSITIONS):
        batch.pop(name, None)
    targets = batch.pop("labels")[:, 1:].flatten()
    inputs = trainer._prepare_inputs(batch)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = trainer.model_wrapped(**inputs).logits.float().cpu()
    every = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    lengths = [len(document) - 1 for pack in packs for document in pack]  # nothing predicts the first token
    return every[targets != IGNORED].split(lengths)  # type: ignore[no-any-return]


@contextmanager
def _recorded_masks() -> Iterator[list[Any]]:
    functions, masks = dict(AttentionMaskInterface._global_mapping), []

    def recorded(function: Any, *args: Any, **kwargs: Any) -> Any:
        masks.append(function(*args, **kwargs))
        return masks[-1]

    for name, function in functions.items():
        AttentionMaskInterface.register(name, partial(recorded, function))
    try:
        yield masks
    finally:
        for name, function in functions.items():
            AttentionMaskInterface.register(name, function)
