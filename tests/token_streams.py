"""Rows and token streams that several tests of streaming use."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolkit.job.argument_fields import DataArguments
from toolkit.observe.batches import BATCH_FACTS
from toolkit.train.data.streaming import LaneStates, MixedRows, RowStream, TokenStream, open_stream, record_lane_states
from toolkit.train.data.tokenization import RowEncoder, row_encoder

TRUNCATED_EVERY = 3  # the answer of every third row is truncated away
ROWS = 37


def write_rows(path: Path) -> Path:
    """Write distinct rows of several lengths, every third without a supervised token after truncation."""
    made = [
        {"prompt": f"number {n}{' long' * 60 * (n % TRUNCATED_EVERY == 0)}", "completion": " word" * (n % 7 + 1)}
        for n in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def encoder(tokenizer: Any, rows: RowStream) -> RowEncoder:
    return row_encoder(tokenizer, rows.data_format, DataArguments(max_seq_length=32))


def token_stream(path: Path, tokenizer: Any, training: Any, *, packing: bool = False) -> TokenStream:
    rows = open_stream(str(path), "train", buffer_size=8, seed=1)
    return TokenStream(MixedRows(streams=(rows,)), [encoder(tokenizer, rows)], training, packing=packing)


def rank_arguments(index: int, ranks: int, *, batch: int, accumulation: int = 1, workers: int = 0) -> Any:
    """The training arguments that a stream reads."""
    loading = {"dataloader_num_workers": workers, "dataloader_pin_memory": False, "dataloader_prefetch_factor": None}
    rank = {"process_index": index, "world_size": ranks, "train_batch_size": batch}
    return SimpleNamespace(**rank, gradient_accumulation_steps=accumulation, **loading)


def batch_hashes(batches: Any, number: int, states: LaneStates) -> list[str]:
    return [batch[BATCH_FACTS].sha256 for batch in itertools.islice(record_lane_states(batches, states), number)]
