"""Streamed rows: the same steps for any number of ranks, exact resuming, and where a wrong row is."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import ROOT, accelerate_launch, read, toolkit

from toolkit.errors import ToolkitError
from toolkit.runs.checkpoints import Checkpoint, check_goes_on
from toolkit.runs.pulses import read_pulses
from toolkit.runs.rows import check_rows_fill_a_step, check_streaming, without_streaming
from toolkit.train.batches import BATCH_FACTS, Collator, PackCollator
from toolkit.train.packing import OpenPacks
from toolkit.train.stream_loading import States, noting, read_lanes, share_of, stream_loader, write_lanes
from toolkit.train.stream_rows import RowStream, read_stream
from toolkit.train.streaming import LANE_GROUPS, Share, TokenStream
from toolkit.train.tokens import RowEncoder, row_encoder

EMPTY = 3  # every third row has an answer that is cut away
ROWS = 37


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows that tell themselves apart, of several lengths; some without anything to learn from."""
    path = tmp_path / "rows.jsonl"
    made = [
        {"prompt": f"number {n}" + " long" * (60 if n % EMPTY == 0 else 0), "completion": " word" * (n % 7 + 1)}
        for n in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def encoder(tokenizer: Any, rows: RowStream) -> RowEncoder:
    return row_encoder(
        tokenizer=tokenizer, data_format=rows.data_format, max_seq_length=32, loss_on=None, system_prompt=None
    )


def stream(path: Path, tokenizer: Any, training: Any, *, packing: bool = False) -> TokenStream:
    rows = read_stream(str(path), "train", buffer_size=8, seed=1)
    return TokenStream(rows, encoder(tokenizer, rows), share_of(training), packing=packing)


def rank(index: int, ranks: int, *, batch: int, micro_steps: int = 1, workers: int = 0) -> Any:
    """As much of the training arguments as a stream looks at."""
    return SimpleNamespace(
        process_index=index,
        world_size=ranks,
        train_batch_size=batch,
        gradient_accumulation_steps=micro_steps,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        dataloader_prefetch_factor=None,
    )


def steps_of(training: Any, path: Path, tokenizer: Any, *, steps: int, packing: bool) -> list[list[tuple[Any, ...]]]:
    """Tokens of each sequence of a rank's first steps."""
    sequences = iter(stream(path, tokenizer, training, packing=packing))
    a_step = training.train_batch_size * training.gradient_accumulation_steps
    return [[tuple(row["input_ids"]) for row in itertools.islice(sequences, a_step)] for _ in range(steps)]


# -- rows


def test_an_epoch_is_every_row_once_in_an_order_of_its_own(rows: Path) -> None:
    shuffled = read_stream(str(rows), "train", buffer_size=8, seed=1)
    first = [row.number for row in shuffled.epoch(0)]
    assert sorted(first) == list(range(ROWS))
    assert first != sorted(first)
    second = [row.number for row in shuffled.epoch(1)]
    assert sorted(second) == list(range(ROWS))
    assert second != first
    assert [row.number for row in read_stream(str(rows), "train", buffer_size=8, seed=1).epoch(0)] == first
    assert [row.number for row in read_stream(str(rows), "train", buffer_size=8, seed=2).epoch(0)] != first
    assert [row.number for row in read_stream(str(rows), "train", buffer_size=1, seed=1).epoch(0)] == list(range(ROWS))


def test_no_more_is_read_than_the_buffer_needs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "{broken\n")
    rows = read_stream(str(path), "train", buffer_size=4, seed=1).epoch(0)
    assert len(list(itertools.islice(rows, 18))) == 18
    with pytest.raises(ToolkitError, match=r"rows.jsonl: row 21, line 21: malformed JSON"):
        list(rows)


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_every_kind_of_file_is_streamed(suffix: str, tmp_path: Path) -> None:
    import pandas as pd

    table = pd.DataFrame({"text": [f"row {n}" for n in range(5)], "score": range(5)})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "json":
        path.write_text(table.to_json(orient="records"))
    else:
        table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    found = list(read_stream(str(path), "train", buffer_size=1, seed=1).epoch(0))
    assert [row.fields["text"] for row in found] == [f"row {n}" for n in range(5)]


