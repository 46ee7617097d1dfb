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
NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-300, 1e308)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "0", "-1", "3.5", "nan", "1e999", "true", "auto", "none", "cpu", "nvme", "bfloat16", "ddp", "completed"),
    *(
        "\0",
        "\x1b[31m",
        "\n",
        "a\nb: c",
        "\t",
        "é",
        "日本語",
        "\u202e",
        "\ufeff",
        "\ud800",
        "\U0001f600",
        "\x85",
        "\x7f",
    ),
    *("x" * 300, "x" * 5_000, "é" * 200, "<script>alert(1)</script>", "&lt;", "{{ 7 * 7 }}", "%s%n", "$(id)", "[bold]"),
    *("../escaped", "/dev/zero", "/dev/full", "/proc/self/mem", "~/escaped", "~nobody-here/x", ".", "..", "/", "-h"),
)
SHAPES: tuple[Any, ...] = (
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", "b"], [1, "a", None], [1.5, True], [[1], [2]]),
    *(list(range(2_000)), {str(number): number for number in range(2_000)}, ["x" * 1_000] * 50),
)
VALUES = st.one_of(
    st.sampled_from([None, True, False]),
    st.sampled_from(NUMBERS),
    st.sampled_from(NOT_FINITE),
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
    edit = draw(st.sampled_from(sorted(_EDITS)))
    _EDITS[edit](draw, document, around, key, values)


def _replace(draw: st.DrawFn, _document: Any, around: Any, key: Any, values: st.SearchStrategy[Any]) -> None:
    around[key] = copy.deepcopy(draw(values))


def _remove(_draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    del around[key]


def _rename(draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    if isinstance(around, dict):
        around[draw(KEYS)] = around.pop(key)
    else:
        around.reverse()


def _misspell(draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    if isinstance(around, dict) and isinstance(key, str) and key:
        at = draw(st.integers(0, len(key) - 1))
        around[key[:at] + key[at + 1 :]] = around.pop(key)


def _duplicate(_draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    if isinstance(around, dict):
        around[Twin(key)] = copy.deepcopy(around[key])
    else:
        around.insert(key, copy.deepcopy(around[key]))


def _contradict(draw: st.DrawFn, _document: Any, around: Any, key: Any, values: st.SearchStrategy[Any]) -> None:
    """A second entry of the same name with another value."""
    if isinstance(around, dict):
        around[Twin(key)] = copy.deepcopy(draw(values))


def _copy_another(draw: st.DrawFn, document: Any, around: Any, key: Any, _values: Any) -> None:
    around[key] = copy.deepcopy(_at(document, draw(st.sampled_from(_paths(document)))))


def _wrap(draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    value = around[key]
    around[key] = draw(st.sampled_from([[value], {"a": value}, [value, value], {str(value)[:40]: value}]))


def _change(draw: st.DrawFn, _document: Any, around: Any, key: Any, _values: Any) -> None:
    """A value near the present one: another number, the same as text, a longer or shorter text."""
    value = around[key]
    if isinstance(value, bool):
        near: list[Any] = [not value, str(value).lower(), int(value), [value]]
    elif isinstance(value, int | float):
        near = [-value, value + 1, value - 1, value * 2, str(value), float(value), value * 2**40, [value]]
    elif isinstance(value, str):
        near = [
            value.upper(),
            value + "x",
            value[:-1],
            value * 2,
            value + "\n",
            f" {value}",
            value.encode().hex(),
            [value],
        ]
    elif isinstance(value, list):
        near = [value[:1], value * 2, value[::-1], dict(enumerate(map(str, value[:50]))), str(value)[:200]]
    elif isinstance(value, dict):
        near = [list(value), list(value.values()), [value], str(value)[:200], dict(list(value.items())[:1])]
    else:
        near = ["null", 0, "", []]
    around[key] = draw(st.sampled_from(near))


_EDITS = {
    "change": _change,
    "contradict": _contradict,
    "copy another": _copy_another,
    "duplicate": _duplicate,
    "misspell": _misspell,
    "remove": _remove,
    "rename": _rename,
    "replace": _replace,
    "replace more often": _replace,
    "wrap": _wrap,
}


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
