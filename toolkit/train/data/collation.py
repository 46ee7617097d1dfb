"""The order of rows, padded batches of them, and the recorded contents of a batch.

>>> list(WholeSteps([3, 1, 2, 0, 4], global_batch_size=2, drop_last=False))
[3, 1, 2, 0, 4, 3]
"""

import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from toolkit.observe.batches import IGNORED, BatchFacts

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
        self.pieces = pieces
        """Rows are padded to a multiple of so many tokens: ranks divide each row, and need its positions."""
        pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        self.pad_id: int = next((token for token in (pad, end) if token is not None), 0)  # masked, so any id works
        self.adds_positions = False
        """Add the positions whose next token is supervised: read from labels on a GPU, they would make it wait."""

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