def test_rows_of_the_hub_are_streamed_without_numbers(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    import datasets

    made = datasets.Dataset.from_list([{"text": f"row {n}", "id": n} for n in range(6)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made.to_iterable_dataset(num_shards=2))
    found = read_stream("owner/name", "train", buffer_size=1, seed=1)
    found_row = min(found.epoch(0), key=lambda row: row.fields["id"])
    assert sorted(row.fields["text"] for row in found.epoch(0)) == [f"row {n}" for n in range(6)]
    share = Share(rank=0, world_size=1, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    sequence = next(iter(TokenStream(found, encoder(tokenizer, found), share, packing=True)))
    assert sequence["rows"] == []
    assert found_row.where("owner/name") == "owner/name: the row that begins {'text': 'row 0', 'id': 0}"


# -- lanes


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_for_any_number_of_ranks(rows: Path, tokenizer: Any, packing: bool) -> None:
    asked = {"path": rows, "tokenizer": tokenizer, "steps": 12, "packing": packing}
    one = steps_of(rank(0, 1, batch=4), **asked)
    two = [steps_of(rank(index, 2, batch=2), **asked) for index in range(2)]
    accumulated = [steps_of(rank(index, 2, batch=1, micro_steps=2), **asked) for index in range(2)]
    for step in range(12):
        assert one[step] == two[0][step] + two[1][step]
        assert sorted(one[step]) == sorted(accumulated[0][step] + accumulated[1][step])
    assert len({sequence for step in one for sequence in step}) > 12


def test_lanes_are_shared_out_as_batches_are_where_nothing_is_streamed() -> None:
    share = share_of(rank(1, 2, batch=2, micro_steps=2))
    assert [share.lanes(batch) for batch in range(4)] == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert share.lanes(2 * LANE_GROUPS) == [2, 3]


def test_without_dropped_rows_a_step_trains_on_the_next_rows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(100)))
    order = [row.number for row in read_stream(str(path), "train", buffer_size=8, seed=1).epoch(0)]
    found = itertools.islice(stream(path, tokenizer, rank(0, 1, batch=4)), 100)
    assert [row["row"] for row in found] == order


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_with_something_to_learn_is_trained_on_and_no_other(
    rows: Path, tokenizer: Any, packing: bool
) -> None:
    found = itertools.islice(stream(rows, tokenizer, rank(0, 1, batch=1), packing=packing), 6 * ROWS)
    numbers = [number for row in found for number in (row["rows"] if packing else [row["row"]])]
    assert set(numbers) == {number for number in range(ROWS) if number % EMPTY}


def test_a_stream_of_nothing_to_learn_ends(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 60, "completion": "word"}) + "\n")
    with pytest.raises(ToolkitError, match="no supervised token in 10 rows behind each other"):
        list(noting(loader(path, tokenizer, micro_steps=1), {}))


def test_fewer_rows_than_a_global_batch_are_refused(rows: Path, tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match=r"rows.jsonl has 37 rows, fewer than one global batch of 64 sequences"):
        list(noting(loader(rows, tokenizer, micro_steps=64), {}))


def loader(
    path: Path,
    tokenizer: Any,
    *,
    workers: int = 0,
    packing: bool = False,
    micro_steps: int = 2,
    go_on: tuple[States, int] | None = None,
) -> Any:
    """Batches of one sequence, as the Trainer gets them; it skips those that a checkpoint has."""
    training = rank(0, 1, batch=1, micro_steps=micro_steps, workers=workers)
    sequences = stream(path, tokenizer, training, packing=packing)
    if go_on is not None:
        sequences.go_on(go_on[0], batches=go_on[1])
    collator = PackCollator(tokenizer) if packing else Collator(tokenizer)
    batches = stream_loader(sequences, collator, training, torch.device("cpu"))
    batches.skip_batches = 0 if go_on is None else go_on[1]
    return iter(batches)


# -- resuming


def hashes(batches: Any, number: int, states: States) -> list[str]:
    return [batch[BATCH_FACTS].sha256 for batch in itertools.islice(noting(batches, states), number)]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stops", [[2], [14], [70, 6]])
