"""Mechanical fixes as edits of the text, so that comments and order stay.

>>> from toolkit.lint.document import read_text
>>> from toolkit.lint.finding import Edit
>>> apply_edits(read_text("a: 1  # why\\nb: 2\\n", "mine.yaml"), [Edit(key="a", rename="c"), Edit(key="b")])
'c: 1  # why\\n'
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from toolkit.lint.document import Document
from toolkit.lint.finding import Edit
from toolkit.lint.places import Entry

Splice = tuple[int, int, str]


def apply_edits(doc: Document, edits: Sequence[Edit]) -> str:
    """The text with every edit that touches no other; the rest waits for the next round."""
    text, end = doc.text, len(doc.text) + 1
    for start, stop, new in sorted({_splice(doc, edit) for edit in edits if edit.key in doc.entries}, reverse=True):
        if stop <= end:
            text, end = text[:start] + new + text[stop:], start
    return text


def _splice(doc: Document, edit: Edit) -> Splice:
    entry = doc.entries[edit.key]
    if edit.rename is not None:
        quoted = doc.text[entry.key_span[0]] == '"'
        return (*entry.key_span, json.dumps(edit.rename) if quoted else edit.rename)
    if edit.value is not None:
        return (*entry.value_span, _literal(edit.value, is_json=doc.is_json or entry.flow))
    return _drop_from_braces(doc.text, entry) if entry.flow else _drop_lines(doc.text, entry)


def _literal(value: str | bool, *, is_json: bool) -> str:
    if isinstance(value, bool) or value.isdigit():
        return str(value).lower()
    return json.dumps(value) if is_json or not re.fullmatch(r"[\w./-]+", value) or value == "no" else value


def _drop_lines(text: str, entry: Entry) -> Splice:
    """The whole lines of a block's entry, the comment behind its value included."""
    start = text.rfind("\n", 0, entry.key_span[0]) + 1
    stop = text.find("\n", max(entry.value_span[1], entry.key_span[1]))
    return start, len(text) if stop < 0 else stop + 1, ""


def _drop_from_braces(text: str, entry: Entry) -> Splice:
    """An entry with the comma behind it, or the one in front of the last."""
    start, stop = entry.key_span[0], entry.value_span[1]
    behind = re.compile(r"\s*,\s*").match(text, stop)
    if behind:
        return start, behind.end(), ""
    before = re.compile(r",?\s*$").search(text, 0, start)
    return before.start() if before else start, stop, ""
