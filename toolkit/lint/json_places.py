"""JSON with the place of each key: Python's own decoder gives the values, a scanner the places.

>>> read('{"a": {"b": 1}}', "mine.json")[1]["a.b"].line
1
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.lint.places import Entry, check_bounds

# A string that is not closed ends with its line, so that no text makes the scanner go back.
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|[{}\[\],:]|[^\s{}\[\],:"]+')


def read(text: str, path: str) -> tuple[Any, dict[str, Entry], list[Entry]]:
    """Value, places, and the places of keys that stand twice.

    Raises ToolkitError for what is no JSON or is too large.
    """
    tokens = _tokens(text, path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"{path} is not JSON: {error}") from None
    entries: dict[str, Entry] = {}
    twice: list[Entry] = []
    for entry in _entries(text, tokens):
        if entry.key in entries:
            twice.append(entry)
        entries[entry.key] = entry
    return data, entries, twice


def _tokens(text: str, path: str) -> list[tuple[str, int, int]]:
    tokens, depth = [], 0
    for match in TOKEN.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        tokens.append((match[0], match.start(), match.end()))
        check_bounds(path, values=len(tokens) // 4, depth=depth)
    return tokens


class _Open:
    """A brace or bracket that is not closed yet, and the entry that stands in it."""

    def __init__(self, prefix: str, *, is_list: bool) -> None:
        self.prefix, self.is_list, self.index = prefix, is_list, 0
        self.key: str | None = None
        self.key_span = (0, 0)
        self.value_start = 0
        self.value_end: int | None = None
        self.pending: tuple[str, int, int] | None = None

    def child(self) -> str:
        name = str(self.index) if self.is_list else (self.key or "")
        return f"{self.prefix}.{name}" if self.prefix else name


def _entries(text: str, tokens: list[tuple[str, int, int]]) -> list[Entry]:
    """Entries of text that the decoder has accepted, so every brace has its partner."""
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    found: list[Entry] = []
    stack: list[_Open] = []

    def value(start: int, end: int) -> None:
        if stack and not stack[-1].is_list and stack[-1].key is not None:
            top = stack[-1]
            line = bisect_right(line_starts, top.key_span[0])
            spans = {"key_span": top.key_span, "value_span": (start, end)}
            found.append(Entry(key=top.child(), line=line, flow=True, **spans))

    opened: list[int] = []
    for word, start, end in tokens:
        if word in "{[":
            stack.append(_Open(stack[-1].child() if stack else "", is_list=word == "["))
            opened.append(start)
        elif word in "}]":
            stack.pop()
            value(opened.pop(), end)
        elif word == ",":
            stack[-1].index += 1
            stack[-1].key = None
        elif word == ":":
            continue
        elif stack and not stack[-1].is_list and stack[-1].key is None:
            stack[-1].key, stack[-1].key_span = json.loads(word), (start, end)
        else:
            value(start, end)
    return found