def test_a_stream_goes_on_where_it_stood_and_tokenises_nothing_twice(
    rows: Path, tokenizer: Any, tmp_path: Path, packing: bool, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hashes(loader(rows, tokenizer, packing=packing), sum(stops) + 20, {})
    states: States = {}
    done = 0
    for stop in stops:  # stopped once more, a run writes the lanes that it has not come to as it found them
        hashes(loader(rows, tokenizer, packing=packing, go_on=(dict(states), done) if done else None), stop, states)
        done += stop
    write_lanes(tmp_path, states, rank=0, world_size=1)
    tokenised = []
    encode = RowEncoder.encode_row
    monkeypatch.setattr(RowEncoder, "encode_row", lambda *a, **k: tokenised.append(k["number"]) or encode(*a, **k))
    found = read_lanes(tmp_path)
    assert found == states
    assert hashes(loader(rows, tokenizer, packing=packing, go_on=(found, done)), 20, {}) == whole[done:]
    if not packing:
        assert len(tokenised) < 50  # 20 are trained on, 1 is read ahead, about a third of the rows is dropped


def test_lanes_of_a_missing_rank_are_not_believed(tmp_path: Path) -> None:
    write_lanes(tmp_path, {}, rank=0, world_size=2)
    assert read_lanes(tmp_path) is None
    write_lanes(tmp_path, {}, rank=1, world_size=2)
    assert read_lanes(tmp_path) == {}


@pytest.mark.parametrize(
    ("then", "now", "hint"),
    [
        (8, 16, "`--streaming true --streaming_buffer_size 8`"),
        (8, 0, "buffer_size 8`"),
        (0, 8, "leave `--streaming` out"),
    ],
)
def test_another_buffer_would_not_go_on_with_the_same_rows(then: int, now: int, hint: str, tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "seed": 42, "max_steps": 9}
    checkpoint = Checkpoint(path=tmp_path, step=3, manifest={"streaming_buffer_size": then})
    with pytest.raises(ToolkitError, match="the data would not go on") as caught:
        check_goes_on(checkpoint, **asked, streaming_buffer_size=now)
    assert str(caught.value.hint).endswith(hint)
    check_goes_on(checkpoint, **asked, streaming_buffer_size=then)


def test_open_packs_fill_up_and_never_overflow() -> None:
    packs = OpenPacks(max_tokens=7, at_most=2)
    given = [packs.add({"input_ids": [0] * tokens, "row": n}) for n, tokens in enumerate([3, 5, 2, 4, 6, 6, 6])]
    numbers = [None if pack is None else [row["row"] for row in pack] for pack in given]
    assert numbers == [None, None, [1, 2], [0, 3], None, None, [4]]


# -- errors


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_row_comes_as_itself_from_a_worker_process_too(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n' * 20 + "{broken\n")
    states: States = {}
    batches = noting(loader(path, tokenizer, workers=workers), states)
    with pytest.raises(ToolkitError, match=r"rows.jsonl: row 21, line 21: malformed JSON") as caught:
        list(batches)
    assert caught.value.hint is not None
    assert "Traceback" not in str(caught.value)
    assert sum(state.taken for state in states.values()) == 16  # 4 of the 20 sound rows are still in the buffer


@pytest.mark.parametrize("packing", [False, True])
def test_workers_do_not_change_the_order(rows: Path, tokenizer: Any, packing: bool) -> None:
    alone = hashes(loader(rows, tokenizer, packing=packing), 60, {})
    assert hashes(loader(rows, tokenizer, packing=packing, workers=2), 60, {}) == alone


def test_an_error_keeps_its_hint_between_processes() -> None:
    again = pickle.loads(pickle.dumps(ToolkitError("what", hint="next")))
    assert (again.message, again.hint) == ("what", "next")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--streaming needs --max_steps"),
        ({"max_steps": "5", "val_size": "0.1"}, "--val_size with --streaming"),
        ({"max_steps": "5", "train_sampling_strategy": "group_by_length"}, "group_by_length with --streaming"),
        ({"max_steps": "5", "dataloader_num_workers": "3"}, "is 3, and a stream is shared out among 0, 1, 2, 4 or 8"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_streaming({"streaming": "true", **given})
    check_streaming(given)


def test_switches_without_effect_are_named() -> None:
    assert without_streaming({"streaming_buffer_size": "5"}) == [
        "--streaming_buffer_size has no effect without --streaming"
    ]
    assert "`--dataloader_num_workers` has" in without_streaming({"streaming": True, "preprocessing_num_workers": 2})[0]
    assert without_streaming({"streaming": True, "streaming_buffer_size": "5"}) == []


def test_too_few_rows_are_too_few_packs() -> None:
    check_rows_fill_a_step(4, 4, "rows.jsonl", packing=True)
    with pytest.raises(ToolkitError, match="has 3 rows, which make no more packs than that, fewer than one global"):
        check_rows_fill_a_step(3, 4, "rows.jsonl", packing=True)


# -- real runs on two ranks


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_sharegpt: Path) -> list[str]:
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("\n".join(faq_sharegpt.read_text().splitlines()[:60]) + "\n")
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "256"]
    words += [
        "--streaming",
        "true",
        "--streaming_buffer_size",
        "16",
        "--packing",
        "true",
        "--system_prompt",
        "Be brief.",
    ]
    words += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--max_steps", "5"]
    words += ["--system_prompt", "Be brief."]
    return [*words, "--lora_r", "4", "--lora_dropout", "0.1", "--save_model", "false"]


def trained(preset: str, output: Path, words: list[str]) -> dict[str, list[Any]]:
    """What each step trained on and what came of it, by key, rank 0 first."""
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *words, "--output_dir", str(output))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    files = [output / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {key: [row[key] for row in found] for key in ("step", "loss", "grad_norm", "batch_sha256")}


@pytest.mark.launch
def test_a_streamed_run_is_the_same_under_another_preset_and_when_it_is_resumed(
    job: list[str], tmp_path: Path, faq_alpaca: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(faq_alpaca.read_text().splitlines()[60:70]) + "\n")
    steps = ["--save_steps", "3", "--eval_dataset", str(held_out), "--dataloader_num_workers", "2"]
    whole = trained("ddp", tmp_path / "whole", [*job, *steps])
    assert whole["step"] == [1, 2, 3, 4, 5] * 2
    assert len(set(whole["batch_sha256"])) == 10
    run = read(tmp_path / "whole" / "run.json")
    assert (run["data"]["streamed"], run["data"]["rows"], run["data"]["packs"]) == (True, 60, None)
    assert [row["step"] for row in run["evaluations"]] == [5]

    other = trained("zero3", tmp_path / "zero3", [*job, "--save_strategy", "no"])
    assert other["batch_sha256"] == whole["batch_sha256"]
    assert other["loss"] == pytest.approx(whole["loss"], abs=1e-4)

    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert read(checkpoint / "manifest.json")["streaming_buffer_size"] == 16
    resume = ["--resume_from_checkpoint", str(checkpoint), "--save_strategy", "no"]
    resumed = trained("ddp", tmp_path / "resumed", [*job, *resume])
    assert resumed["step"] == [4, 5] * 2
    for key in ("loss", "grad_norm", "batch_sha256"):
        assert resumed[key] == whole[key][3:5] + whole[key][8:10]


@pytest.mark.launch
def test_a_malformed_row_deep_in_a_stream_ends_both_ranks_and_the_mended_file_goes_on_in_one(
    tmp_path: Path, tiny_model: Path, tokenizer: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    unread = "x" * 2**18  # a field of no format, so that `toolkit train` looks at the first 128 rows only
    sound = [json.dumps({"text": f"row number {n}", "unread": unread}) + "\n" for n in range(134)]
    rows.write_text("".join(sound) + '{"text": 135, "unread": ""}\n')
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")]
    words += ["--streaming", "true", "--streaming_buffer_size", "4", "--per_device_train_batch_size", "4"]
    words += ["--max_steps", "18", "--save_steps", "8", "--save_model", "false"]
    command = ["train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *words]
    ended = toolkit(*command)
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert "Traceback" not in ended.stdout + ended.stderr
    message = f"{rows}: row 135, line 135: `text` is number, expected a string"
    assert message in ended.stderr
    failure = read(tmp_path / "out" / "failure.json")
    assert (failure["kind"], failure["wrong_input"], failure["phase"]) == ("failed", True, "data")
    assert failure["message"] == message
    assert "`--resume_from_checkpoint latest`" in failure["hint"]
    assert read(tmp_path / "out" / "run.json")["status"] == "failed"
    assert [pulse for pulse in read_pulses(tmp_path / "out" / "ranks") if pulse.process is not None] == []

    rows.write_text("".join(sound) + '{"text": "row number 134", "unread": ""}\n')
    single = ["train", "--preset", "single", "--num-processes", "1", "--cpu", "--", *words]
    ended = toolkit(*single, "--per_device_train_batch_size", "8", "--resume_from_checkpoint", "latest")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert read(tmp_path / "out" / "run.json")["resumed_from"]["step"] == 16
    steps = [json.loads(line) for line in (tmp_path / "out" / "ranks" / "rank0.jsonl").read_text().splitlines()]
    stream = read_stream(str(rows), "train", buffer_size=4, seed=42)
    encode = row_encoder(tokenizer=tokenizer, data_format="text", max_seq_length=1024, loss_on=None, system_prompt=None)
    training = rank(0, 1, batch=8)
    whole = stream_loader(TokenStream(stream, encode, share_of(training)), Collator(tokenizer), training, "cpu")
    expected = [sha256[:16] for sha256 in hashes(iter(whole), 18, {})]
    assert [row["batch_sha256"] for row in steps if row["step"] > 16] == expected[16:]
