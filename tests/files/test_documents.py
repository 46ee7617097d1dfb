"""JSON and YAML are read with limits on depth, numbers and size, and nothing in a file runs."""

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.documents import (
    Limits,
    complete_bytes,
    parse_json,
    read_configuration,
    read_json,
    read_json_lines,
    read_json_object,
)

SMALL = Limits(values=10, depth=3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: not JSON"),
        ('{"a": 1,\n "b": }', "line 2: not JSON"),
        ('{"a": 1} {"b": 2}', r"line 1: not JSON \(Extra data"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 3 deep"),
        ("[[[[]]]]", "nested more than 3 deep"),
        ('{"a": [0, 0, 0, 0], "b": [0, 0, 0, 0]}', "more than 10 values"),
        ("9" * 5_000, "not JSON"),
        ("[18446744073709551616]", r"\[0\] is an integer of 65 bits"),
        ("[NaN]", r"\[0\] is nan, expected a finite number"),
        ('{"a": [-1e999]}', r"\[0\] is -inf, expected a finite number"),
        (r'{"a\udc00": 1}', "not valid Unicode"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(text: str, why: str) -> None:
    with pytest.raises(ToolkitError, match=f"^mine.json.*{why}") as refused:
        parse_json(text, "mine.json", limits=SMALL)
    assert len(str(refused.value).splitlines()) <= 2
    assert len(refused.value.message) < 300


def test_ordinary_values_pass_and_a_file_is_read_by_the_same_rules(tmp_path: Path) -> None:
    for text in ("0", "null", '"é"', "-9223372036854775808", "[[1]]", "[0,0,0,0,0,0,0,0,0]"):
        parse_json(text, "mine.json", limits=SMALL)
    path = tmp_path / "mine.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\u00e9"}')
    assert read_json(path) == read_json_object(path) == {"a": "é"}
    path.write_text("[1]")
    with pytest.raises(ToolkitError, match=r"mine\.json holds list, expected keys and values"):
        read_json_object(path)
    with pytest.raises(ToolkitError, match="has more than 0 KiB"):
        read_json(path, max_bytes=2)


def test_lines_cut_off_at_any_byte_are_left_out(tmp_path: Path) -> None:
    path, content = tmp_path / "rows.jsonl", b'{"a": 1}\n\n{"b": 2}\n'
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
        (b"[" * 150, "rows.jsonl, line 2: not JSON"),
        (b'{"loss": NaN}', "rows.jsonl, line 2: loss is nan, expected a finite number"),
        (b'{"a": "' + b"x" * 300 + b'"}', "rows.jsonl, line 2: longer than 200 bytes"),
    ],
)
def test_a_damaged_line_is_named_and_none_is_left_out(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"b": 2}\n')
    with pytest.raises(ToolkitError, match=message):
        list(read_json_lines(path, max_line_bytes=200))


# -- configurations

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

# content of mine.yaml, or of mine.json where it starts with a brace or a bracket -> part of the message
REFUSED = {
    "alias bomb": (BOMB, "more than 20,000 values"),
    "bomb of merged keys": ("a: &a {k: v}\n" + BOMB.replace("[x", "[*a").replace("a: &a", "z: &z", 1), "20,000 values"),
    "recursive mapping": ("a: &a\n  b: *a\n", "an alias *a inside of what it stands for"),
    "deep flow": ("a: " + "[" * 100_000 + "]" * 100_000, "nested more than 40 deep"),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(100_000)), "more than"),
    "large": ("#" * 3_000_000, "more than 1 MiB"),
    "bytes": ("a: !!binary R0lGODlh", "a is of the type bytes, expected plain text"),
    "object tag": ("a: !!python/object/apply:os.mkdir [ran]", "names an object; nothing was executed"),
    "infinity": ("a: .inf", "a is inf, expected a finite number"),
    "65 bits": ("a: 18446744073709551616", "an integer of 65 bits"),
    "5,000 digits": ("a: " + "9" * 5000, "a number of 5,000 characters"),
    "base 60": ("a: " + "59:" * 300_000 + "59", "a number of"),
    "list": ("- a", "holds list, expected keys and values"),
    "key of a list": ("? [a]\n: b", "not YAML: while constructing a mapping"),
    "number as a key": ("5: a", "the key 5, expected a name"),
    "unfinished": ("a: [1", "not YAML"),
    "tab": ("a: b\n\tc: d", "at line 2, column 1; indent with spaces"),
    "bad scalar": ("a: !!int ''", "not YAML"),
    "JSON: list": ("[]", "holds list, expected keys and values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_configuration_holds_is_refused_by_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, words = REFUSED[case]
    file = tmp_path / ("mine.json" if case.startswith("JSON") else "mine.yaml")
    file.write_text(text)
    with pytest.raises(ToolkitError) as refused:
        read_configuration(file)
    assert words in f"{refused.value.message}; {refused.value.hint}"
    assert str(file) in refused.value.message
    assert len(refused.value.message) < 600
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing in the file was run"


def test_aliases_merges_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("\ufeffbase: &base {x: 1, y: 2}\nmore: {<<: *base, y: 3}\n", encoding="utf-8")
    assert read_configuration(file) == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}}
