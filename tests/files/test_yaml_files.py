"""Reading YAML and JSON configurations: what is refused, in which words, and that nothing in them runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.yaml_files import read_configuration

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
    "pairs": ("a: !!pairs [b: 1]", "[0] is of the type tuple, expected plain text"),
    "object tag": ("a: !!python/object/apply:os.mkdir [ran]", "names an object; nothing was executed"),
    "infinity": ("a: .inf", "a is inf, expected a finite number"),
    "65 bits": ("a: 18446744073709551616", "an integer of 65 bits"),
    "5,000 digits": ("a: " + "9" * 5000, "a number of 5,000 characters"),
    "base 60": ("a: " + "59:" * 300_000 + "59", "a number of"),
    "list": ("- a", "holds list, expected keys and values"),
    "key of a list": ("? [a]\n: b", "not YAML: while constructing a mapping"),
    "number as a key": ("5: a", "the key 5, expected a name"),
    "yes as a key": ("yes: a", "the key True, expected a name"),
    "unfinished": ("a: [1", "not YAML"),
    "null byte": ("a: \0", "not YAML"),
    "bad scalar": ("a: !!int ''", "not YAML"),
    "bad date": ("a: 2001-99-99", "not YAML"),
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
    assert words in refused.value.message
    assert str(file) in refused.value.message
    assert len(refused.value.message) < 600
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing in the file was run"


def test_aliases_merges_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("\ufeffbase: &base {x: 1, y: 2}\nmore: {<<: *base, y: 3}\n", encoding="utf-8")
    assert read_configuration(file) == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}}
