"""Streams of rows and tokens: order, lanes, the same steps for any number of ranks, and exact resuming."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.observe.batches import BATCH_FACTS, ObservedCollator
from toolkit.train.data import streaming
from toolkit.train.data.collation import Collator, PackCollator
from toolkit.train.data.streaming import LaneStates, MixedRows, RowStream, TokenStream, open_stream
from toolkit.train.data.tokenization import RowEncoder, row_encoder

TRUNCATED_EVERY = 3  # the answer of every third row is truncated away
ROWS = 37


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Distinct rows of several lengths, every third without a supervised token after truncation."""
    made = [
        {"prompt": f"number {n}{' long' * 60 * (n % TRUNCATED_EVERY == 0)}", "completion": " word" * (n % 7 + 1)}
        for n in range(ROWS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return tmp_path / "rows.jsonl"


def encoder(tokenizer: Any, rows: RowStream) -> RowEncoder:
    return row_encoder(tokenizer, rows.data_format, DataArguments(max_seq_length=32))


def token_stream(path: Path, tokenizer: Any, training: Any, *, packing: bool = False) -> TokenStream:
    rows = open_stream(str(path), "train", buffer_size=8, seed=1)
    return TokenStream(MixedRows(streams=(rows,)), [encoder(tokenizer, rows)], training, packing=packing)


def rank_arguments(index: int, ranks: int, *, batch: int, accumulation: int = 1, workers: int = 0) -> Any:
    loading = {"dataloader_num_workers": workers, "dataloader_pin_memory": False, "dataloader_prefetch_factor": None}
    rank = {"process_index": index, "world_size": ranks, "train_batch_size": batch}
    return SimpleNamespace(**rank, gradient_accumulation_steps=accumulation, **loading)


def batch_hashes(batches: Any, number: int, states: LaneStates) -> list[str]:
    return [
        batch[BATCH_FACTS].sha256 for batch in itertools.islice(streaming.record_lane_states(batches, states), number)
    ]


def test_an_epoch_has_every_row_once_in_its_own_order(rows: Path) -> None:
    def order(epoch: int = 0, *, buffer_size: int = 8, seed: int = 1) -> list[int | None]:
        stream = open_stream(str(rows), "train", buffer_size=buffer_size, seed=seed)
        return [row.number for row in stream.epoch(epoch)]

    first = order()
    assert sorted(first, key=int) == sorted(order(1), key=int) == order(buffer_size=1) == list(range(ROWS))  # type: ignore[arg-type]
    assert order() == first
    assert list(range(ROWS)) != first
    assert first not in (order(1), order(seed=2))


def test_hub_rows_are_streamed_without_indices(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    made = datasets.Dataset.from_list([{"text": f"row {n}"} for n in range(6)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made.to_iterable_dataset(num_shards=2))
    stream = open_stream("owner/name", "train", buffer_size=1, seed=1)
    places = sorted(row.place_in("owner/name") for row in stream.epoch(0))
    assert places == [f"owner/name: the row that begins with {{'text': 'row {n}'}}" for n in range(6)]
    training, mixed = rank_arguments(0, 1, batch=1), MixedRows(streams=(stream,))
    assert next(iter(TokenStream(mixed, [encoder(tokenizer, stream)], training, packing=True)))["rows"] == []


def steps_of(training: Any, path: Path, tokenizer: Any, *, steps: int, packing: bool) -> list[list[tuple[Any, ...]]]:
    sequences = iter(token_stream(path, tokenizer, training, packing=packing))
    a_step = training.train_batch_size * training.gradient_accumulation_steps
    return [[tuple(row["input_ids"]) for row in itertools.islice(sequences, a_step)] for _ in range(steps)]


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_for_any_number_of_ranks(rows: Path, tokenizer: Any, packing: bool) -> None:
    options = {"path": rows, "tokenizer": tokenizer, "steps": 12, "packing": packing}
    one = steps_of(rank_arguments(0, 1, batch=4), **options)
    two = [steps_of(rank_arguments(index, 2, batch=2), **options) for index in range(2)]
    accumulated = [steps_of(rank_arguments(index, 2, batch=1, accumulation=2), **options) for index in range(2)]
    for step in range(12):
        assert one[step] == two[0][step] + two[1][step]
        assert sorted(one[step]) == sorted(accumulated[0][step] + accumulated[1][step])
    assert len({sequence for step in one for sequence in step}) > 12


@pytest.mark.parametrize("packing", [False, True])
def test_only_rows_with_a_supervised_token_are_trained_on(rows: Path, tokenizer: Any, packing: bool) -> None:
    found = itertools.islice(token_stream(rows, tokenizer, rank_arguments(0, 1, batch=1), packing=packing), 6 * ROWS)
    numbers = [number for row in found for number in (row["rows"] if packing else [row["row"]])]
    assert set(numbers) == {number for number in range(ROWS) if number % TRUNCATED_EVERY}


def loader(
    path: Path, tokenizer: Any, *, workers: int = 0, packing: bool = False, accumulation: int = 2, resume: Any = None
) -> Any:
    """Batches of one sequence, as the Trainer iterates them; `resume` is a checkpoint's lanes and its batches."""
    training = rank_arguments(0, 1, batch=1, accumulation=accumulation, workers=workers)
    sequences = token_stream(path, tokenizer, training, packing=packing)
    if resume is not None:
        sequences.resume(resume[0], batches=resume[1])
    collator = ObservedCollator(PackCollator(tokenizer) if packing else Collator(tokenizer))
    batches = streaming.stream_loader(sequences, collator, training, torch.device("cpu"))
    batches.skip_batches = 0 if resume is None else resume[1]
    return iter(batches)


TOO_FEW = r"rows.jsonl has 1 row, fewer than one global batch of 2 sequences"


@pytest.mark.parametrize(("accumulation", "message"), [(1, "no supervised token in 10 consecutive rows"), (2, TOO_FEW)])
def test_a_stream_that_cannot_fill_a_step_ends(tmp_path: Path, tokenizer: Any, accumulation: int, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 60, "completion": "word"}) + "\n")
    with pytest.raises(ToolkitError, match=message):
        list(streaming.record_lane_states(loader(path, tokenizer, accumulation=accumulation), {}))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stops", [[2], [70, 6]])
def test_a_stream_resumes_exactly_and_tokenises_nothing_twice(
    rows: Path, tokenizer: Any, tmp_path: Path, packing: bool, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = batch_hashes(loader(rows, tokenizer, packing=packing), sum(stops) + 20, {})
    states: LaneStates = {}
    done = 0
    for stop in stops:  # a run that is stopped again records lanes that it did not reach as it found them
        resume = (dict(states), done) if done else None
        batch_hashes(loader(rows, tokenizer, packing=packing, resume=resume), stop, states)
        done += stop
    streaming.write_lane_states(tmp_path, states, rank=0, world_size=1)
    tokenised = []
    encode = RowEncoder.encode_row
    monkeypatch.setattr(RowEncoder, "encode_row", lambda *a, **k: tokenised.append(k["number"]) or encode(*a, **k))
    found = streaming.read_lane_states(tmp_path)
    assert found == states
    assert batch_hashes(loader(rows, tokenizer, packing=packing, resume=(found, done)), 20, {}) == uninterrupted[done:]
    if not packing:
        assert len(tokenised) < 50  # 20 are trained on, 1 is read ahead, about a third of the rows is dropped


@pytest.mark.parametrize("workers", [0, 1])
def test_an_invalid_row_is_reported_from_a_worker_process_too(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n' * 20 + "{broken\n")
    states: LaneStates = {}
    batches = streaming.record_lane_states(loader(path, tokenizer, workers=workers), states)
    with pytest.raises(ToolkitError, match=r"rows.jsonl: row 21, line 21: malformed JSON") as caught:
        list(batches)
    assert caught.value.hint is not None
    assert "Traceback" not in str(caught.value)
    assert sum(state.taken for state in states.values()) == 16  # 4 of the 20 valid rows are still in the buffer


@pytest.mark.parametrize("packing", [False, True])
def test_workers_do_not_change_the_order(rows: Path, tokenizer: Any, packing: bool) -> None:
    alone = batch_hashes(loader(rows, tokenizer, packing=packing), 60, {})
    assert batch_hashes(loader(rows, tokenizer, packing=packing, workers=2), 60, {}) == alone
