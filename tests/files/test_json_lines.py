"""JSON lines survive a kill at any byte, and a damaged line is named by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.json_files import complete_bytes, read_json_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_a_file_cut_off_at_any_byte_has_its_complete_lines(path: Path) -> None:
    content = b'{"a": 1}\n\n{"b": 2}\n'
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        numbers = [line.number for line in read_json_lines(path)]
        assert numbers == [number for number, end in ((1, 9), (3, 19)) if cut >= end]
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


def test_more_lines_than_any_file_of_its_kind_are_refused(path: Path) -> None:
    path.write_bytes(b"{}\n" * 1001)
    with pytest.raises(ToolkitError, match="more than 1,000 lines"):
        list(read_json_lines(path, max_lines=1000))
