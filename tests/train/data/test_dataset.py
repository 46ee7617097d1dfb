"""Training data from several data sets: weights, held-out rows, packing and streams."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from toolkit.data.formats import read_columns
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.record.folder import RunFolder
from toolkit.train.data.data_report import preflight_lines
from toolkit.train.data.dataset import Data, load_data, row_places
from toolkit.train.data.streaming import MixedRows, open_stream

Load = Callable[..., Data]


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path) -> Load:
    def load_arguments(
        *names: Path, training: dict[str, Any] | None = None, data_parallel_size: int | None = None, **given: Any
    ) -> Data:
        (tmp_path / "run").mkdir(exist_ok=True)
        options = {"per_device_train_batch_size": 1, "use_cpu": True, "report_to": [], **(training or {})}
        arguments = TrainingArguments(str(tmp_path / "run"), **options)
        data = DataArguments(dataset=tuple(map(str, names)), max_seq_length=64, **given)
        return load_data(tokenizer, data, arguments, data_parallel_size=data_parallel_size)

    return load_arguments


def written(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """6 conversations; each answer is its number."""
    return written(tmp_path / "chats.jsonl", ({"instruction": "Count.", "output": f"chat {n}"} for n in range(6)))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """10 texts, and one that is empty, which has no supervised token."""
    return written(tmp_path / "texts.jsonl", ({"text": f"text {n}" if n else ""} for n in range(11)))


def test_packs_must_fill_a_step_of_all_groups_of_ranks(load: Load, chats: Path) -> None:
    packs = len(load(chats, packing=True).train)
    assert len(load(chats, packing=True, data_parallel_size=packs).train) == packs
    with pytest.raises(ToolkitError, match=f"make {packs} packs, fewer than one global batch of {packs + 1} sequences"):
        load(chats, packing=True, data_parallel_size=packs + 1)


def sources_of(data: Data, tokenizer: Any) -> Counter[str]:
    """How often each text is in an epoch, by what its supervised part says."""
    labels = ([label for label in row["labels"] if label != -100] for row in data.train)
    return Counter(tokenizer.decode(each, skip_special_tokens=True).strip() for each in labels)


def test_without_weights_an_epoch_has_every_row_of_all(load: Load, chats: Path, texts: Path, tokenizer: Any) -> None:
    data = load(chats, texts)
    expected = [f"chat {number}" for number in range(6)] + [f"text {number}" for number in range(1, 11)]
    assert sources_of(data, tokenizer) == Counter(expected)
    stats = data.stats
    assert (stats.format, stats.rows, stats.dropped_rows, stats.epoch_rows) == ("alpaca, text", 17, 1, 16)


def test_weights_divide_an_epoch_by_file(load: Load, chats: Path, texts: Path, tokenizer: Any, tmp_path: Path) -> None:
    data = load(chats, texts, dataset_weights=[3.0, 2.0])  # 10 texts are two fifths of 25 rows
    recorded = RunFolder(tmp_path / "run").read_run()
    found = sources_of(data, tokenizer)
    assert {found[f"text {number}"] for number in range(1, 11)} == {1}
    assert sorted(found[f"chat {number}"] for number in range(6)) == [2, 2, 2, 3, 3, 3]
    assert sources_of(load(chats, texts, dataset_weights=[0.6, 0.4]), tokenizer) == found
    other = load(chats, texts, dataset_weights=[3.0, 2.0], training={"data_seed": 5})
    assert sources_of(other, tokenizer) != found

    assert recorded["data"]["sources"] == [asdict(source) for source in data.stats.sources]
    chat, text = data.stats.sources
    assert (chat.name, chat.format, chat.weight, chat.rows, chat.epoch_rows) == (str(chats), "alpaca", 0.6, 6, 15)
    assert (text.epoch_rows, text.dropped_rows) == (10, 1)
    # "text N" and its end: 3 tokens, and 4 for "text 10"; the first is not predicted
    assert (text.tokens, text.supervised_tokens) == (sum(data.train["length"][15:]), text.tokens - 10)
    assert chat.tokens + text.tokens == data.stats.tokens == sum(data.train["length"][:])
    assert data.stats.epoch_rows == len(data.train) == 25
    line = f"    {chats}: alpaca, 6 rows; 60.0% of an epoch: 15 rows, each 2.50 times, {chat.tokens} tokens"
    assert line in preflight_lines(data.stats)


def test_held_out_rows_are_never_trained_on(load: Load, chats: Path, texts: Path, tokenizer: Any) -> None:
    data = load(chats, texts, dataset_weights=[3.0, 2.0], val_size=5)
    rows = [data.evaluation[index] for index in range(data.evaluation_stats.rows - data.evaluation_stats.dropped_rows)]
    evaluated = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows}
    trained = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in data.train}
    assert (data.evaluation_stats.rows, data.evaluation_stats.format) == (5, "alpaca, text")
    assert data.stats.rows == 12
    assert len(evaluated) + len(trained) == 16
    assert not trained & evaluated


def test_a_file_that_loses_every_row_is_named(load: Load, chats: Path, tmp_path: Path) -> None:
    single = tmp_path / "single.jsonl"
    single.write_text('{"text": "alone"}\n')
    with pytest.raises(ToolkitError, match=r"--val_size 6.0 holds out every row of .*single.jsonl"):
        load(chats, single, val_size=6.0)
    single.write_text('{"text": ""}\n')
    with pytest.raises(ToolkitError, match=r"single.jsonl: no supervised token in any of the 1 rows"):
        load(chats, single)


def test_a_row_of_several_files_is_found_again(load: Load, chats: Path, texts: Path) -> None:
    data = load(chats, texts)
    last_of_each = data.train["row"][5], data.train["row"][15]
    places = [f"{chats}: row 6, line 6", f"{texts}: row 11, line 11"]
    assert row_places(last_of_each, [str(chats), str(texts)]) == {"rows": [6, 11], "places": places}
    assert row_places((3, 1), [str(chats)]) == {"rows": [2, 4], "places": ["row 2, line 2", "row 4, line 4"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_files_and_of_a_hub_data_set_are_renamed(
    load: Load, chats: Path, tokenizer: Any, tmp_path: Path, streaming: bool
) -> None:
    asked = written(tmp_path / "asked.jsonl", ({"q": "Count.", "a": f"file {n}"} for n in range(3)))
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    rows = [{"q": "Count.", "answers": {"text": [f"hub {n}"]}} for n in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"streaming": streaming, "training": {"max_steps": 5}}

    def answers(*names: Path, **column: str) -> set[str]:
        data = load(*names, column=column, **how)
        return set(sources_of(replace(data, train=islice(data.train, 60)), tokenizer))

    numbers = {word: {f"{word} {n}" for n in range(6 if word == "chat" else 3)} for word in ("chat", "file", "hub")}
    assert answers(chats, asked, instruction="q", output="a") == numbers["chat"] | numbers["file"]
    assert answers(folder, instruction="q", output="answers.text.0") == numbers["hub"]
    for words in ("output=answers.txt", "output=answers.text.0 input=contxt"):
        column = read_columns(["instruction=q", *words.split()])
        with pytest.raises(ToolkitError, match=f"--column {words.split()[-1]}: the rows have no such column"):
            load(folder, column=column, **how)


def mixed(*paths: Path, weights: tuple[float, ...] | None) -> MixedRows:
    streams = tuple(open_stream(str(path), "train", buffer_size=4, seed=1) for path in paths)
    return MixedRows(streams=streams, weights=weights)


def test_a_weighted_stream_draws_each_row_until_every_file_was_read(chats: Path, texts: Path) -> None:
    plain = list(mixed(chats, texts, weights=None).epoch(0))  # one file after the other
    assert [row.source for row in plain] == [0] * 6 + [1] * 11
    assert {row.number for row in plain} == {*range(0, 12, 2), *range(1, 22, 2)}
    rows = mixed(chats, texts, weights=(3.0, 1.0))
    epochs = [[(row.source, row.number) for row in rows.epoch(number)] for number in range(40)]
    assert epochs[0] == [(row.source, row.number) for row in mixed(chats, texts, weights=(3.0, 1.0)).epoch(0)]
    assert epochs[0] != epochs[1]
    assert all(len(set(epoch)) == 17 for epoch in epochs)
    drawn = [source for epoch in epochs for source, _ in epoch]
    assert drawn.count(0) / len(drawn) == pytest.approx(0.75, abs=0.03)  # 4 standard deviations of 1,800 draws
    repeats = [number for source, number in epochs[0] if source == 0]
    assert repeats[:6] != repeats[6:12]
    assert sorted(repeats[:6]) == sorted(repeats[6:12])


def test_streamed_rows_are_encoded_in_their_files_format(load: Load, chats: Path, texts: Path, tokenizer: Any) -> None:
    data = load(chats, texts, dataset_weights=[1.0, 1.0], streaming=True, training={"max_steps": 5})
    shown = [tokenizer.decode(row["input_ids"]) for row in islice(data.train, 60)]
    assert {text.split()[0] for text in shown} == {"<|im_start|>system", "text"}
    found = [(source.rows, source.epoch_rows, source.weight) for source in data.stats.sources]
    assert found == [(6, None, 0.5), (11, None, 0.5)]
    assert (data.stats.streamed, data.stats.epoch_rows, data.stats.rows) == (True, None, 17)
