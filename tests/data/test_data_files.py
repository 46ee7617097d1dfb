"""Data files are read and checked; errors name the file, the row and the line."""

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from dataset_folders import write_dataset_folder
from pyarrow import parquet

from toolkit.data import text_files
from toolkit.data.data_files import (
    DataSource,
    FileCheck,
    check_columns,
    check_file,
    fractions,
    is_hub_id,
    iter_rows,
    numbered,
    repeated_rows,
    resolve_source,
    resolve_sources,
    row_and_source,
    rows_per_epoch,
)
from toolkit.errors import OverLimit, ToolkitError
from toolkit.units import MIB

Write = Callable[[str, str | bytes], Path]
ROWS = [{"text": "first"}, {"text": "second\nline"}, {"text": "üåß"}]
AS_LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


# -- sources


def test_a_source_is_a_file_that_exists_or_a_hub_id(write: Write) -> None:
    path = write("rows.jsonl", AS_LINES)
    assert resolve_source(str(path)) == DataSource(kind="file", name=str(path), path=path)
    assert resolve_source("owner/name") == DataSource(kind="hub", name="owner/name")
    assert [name for name in ("a/b_c", "data/train.jsonl", "/data/train", "train") if is_hub_id(name)] == ["a/b_c"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{folder}/trian.jsonl",
            "no such data file: {folder}/trian.jsonl\n  hint: did you mean `{folder}/train.jsonl`?",
        ),
        ("{folder}/rows.txt", "unsupported data file\n  hint: supported suffixes: .json, .jsonl, .csv, .parquet"),
        ("{folder}", "is a folder, expected a data file\n  hint: it holds: train.jsonl"),
        ("~nobody/rows.json", "no such data file"),
        ("a" * 5000, "is not one that a file can have"),
        ("https://example.org/rows.json", "no such data file"),
        ("squad", "no such data file: squad\n  hint: give a path to a file, or a hub id like `owner/name`"),
    ],
)
def test_a_source_that_names_no_data_is_refused(source: str, message: str, write: Write) -> None:
    folder = write("train.jsonl", AS_LINES).parent
    write("rows.txt", "hello")
    with pytest.raises(ToolkitError) as refused:
        resolve_source(source.format(folder=folder))
    assert message.format(folder=folder) in str(refused.value)


# -- reading


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", AS_LINES, ["row 1, line 1", "row 2, line 2", "row 3, line 3"]),
        ("blank_lines.jsonl", AS_LINES.replace("\n", "\n\n"), ["row 1, line 1", "row 2, line 3", "row 3, line 5"]),
        ("bom.jsonl", "\ufeff" + AS_LINES, ["row 1, line 1", "row 2, line 2", "row 3, line 3"]),
        ("list.json", json.dumps(ROWS), ["row 1, line 1", "row 2, line 1", "row 3, line 1"]),
        ("indented.json", "\ufeff" + json.dumps(ROWS, indent=1), ["row 1, line 2", "row 2, line 5", "row 3, line 8"]),
        ("lines.json", AS_LINES, ["row 1, line 1", "row 2, line 2", "row 3, line 3"]),
        ("wrapped.json", json.dumps({"version": 2, "data": ROWS}), ["row 1", "row 2", "row 3"]),
        ("wrapped_indented.json", json.dumps({"data": ROWS}, indent=2), ["row 1", "row 2", "row 3"]),
        ("a.csv", 'text\nfirst\n\n"second\nline"\nüåß\n', ["row 1, line 2", "row 2, line 4", "row 3, line 6"]),
        ("b.csv", '\ufefftext\r\nfirst\r\n"second\nline"\r\nüåß', ["row 1, line 2", "row 2, line 3", "row 3, line 5"]),
    ],
)
def test_rows_are_read_with_their_places(write: Write, name: str, content: str, places: list[str]) -> None:
    assert list(iter_rows(write(name, content))) == list(zip(places, ROWS, strict=True))


