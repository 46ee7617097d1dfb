"""JSON is read with its line in every refusal, and with limits on depth, numbers and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.json_files import complete_bytes, parse_json, read_json, read_json_lines, read_json_object


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: not JSON"),
        ('{"a": 1,\n "b": }', "line 2: not JSON"),
        ('{"a": 1} {"b": 2}', r"line 1: not JSON \(Extra data"),
        ("[" * 100_000 + "]" * 100_000, "nested more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than"),
        ("9" * 5_000, "not JSON"),
        ("[NaN]", "expected a finite number"),
        ("1e999", "expected a finite number"),
        (r'{"a\udc00": 1}', "not valid Unicode"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(text: str, why: str) -> None:
    with pytest.raises(ToolkitError, match=f"^mine.json.*{why}") as refused:
        parse_json(text, "mine.json")
    assert len(str(refused.value).splitlines()) <= 2
    assert len(refused.value.message) < 300


def test_a_file_is_read_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\u00e9"}')
    assert read_json(path) == read_json_object(path) == {"a": "é"}
    path.write_text("[1]")
    with pytest.raises(ToolkitError, match=r"mine\.json holds list, expected keys and values"):
        read_json_object(path)
    with pytest.raises(ToolkitError, match="has more than 0 KiB"):
        read_json(path, max_bytes=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_a_file_cut_off_at_any_byte_has_its_complete_lines(path: Path) -> None:
    content = b'{"a": 1}\n\n{"b": 2}\n'
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        names = [name for name, _ in read_json_lines(path)]
        assert names == [f"{path}, line {number}" for number, end in ((1, 9), (3, 19)) if cut >= end]
        assert complete_bytes(path) == content[:cut].rfind(b"\n") + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"garbage", r"rows.jsonl, line 2: not JSON \(Expecting value, column 1\)"),
        (b"[1]", "rows.jsonl, line 2 holds list, expected keys and values"),
        (b"\xff\xfe", r"rows.jsonl, line 2: not UTF-8 text \(byte 0\)"),
        (b"\0\0\0", "rows.jsonl, line 2: not JSON"),
        (b"[" * 100_000, "rows.jsonl, line 2 is nested more than 64 deep"),
        (b'{"loss": NaN}', "rows.jsonl, line 2: loss is nan, expected a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "rows.jsonl, line 2 is not JSON: Exceeds the limit"),
        (b'{"a": "' + b"x" * 300 + b'"}', "rows.jsonl, line 2: longer than 200 bytes"),
    ],
    ids=["garbage", "foreign", "binary", "zeros", "deep", "nan", "digits", "long"],
)
def test_a_damaged_line_is_named_and_none_is_left_out(path: Path, line: bytes, message: str) -> None:
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"b": 2}\n')
    longest = 200 if b"xxx" in line else 2**20
    with pytest.raises(ToolkitError, match=message):
        list(read_json_lines(path, max_line_bytes=longest))
