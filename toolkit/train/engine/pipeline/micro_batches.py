"""The micro-batches of one optimizer step in one shape: torch's schedules receive each of them in the same buffers.

The collator pads a micro-batch to its longest row. Here all of a step are padded to the longest row among them, and an
incomplete step at the end of an epoch is filled up with rows that no label counts in. Neither changes a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from toolkit.observe.batches import BATCH_FACTS, IGNORED
from toolkit.train.data.collation import SUPERVISED_POSITIONS

Batch = dict[str, Any]


def in_one_shape(batches: Sequence[Batch], *, count: int) -> list[Batch]:
    """Return `count` micro-batches of the same number of rows and tokens."""
    rows = max(batch["input_ids"].shape[0] for batch in batches)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    padded = [_padded(batch, rows, tokens) for batch in batches]
    filler = {**padded[0], "labels": torch.full_like(padded[0]["labels"], IGNORED)}
    return [*padded, *(filler for _ in range(count - len(padded)))]


def _padded(batch: Batch, rows: int, tokens: int) -> Batch:
    more = tokens - batch["input_ids"].shape[1]
    inputs = {name: value for name, value in batch.items() if name not in (BATCH_FACTS, SUPERVISED_POSITIONS)}
    fills = {"labels": IGNORED, "attention_mask": 0, "input_ids": int(batch["input_ids"][0, -1])}
    for name in fills.keys() & inputs.keys():
        inputs[name] = pad(inputs[name], (0, more), value=fills[name])
    if "position_ids" in inputs:
        inputs["position_ids"] = _with_padding_positions(inputs["position_ids"], more)
    if "cu_seq_lens_q" in inputs and more:
        inputs |= _with_padding_document(inputs, tokens, more)
    return _with_rows(inputs, rows)


def _with_padding_positions(positions: torch.Tensor, more: int) -> torch.Tensor:
    """Padding counts as a document of its own, as in the collator."""
    own = torch.arange(more, device=positions.device).expand(len(positions), more)
    return torch.cat([positions, own], dim=1)


def _with_padding_document(inputs: Batch, tokens: int, more: int) -> Batch:
    starts = inputs["cu_seq_lens_q"]
    starts = torch.cat([starts, starts.new_tensor([tokens])])
    longest = max(int(inputs["max_length_q"]), more)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def _with_rows(inputs: Batch, rows: int) -> Batch:
    """Repeat the first row, without labels."""
    held = inputs["input_ids"].shape[0]
    if held == rows:
        return inputs
    filled = dict(inputs)
    for name in ("input_ids", "attention_mask", "position_ids", "labels"):
        if name in inputs:
            filled[name] = torch.cat([inputs[name], inputs[name][:1].expand(rows - held, -1)])
    filled["labels"][held:] = IGNORED
    return filled