def test_parquet_rows_are_read_with_their_numbers(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert list(iter_rows(tmp_path / "rows.parquet")) == list(zip(["row 1", "row 2", "row 3"], ROWS, strict=True))


def test_a_single_row_with_one_list_is_a_row_and_not_a_wrapper(write: Write) -> None:
    row = {"messages": [{"role": "user", "content": "Hej?"}]}
    assert [row for _, row in iter_rows(write("one.json", json.dumps(row)))] == [row]
    assert [row for _, row in iter_rows(write("indented.json", json.dumps(row, indent=2)))] == [row]


@pytest.mark.parametrize("longest_row", [75, 80, 87, 200])
def test_a_json_list_does_not_depend_on_how_much_is_read_at_once(
    write: Write, monkeypatch: pytest.MonkeyPatch, longest_row: int
) -> None:
    rows = [{"text": 'a "b" \\ å 🙂', "n": [1, -2.5e3, True, None]}, {}, {"text": "x" * 30}]
    path = write("rows.json", json.dumps(rows, indent=1))
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", longest_row)
    expected = [("row 1, line 2", rows[0]), ("row 2, line 11", rows[1]), ("row 3, line 12", rows[2])]
    assert list(iter_rows(path)) == expected


# -- what cannot be read


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "empty.jsonl has no rows"),
        ("empty.json", " \n", "empty.json has no rows"),
        ("lines.jsonl", '{"text": "a"}\n\n{"text": "b', r"row 2, line 3: malformed JSON: Unterminated .* \(column 10"),
        ("header.csv", "text\n", "header.csv has no rows"),
        ("number.json", '[{"text": "a"},\n7]', r"number.json: row 2, line 2: the row is not an object but 7"),
        ("cut.json", '[\n{"text": "a"},\n{"text": "b', "row 2, line 3: malformed JSON: Unterminated string"),
        ("cut_list.json", '[\n{"text": "a"}\n', "line 3: malformed JSON: expected `,` or `]`"),
        ("comma.json", '[{"text": "a"},\n]', r"row 2, line 2: malformed JSON"),
        ("tail.json", '[{"text": "a"}]\n[]', "line 2: more text after the end of the list"),
        ("inner.json", '[{\n"text":\nNone}]', r"row 1, line 1 \(error in line 3\): malformed JSON: Expecting value"),
        ("object.json", '{\n"data": [\n{]}', "line 3: malformed JSON: Expecting property name"),
        ("digits.jsonl", '{"text": ' + "1" * 5000 + "}", "line 1: malformed JSON: Exceeds the limit"),
        ("deep.json", "[" * 100_000, "line 1: malformed JSON: nested too deeply"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe5"}\n', r"line 2: byte 11 \(0xe5\) is not UTF-8"),
        ("latin.json", b'[{"text": "a"},\n{"text": "\xe5"}]', r"line 2: byte 11 \(0xe5\) is not UTF-8"),
        ("latin.csv", b"text\na\n\xe5\n", r"line 3: byte 1 \(0xe5\) is not UTF-8"),
        ("utf16.csv", "text\na\n".encode("utf-16"), r"line 1: byte 1 \(0xff\) is not UTF-8"),
        ("cells.csv", "prompt,completion\na,b\n\na,b,c\n", r"row 2, line 4: 3 cells for 2 columns \(prompt, compl"),
        (
            "quote.csv",
            'text\n"' + "a line\n" * 300,
            "line 2: malformed CSV: .*\n  hint: is a quote missing in this record",
        ),
        ("twice.csv", "text,text\na,b\n", "line 1: two columns have the same name"),
        ("noise.parquet", b"PAR1 no", "is not a valid Parquet file"),
    ],
)
def test_unreadable_content_is_reported_with_its_place(
    write: Write, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_file(write(name, content))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_only_regular_files_are_read(tmp_path: Path, suffix: str) -> None:
    """A named pipe waits for a writer, and a device has no end."""
    pipe, device = tmp_path / f"pipe{suffix}", tmp_path / f"device{suffix}"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path, kind in ((pipe, "a named pipe"), (device, "a device")):
        with pytest.raises(ToolkitError, match=f"{path.name} is {kind}, expected a file"):
            check_file(path)


@pytest.mark.parametrize(
    ("name", "start", "place"),
    [
        ("line.jsonl", '{"text": "', "line 1"),
        ("element.json", '[{"text": "a"},\n{"text": "', "row 2, line 2"),
        ("cell.csv", "text\n", "line 2"),
    ],
)
def test_what_grows_without_end_is_refused_before_it_fills_memory(
    write: Write, name: str, start: str, place: str
) -> None:
    with pytest.raises(OverLimit, match=f"{place}: more than 16 MiB, longer than any row"):
        check_file(write(name, start + "x" * (17 * MIB)))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_parquet_cell_that_unpacks_to_more_than_any_row_is_refused(tmp_path: Path, rows: int) -> None:
    texts = ["short"] * (rows - 1) + ["x" * 17 * MIB]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "rows.parquet").stat().st_size < MIB
    with pytest.raises(OverLimit, match="row group 1: more than 16 MiB" if rows == 1 else "row 40: more than 16 MiB"):
        check_file(tmp_path / "rows.parquet", max_bytes=None)


