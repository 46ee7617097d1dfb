"""JSON is read with its line in every refusal, and with limits on depth, numbers and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.json_files import parse_json, read_json, read_json_object


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
