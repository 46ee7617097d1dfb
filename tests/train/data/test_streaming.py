"""Streams of rows and tokens: order, lanes, and the same steps for any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from token_streams import ROWS, TRUNCATED_EVERY, encoder, rank_arguments, token_stream, write_rows

from toolkit.errors import ToolkitError
from toolkit.train.data.stream_loader import batch_share
from toolkit.train.data.streaming import LANE_GROUPS, BatchShare, TokenStream, open_stream


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def test_an_epoch_has_every_row_once_in_its_own_order(rows: Path) -> None:
    shuffled = open_stream(str(rows), "train", buffer_size=8, seed=1)
    first = [row.number for row in shuffled.epoch(0)]
    assert sorted(first) == list(range(ROWS))
    assert first != sorted(first)
    second = [row.number for row in shuffled.epoch(1)]
    assert sorted(second) == list(range(ROWS))
    assert second != first
    assert [row.number for row in open_stream(str(rows), "train", buffer_size=8, seed=1).epoch(0)] == first
    assert [row.number for row in open_stream(str(rows), "train", buffer_size=8, seed=2).epoch(0)] != first
    assert [row.number for row in open_stream(str(rows), "train", buffer_size=1, seed=1).epoch(0)] == list(range(ROWS))


def test_only_the_buffer_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "{broken\n")
    rows = open_stream(str(path), "train", buffer_size=4, seed=1).epoch(0)
    assert len(list(itertools.islice(rows, 18))) == 18
    with pytest.raises(ToolkitError, match=r"rows.jsonl: row 21, line 21: malformed JSON"):
        list(rows)


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_every_file_format_is_streamed(suffix: str, tmp_path: Path) -> None:
    import pandas as pd

    table = pd.DataFrame({"text": [f"row {n}" for n in range(5)], "score": range(5)})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "json":
        path.write_text(table.to_json(orient="records"))
    else:
        table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    found = list(open_stream(str(path), "train", buffer_size=1, seed=1).epoch(0))
    assert [row.fields["text"] for row in found] == [f"row {n}" for n in range(5)]


def test_hub_rows_are_streamed_without_indices(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    import datasets

    made = datasets.Dataset.from_list([{"text": f"row {n}", "id": n} for n in range(6)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made.to_iterable_dataset(num_shards=2))
    found = open_stream("owner/name", "train", buffer_size=1, seed=1)
    found_row = min(found.epoch(0), key=lambda row: row.fields["id"])
    assert sorted(row.fields["text"] for row in found.epoch(0)) == [f"row {n}" for n in range(6)]
    share = BatchShare(rank=0, world_size=1, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    sequence = next(iter(TokenStream(found, [encoder(tokenizer, found)], share, packing=True)))
    assert sequence["rows"] == []
    assert found_row.place_in("owner/name") == "owner/name: the row that begins with {'text': 'row 0', 'id': 0}"


def steps_of(training: Any, path: Path, tokenizer: Any, *, steps: int, packing: bool) -> list[list[tuple[Any, ...]]]:
    """Tokens of each sequence of a rank's first steps."""
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


def test_lanes_are_assigned_like_batches_of_a_data_set() -> None:
    share = batch_share(rank_arguments(1, 2, batch=2, accumulation=2))
    assert [share.lanes(batch) for batch in range(4)] == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert share.lanes(2 * LANE_GROUPS) == [2, 3]


def test_without_dropped_rows_a_step_trains_on_the_next_rows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(100)))
    order = [row.number for row in open_stream(str(path), "train", buffer_size=8, seed=1).epoch(0)]
    found = itertools.islice(token_stream(path, tokenizer, rank_arguments(0, 1, batch=4)), 100)
    assert [row["row"] for row in found] == order


@pytest.mark.parametrize("packing", [False, True])
def test_only_rows_with_a_supervised_token_are_trained_on(rows: Path, tokenizer: Any, packing: bool) -> None:
    found = itertools.islice(token_stream(rows, tokenizer, rank_arguments(0, 1, batch=1), packing=packing), 6 * ROWS)
    numbers = [number for row in found for number in (row["rows"] if packing else [row["row"]])]
    assert set(numbers) == {number for number in range(ROWS) if number % TRUNCATED_EVERY}