def test_a_data_set_card_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    layers = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghijk"))
    (tmp_path / "README.md").write_text(f"---\na: &a [x]\n{layers}\n---\n")
    with pytest.raises(OverLimit, match=r"README.md has more than 200,000 values"):
        resolve_sources([str(tmp_path)])


# -- checking


COLUMNS = {"instruction": "question", "output": "answer"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"question": "Hej?", "answer": "Hello", "n": "1"}\n' * 2),
        ("rows.json", '[{"question": "Hej?", "answer": "Hello"}, {"answer": "Hello", "question": "Hej?"}]'),
        ("rows.csv", "question,answer\nHej?,Hello\nHej?,Hello\n"),
        ("rows.parquet", ""),
    ],
)
def test_columns_of_another_name_are_read_from_every_kind_of_file(write: Write, name: str, content: str) -> None:
    path = write(name, content)
    if not content:
        parquet.write_table(pyarrow.Table.from_pylist([{"question": "Hej?", "answer": "Hello"}] * 2), path)
    with pytest.raises(ToolkitError, match=r"row 1.*: fields found: question, answer") as caught:
        check_file(path)
    assert caught.value.hint == "did you mean `--column instruction=question output=answer`?"
    assert check_file(path, columns=COLUMNS) == FileCheck(format="alpaca", rows=2, complete=True)
    check_columns(COLUMNS, [str(path)])


def test_an_invalid_row_is_reported_with_the_field_and_its_column(write: Write) -> None:
    path = write("rows.jsonl", '{"question": "a", "answer": "b", "output": "c"}\n{"question": "a", "output": "c"}\n')
    with pytest.raises(
        ToolkitError, match=r"row 2, line 2: no field `output` \(column `answer`\); fields found: instr"
    ):
        check_file(path, columns=COLUMNS)


def test_a_column_may_be_that_of_one_data_set_or_of_later_rows_but_not_of_none(write: Write) -> None:
    plain = write("plain.jsonl", '{"instruction": "Hej?", "output": "Hello"}\n')
    other = write("other.jsonl", '{"question": "a", "answer": "b"}\n{"question": "a", "answer": "b", "context": "c"}\n')
    columns, names = COLUMNS | {"input": "context"}, [str(plain), str(other)]
    assert [check_file(path, columns=columns).format for path in (plain, other)] == ["alpaca", "alpaca"]
    check_columns(columns, names)
    with pytest.raises(ToolkitError, match="--column input=contxt: the rows have no such column; theirs are") as caught:
        check_columns(COLUMNS | {"input": "contxt"}, names)
    assert caught.value.hint == "did you mean `--column instruction=question output=answer input=context`?"
    check_columns({"text": "content"}, [*names, "owner/name"])  # its rows are not known before the ranks load them
    check_columns({"text": "content"}, [*names, "owner/name"], [{"content": "Hej"}])
    with pytest.raises(ToolkitError, match="theirs are body, "):
        check_columns({"text": "content"}, [*names, "owner/name"], [{"body": "Hej"}])


