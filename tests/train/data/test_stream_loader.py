"""Loading a stream: exact resuming, worker processes, and errors in rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from token_streams import batch_hashes, rank_arguments, token_stream, write_rows

from toolkit.errors import ToolkitError
from toolkit.observe.batches import ObservedCollator
from toolkit.train.data.collation import Collator, PackCollator
from toolkit.train.data.stream_loader import (
    LaneStates,
    read_lane_states,
    record_lane_states,
    stream_loader,
    write_lane_states,
)
from toolkit.train.data.tokenization import RowEncoder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def loader(
    path: Path,
    tokenizer: Any,
    *,
    workers: int = 0,
    packing: bool = False,
    accumulation: int = 2,
    resume: tuple[LaneStates, int] | None = None,
) -> Any:
    """Batches of one sequence, as the Trainer iterates them after skipping those before a checkpoint."""
    training = rank_arguments(0, 1, batch=1, accumulation=accumulation, workers=workers)
    sequences = token_stream(path, tokenizer, training, packing=packing)
    if resume is not None:
        sequences.resume(resume[0], batches=resume[1])
    collator = ObservedCollator(PackCollator(tokenizer) if packing else Collator(tokenizer))
    batches = stream_loader(sequences, collator, training, torch.device("cpu"))
    batches.skip_batches = 0 if resume is None else resume[1]
    return iter(batches)


def test_a_stream_without_supervised_tokens_ends(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 60, "completion": "word"}) + "\n")
    with pytest.raises(ToolkitError, match="no supervised token in 10 consecutive rows"):
        list(record_lane_states(loader(path, tokenizer, accumulation=1), {}))


def test_fewer_rows_than_a_global_batch_are_refused(rows: Path, tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match=r"rows.jsonl has 37 rows, fewer than one global batch of 64 sequences"):
        list(record_lane_states(loader(rows, tokenizer, accumulation=64), {}))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stops", [[2], [14], [70, 6]])
def test_a_stream_resumes_exactly_and_tokenises_nothing_twice(
    rows: Path, tokenizer: Any, tmp_path: Path, packing: bool, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = batch_hashes(loader(rows, tokenizer, packing=packing), sum(stops) + 20, {})
    states: LaneStates = {}
    done = 0
    for stop in stops:  # a run that is stopped again records lanes that it did not reach as it found them
        batch_hashes(
            loader(rows, tokenizer, packing=packing, resume=(dict(states), done) if done else None), stop, states
        )
        done += stop
    write_lane_states(tmp_path, states, rank=0, world_size=1)
    tokenised = []
    encode = RowEncoder.encode_row
    monkeypatch.setattr(RowEncoder, "encode_row", lambda *a, **k: tokenised.append(k["number"]) or encode(*a, **k))
    found = read_lane_states(tmp_path)
    assert found == states
    assert batch_hashes(loader(rows, tokenizer, packing=packing, resume=(found, done)), 20, {}) == uninterrupted[done:]
    if not packing:
        assert len(tokenised) < 50  # 20 are trained on, 1 is read ahead, about a third of the rows is dropped


def test_lane_states_without_every_rank_are_ignored(tmp_path: Path) -> None:
    write_lane_states(tmp_path, {}, rank=0, world_size=2)
    assert read_lane_states(tmp_path) is None
    write_lane_states(tmp_path, {}, rank=1, world_size=2)
    assert read_lane_states(tmp_path) == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_invalid_row_is_reported_from_a_worker_process_too(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n' * 20 + "{broken\n")
    states: LaneStates = {}
    batches = record_lane_states(loader(path, tokenizer, workers=workers), states)
    with pytest.raises(ToolkitError, match=r"rows.jsonl: row 21, line 21: malformed JSON") as caught:
        list(batches)
    assert caught.value.hint is not None
    assert "Traceback" not in str(caught.value)
    assert sum(state.taken for state in states.values()) == 16  # 4 of the 20 valid rows are still in the buffer


@pytest.mark.parametrize("packing", [False, True])
def test_workers_do_not_change_the_order(rows: Path, tokenizer: Any, packing: bool) -> None:
    alone = batch_hashes(loader(rows, tokenizer, packing=packing), 60, {})
    assert batch_hashes(loader(rows, tokenizer, packing=packing, workers=2), 60, {}) == alone
