"""The order of rows, padded batches of them, packs of rows, and the recorded contents of a batch.

>>> list(WholeSteps([3, 1, 2, 0, 4], global_batch_size=2, drop_last=False))
[3, 1, 2, 0, 4, 3]
>>> best_fit([3, 5, 2, 4], max_seq_length=7)
[[1, 2], [3, 0]]

The rows of a pack do not attend to each other: position ids restart at 0 with each document; transformers turns that
into a block-diagonal mask (sdpa, eager, flex). Attention of variable length (flash attention, `sdpa_varlen`) takes the
lengths of the documents instead. `verify_packing` verifies it on the live model.
"""

import hashlib
import inspect
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any

import datasets
import torch
from torch.utils.data import Sampler
from transformers import AttentionMaskInterface
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.engines.tensors import compute_dtype, dtype_name, without_adapters
from toolkit.errors import AttestationFailed, ToolkitError
from toolkit.observe.batches import BATCH_FACTS, IGNORED, BatchFacts
from toolkit.record.reading import RankReading

SUPERVISED_POSITIONS = "supervised_positions"


class SeededLengthGroups(LengthGroupedSampler):  # type: ignore[misc]
    """Sampler of rows grouped by similar length, in an order that follows from seed and epoch alone.

    transformers draws from the process's own random state, which dropout advances differently on each rank: from the
    second epoch on, ranks would split the rows differently, train on some twice and on others never.
    """

    def __init__(self, batch_size: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(super().__iter__())


class WholeSteps(Sampler[int]):  # type: ignore[misc]
    """Rows of another sampler, with a last step of each epoch that has as many rows as all others.

    The rows of every step then follow from the global batch alone. accelerate fills up the last micro-batches instead,
    with other rows for every division of the batch into ranks and accumulation steps.
    """

    def __init__(self, rows: Any, *, global_batch_size: int, drop_last: bool) -> None:
        self.rows, self.global_batch_size, self.drop_last = rows, global_batch_size, drop_last

    def __len__(self) -> int:
        steps, rest = divmod(len(self.rows), self.global_batch_size)
        return (steps + bool(rest and not self.drop_last)) * self.global_batch_size

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(list(self.rows)), len(self))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


def keep_order(loader: Any, *, global_batch_size: int | None) -> None:
    """Make an accelerate loader resume in the order of its epoch; in whole steps, unless the batch size is None."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    rows = getattr(batches, "sampler", None)
    if rows is None:  # a batch sampler of transformers' own, which divides the rows itself
        return
    if global_batch_size is not None:
        rows = WholeSteps(rows, global_batch_size=global_batch_size, drop_last=batches.drop_last)
    # On every level: accelerate 1.15 looks for `set_epoch` two levels deep, and a resumed loader has one more.
    loader.set_sampler(rows)


class Collator:
    """Pads rows on the right to the longest one; `tokenizer.pad` needs a pad token, and pads on its own side."""

    def __init__(self, tokenizer: Any, *, pieces: int = 1) -> None:
        self.pieces = pieces  # rows are padded to a multiple of so many tokens: ranks divide each row
        pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        self.pad_id: int = next((token for token in (pad, end) if token is not None), 0)  # masked, so any id works
        self.adds_positions = False  # add where the next token is supervised: read from labels, a GPU would wait

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = {
            "input_ids": self._padded([row["input_ids"] for row in rows], self.pad_id),
            "attention_mask": self._padded([[1] * len(row["input_ids"]) for row in rows], 0),
            "labels": self._padded([row["labels"] for row in rows], IGNORED),
        }
        if self.pieces > 1:  # rows are padded on the right, so causal attention needs no mask
            shape = batch["input_ids"].shape
            batch["position_ids"] = torch.arange(shape[1]).expand(shape).contiguous()
        return self._with_positions(batch)

    def _padded(self, rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        width = -(-max(map(len, rows)) // self.pieces) * self.pieces
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)

    def _with_positions(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.adds_positions:
            batch[SUPERVISED_POSITIONS] = supervised_positions(next_labels(batch))
        return batch


class PackCollator(Collator):
    """Makes batches of packs without an attention mask: position ids restart where a document begins.

    Padding counts as a document of its own. The first token of a document is not a target: nothing predicts it.
    """

    def __init__(self, tokenizer: Any, *, one_row: bool = False) -> None:
        super().__init__(tokenizer)
        self.one_row = one_row
        """Concatenate all packs of a batch, and add the lengths of their documents, which replace a mask."""

    def __call__(self, packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = packs
        if self.one_row:
            rows = [{name: list(chain.from_iterable(pack[name] for pack in packs)) for name in packs[0]}]
        input_ids = self._padded([row["input_ids"] for row in rows], self.pad_id)
        labels = self._padded([row["labels"] for row in rows], IGNORED)
        position_ids = torch.empty_like(input_ids)
        for index, row in enumerate(rows):
            starts = [0, *accumulate(row["documents"])]
            labels[index, starts[:-1]] = IGNORED
            for start, end in pairwise([*starts, input_ids.shape[1]]):
                position_ids[index, start:end] = torch.arange(end - start)
        batch: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        if self.one_row:
            # transformers' `FlashAttentionKwargs`. Each layer would read the positions instead, and wait for the GPU.
            lengths, longest = torch.tensor(starts, dtype=torch.int32), max(rows[0]["documents"])
            batch |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return self._with_positions(batch)


def next_labels(batch: dict[str, Any]) -> torch.Tensor:
    """Return the label of the token after each position that the head sees, flattened, as transformers shifts them."""
    shifted = batch.get("shift_labels")
    if shifted is None:
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    return shifted.flatten()


def supervised_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return the indices of the labels that are not ignored."""
    return (labels != IGNORED).nonzero().flatten()


def batch_facts(rows: Sequence[dict[str, Any]], batch: MutableMapping[str, Any]) -> BatchFacts:
    """Count a batch; its digest is of the int64 bytes of the padded input ids, then of the labels."""
    content = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "labels"))
    numbers = [row["rows"] if "rows" in row else [row["row"]] for row in rows if "rows" in row or "row" in row]
    return BatchFacts(
        tokens=batch["input_ids"].numel(),
        non_padding_tokens=sum(len(row["input_ids"]) for row in rows),
        supervised_tokens=int((batch["labels"][:, 1:] != IGNORED).sum()),
        sha256=hashlib.sha256(content).hexdigest(),
        rows=tuple(chain.from_iterable(numbers)),
    )


# -- packs

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
        self.packs = list(packs)  # rows of sequences that are not full yet, in the order in which they were opened

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