def test_a_check_stops_after_its_byte_limit(write: Write) -> None:
    path = write("rows.jsonl", '{"text": "a"}\n' * 10 + "broken")  # 14 bytes a row
    check = check_file(path, max_bytes=28)
    assert (check.rows, check.complete) == (2, False)
    with pytest.raises(ToolkitError, match="row 11, line 11"):
        check_file(path, max_bytes=None)


# -- configurations and several data sets


def test_a_copy_of_a_hub_data_set_is_a_source_with_a_configuration(tmp_path: Path) -> None:
    folder = write_dataset_folder(tmp_path / "greetings")
    assert resolve_sources([str(folder)], config="sv") == [DataSource(kind="hub", name=str(folder), config="sv")]
    with pytest.raises(ToolkitError, match="has several configurations: en, sv") as caught:
        resolve_sources([str(folder)])
    assert caught.value.hint == "`--dataset_config en`"
    with pytest.raises(ToolkitError, match="has no configuration 'svv'; it has: en, sv") as caught:
        resolve_sources([str(folder)], config="svv", option="eval_dataset")
    assert caught.value.hint == "did you mean `--eval_dataset_config sv`?"
    default = write_dataset_folder(tmp_path / "default", default="sv")
    assert resolve_sources([str(default)]) == [DataSource(kind="hub", name=str(default))]


def test_the_same_data_set_twice_is_refused(write: Write) -> None:
    path = write("rows.jsonl", '{"text": "a"}')
    same = path.parent / "." / ".." / path.parent.name / path.name
    with pytest.raises(ToolkitError, match=r"--dataset names .*rows.jsonl twice, also as .*rows.jsonl\n"):
        resolve_sources([str(path), "owner/name", str(same)])
    with pytest.raises(ToolkitError, match="--dataset names owner/name twice\n"):
        resolve_sources(["owner/name", "owner/name"])


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        ([100, 100], [0.7, 0.3], [233, 100]),  # 100 / 0.3 = 333.3 rows in all
        ([100, 100], [7, 3], [233, 100]),  # weights are relative
        ([90, 10], [0.9, 0.1], [90, 10]),  # as many as there are: nothing is repeated
        ([10, 1000], [0.5, 0.5], [1000, 1000]),
        ([4, 6, 10], [1, 1, 2], [6, 6, 12]),
        ([5], [3], [5]),
    ],
)
def test_weights_are_fractions_of_the_rows_of_an_epoch(
    rows: list[int], weights: list[float], expected: list[int]
) -> None:
    counts = rows_per_epoch(rows, weights)
    assert (counts, rows_per_epoch(rows, None)) == (expected, rows)
    assert [count / sum(counts) for count in counts] == pytest.approx(fractions(weights), abs=1 / sum(counts))


def test_every_row_is_repeated_as_often_as_any_other_or_once_more() -> None:
    chosen = repeated_rows(4, 11, seed="42")
    assert sorted(Counter(chosen).values()) == [2, 3, 3, 3]
    assert chosen == repeated_rows(4, 11, seed="42")
    assert len({tuple(repeated_rows(4, 11, seed=str(seed))) for seed in range(40)}) == 4


def test_the_number_of_a_row_says_which_data_set_it_is_from() -> None:
    numbers = {numbered(row, source, sources=3): (row, source) for row in range(5) for source in range(3)}
    assert sorted(numbers) == list(range(15))
    assert {number: row_and_source(number, sources=3) for number in numbers} == numbers
    assert numbered(7, 0, sources=1) == 7
