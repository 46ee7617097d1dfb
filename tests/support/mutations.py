"""Mutations of a file, drawn from a seeded `random.Random`: of its parsed content (JSON, YAML), or of its bytes."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_BOMB = ", ".join(f"&{new} [{f'*{old},' * 9}]" for old, new in zip("abcdefg", "bcdefgh", strict=True))
# Stand-in in a document -> the text in its place: no dumper writes these.
_OF_JSON = {"RAW_0_": "[" * 100_000 + "]" * 100_000, "RAW_1_": "9" * 5_000, "RAW_2_": "-1E+400"}
_OF_YAML = {"RAW_3_": f"[&a [{'x,' * 9}], {_BOMB}]", "RAW_4_": "!!python/object/apply:os.mkdir [executed]"}
_OF_YAML |= {"RAW_5_": "&r [*r, 1]", "RAW_6_": "2026-02-30", "RAW_7_": "{? [a] : 1}"}
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 3, 2**31, 2**64, 0.5, 1e308, float("nan"), float("inf"), "", " ", "-1", "auto", "none"),
    *("nvme", "bfloat16", "\0", "\x1b[31m", "a\nb: c", "日本語", "\u202e", "\ud800", "x" * 5_000, "{{ 7 * 7 }}"),
    *("$(id)", "..", "/", "../escaped", "/dev/zero", "/proc/self/mem", "~/escaped", "~nobody-here/x"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1, "a", None], list(range(500)), ["x" * 1_000] * 50),
)
SNIPPETS = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\r\n", b"\t", b"{", b"}", b"[", b",", b'"', b"#", b"- ", b"&a ", b"!!", b"{{"),
    *(b"NaN", b"1e999", b"9" * 5_000, b"[" * 100_000, b"PK\x03\x04", b"\x80\x02", b"cos\nsystem\n(S'true'\ntR."),
)
WHOLE_FILES = (b"", b"\0" * 4_096, b"null", b"[]", b"{}", b'""', b"0", b"---\n---\n", b"\x80\x04N.")


def mutate(chance: random.Random, path: Path) -> None:
    """Write the file with one to three changes, three times out of four of its parsed content."""
    content, suffix = path.read_bytes(), path.suffix
    path.unlink()  # it may be a link
    if suffix not in (".json", ".jsonl", ".yaml") or chance.randrange(4) == 0:
        path.write_bytes(_mutated_bytes(chance, content))
    elif suffix == ".jsonl":
        rows = _mutated(chance, list(map(json.loads, content.splitlines())), (*VALUES, *_OF_JSON))
        lines = map(json.dumps, rows if isinstance(rows, list) else [rows])
        path.write_text("".join(f"{_with_raw_texts(line)}\n" for line in lines))
    elif suffix == ".json":
        path.write_text(_with_raw_texts(json.dumps(_mutated(chance, json.loads(content), (*VALUES, *_OF_JSON)))))
    else:
        document = _mutated(chance, yaml.safe_load(content), (*VALUES, *_OF_JSON, *_OF_YAML))
        path.write_text(_with_raw_texts(yaml.safe_dump(document, sort_keys=False)))


def _with_raw_texts(text: str) -> str:
    for name, raw in (_OF_JSON | _OF_YAML).items():
        text = text.replace(f'"{name}"', raw).replace(name, raw)
    return text


def _mutated(chance: random.Random, document: Any, values: tuple[Any, ...]) -> Any:
    around_all = [copy.deepcopy(document)]
    for _ in range(chance.randint(1, 3)):
        around, key = chance.choice(list(_places(around_all)))
        match chance.choice(["remove", "rename", "repeat", "replace", "replace", "wrap"]):
            case "remove" if around is not around_all:
                del around[key]
            case "rename" if isinstance(around, dict):
                around[chance.choice(["", "\0", "<<", f"{key}s", str(key)[:-1], str(key).upper()])] = around.pop(key)
            case "repeat" if isinstance(around, list):
                around.insert(key, copy.deepcopy(around[key]))
            case "wrap":
                around[key] = chance.choice([[around[key]], {"a": around[key]}, str(around[key])[:200]])
            case _:
                around[key] = copy.deepcopy(chance.choice(values))
    return around_all[0]


def _places(around: Any) -> Iterator[tuple[Any, Any]]:
    """Yield collection and key of every value in a collection."""
    for key, value in around.items() if isinstance(around, dict) else enumerate(around):
        yield around, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _mutated_bytes(chance: random.Random, content: bytes) -> bytes:
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content) + 1)
        end = at + chance.choice([1, 8, 64, 1_000])
        match chance.choice(["cut", "delete", "encode", "flip", "flip", "insert", "repeat", "whole"]):
            case "cut":
                content = content[:at]
            case "delete":
                content = content[:at] + content[end:]
            case "encode":
                content = chance.choice([content.decode("latin-1").encode("utf-16"), b"\xef\xbb\xbf" + content])
            case "flip":
                content = content[:at] + bytes(byte ^ 0x20 for byte in content[at : at + 1]) + content[at + 1 :]
            case "insert":
                content = content[:at] + chance.choice(SNIPPETS) + content[at:]
            case "repeat":
                content = content[:end] + content[at:]
            case _:
                content = chance.choice(WHOLE_FILES)
    return content
