"""Edits of a parsed document (JSON or YAML), and its text afterwards.

`edited({"stage": 2})` is a Hypothesis strategy of documents with one to three edits; `json_text` and `yaml_text` write
them, with texts in some places that no dumper would write: 100,000 brackets, an integer of 5,000 digits, an alias bomb.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml
from hypothesis import strategies as st

Path = tuple[Any, ...]

# Stand-in in a document -> the text that replaces it where the document is written.
_TEXT_OF = {
    "RAW_DEEP_LIST": "[" * 100_000 + "]" * 100_000,
    "RAW_DEEP_OBJECT": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "RAW_FORTY_DEEP": "[" * 45 + "]" * 45,
    "RAW_UNCLOSED": "[" * 500,
    "RAW_LONG_INTEGER": "9" * 5_000,
    "RAW_BIG_EXPONENT": "1e999",
    "RAW_NEGATIVE_EXPONENT": "-1E+400",
}
_YAML_TEXT_OF = {
    "RAW_BOMB": "[&a [x,x,x,x,x,x,x,x,x], &b [" + "*a," * 9 + "], &c [" + "*b," * 9 + "], &d [" + "*c," * 9
    + "], &e [" + "*d," * 9 + "], &f [" + "*e," * 9 + "], &g [" + "*f," * 9 + "], [" + "*g," * 9 + "]]",
    "RAW_RECURSION": "&r [*r, 1]",
    "RAW_RECURSIVE_MAPPING": "&m {a: *m}",
    "RAW_PYTHON_CALL": "!!python/object/apply:os.mkdir [executed]",
    "RAW_PYTHON_NAME": "!!python/name:os.system",
    "RAW_BINARY": "!!binary R0lGODlh",
    "RAW_SET": "!!set {a, b}",
    "RAW_DATE": "2026-02-30",
    "RAW_TIMESTAMP": "2001-12-14t21:59:43.10-05:00",
    "RAW_SEXAGESIMAL": "190:20:30",
    "RAW_UNDEFINED_ALIAS": "*nothing",
    "RAW_EMPTY_INTEGER": "!!int ''",
    "RAW_MERGE": "{<<: [1, 2]}",
    "RAW_COMPLEX_KEY": "{? [a, b] : 1, ? {c: d} : 2}",
    "RAW_OCTAL": "0o17",
    "RAW_TAB": "\tx",
}  # fmt: skip
NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"))
TEXTS = (
    *("", " ", "0", "-1", "nan", "1e999", "true", "auto", "none", "nvme", "bfloat16", "ddp", "\0", "\x1b[31m", "\n"),
    *("a\nb: c", "\t", "é", "日本語", "\u202e", "\ufeff", "\ud800", "\x85", "x" * 300, "x" * 5_000, "é" * 200),
    *("<script>alert(1)</script>", "{{ 7 * 7 }}", "%s%n", "$(id)", "[bold]", ".", "..", "/", "-h", "../escaped"),
    *("/dev/zero", "/dev/full", "/proc/self/mem", "~/escaped", "~nobody-here/x"),
)
SHAPES: tuple[Any, ...] = (
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", "b"], [1, "a", None], [1.5, True]),
    *(list(range(2_000)), {str(number): number for number in range(2_000)}, ["x" * 1_000] * 50),
)
VALUES = st.one_of(
    st.sampled_from([None, True, False]),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(SHAPES),
    st.sampled_from(sorted(_TEXT_OF)),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
)
YAML_VALUES = st.one_of(VALUES, st.sampled_from(sorted(_YAML_TEXT_OF)))
KEYS = st.one_of(
    st.sampled_from(TEXTS), st.text(max_size=8), st.sampled_from(["__proto__", "<<", "__class__", "=", "?"])
)


class Twin(str):
    """A key that is written like another one, and is a second entry of the same mapping."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def json_text(document: Any, *, indent: int | None = 1) -> str:
    """Write a document as JSON, NaN and infinities included."""
    return _with_raw_texts(json.dumps(document, default=str, indent=indent), _TEXT_OF)


def yaml_text(document: Any) -> str:
    """Write a document as YAML in block style."""
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return _with_raw_texts(text, _TEXT_OF | _YAML_TEXT_OF)


@st.composite
def edited(draw: st.DrawFn, document: Any, *, values: st.SearchStrategy[Any] = VALUES, most: int = 3) -> Any:
    """Return a copy of the document with one to three edits, each at any depth."""
    document = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, most))):
        _edit(draw, document, values)
    return document[0] if document else None


def _edit(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any]) -> None:
    paths = _paths(document)
    if not paths:
        return
    *parents, key = draw(st.sampled_from(paths))
    around = _at(document, parents)
    value, is_mapping = around[key], isinstance(around, dict)
    match draw(st.sampled_from(["change", "contradict", "copy", "duplicate", "remove", "rename", "replace", "wrap"])):
        case "change":
            around[key] = draw(st.sampled_from(_near(value)))
        case "contradict" if is_mapping:
            around[Twin(key)] = copy.deepcopy(draw(values))
        case "copy":
            around[key] = copy.deepcopy(_at(document, draw(st.sampled_from(paths))))
        case "duplicate" if is_mapping:
            around[Twin(key)] = copy.deepcopy(value)
        case "duplicate":
            around.insert(key, copy.deepcopy(value))
        case "remove":
            del around[key]
        case "rename" if is_mapping:
            around[draw(st.one_of(KEYS, st.just(str(key)[:-1])))] = around.pop(key)
        case "wrap":
            around[key] = draw(st.sampled_from([[value], {"a": value}, [value, value], {str(value)[:40]: value}]))
        case _:
            around[key] = copy.deepcopy(draw(values))


def _near(value: Any) -> list[Any]:
    """Values near a present one: another number, the same as text, a longer or shorter text."""
    if isinstance(value, bool):
        return [not value, str(value).lower(), int(value), [value]]
    if isinstance(value, int | float):
        return [-value, value + 1, value - 1, value * 2, str(value), float(value), value * 2**40, [value]]
    if isinstance(value, str):
        return [value.upper(), f"{value}x", value[:-1], value * 2, f"{value}\n", f" {value}", [value]]
    if isinstance(value, list):
        return [value[:1], value * 2, value[::-1], dict(enumerate(map(str, value[:50]))), str(value)[:200]]
    if isinstance(value, dict):
        return [list(value), list(value.values()), [value], str(value)[:200], dict(list(value.items())[:1])]
    return ["null", 0, "", []]


def _paths(document: Any, *, most: int = 3_000) -> list[Path]:
    """Return the place of every value below the document, the first `most` of them level by level."""
    found: list[Path] = []
    level: list[tuple[Path, Any]] = [((), document)]
    while level and len(found) < most:
        inner = []
        for path, value in level:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner += [((*path, key), item) for key, item in items]
        found += [path for path, _ in inner]
        level = [(path, value) for path, value in inner if isinstance(value, dict | list)]
    return found[:most]


def _at(document: Any, path: Any) -> Any:
    for key in path:
        document = document[key]
    return document


def _with_raw_texts(text: str, texts: dict[str, str]) -> str:
    for name, raw in texts.items():
        if name in text:
            text = text.replace(f'"{name}"', raw).replace(name, raw)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes twin keys, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(Twin, lambda dumper, key: dumper.represent_str(str(key)))
