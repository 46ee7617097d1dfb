"""Mechanical fixes as edits of the text, so that comments and the order of keys stay."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.lint.check import findings_with_edits
from toolkit.lint.document import Document, load_document, read_text, with_deepspeed_json
from toolkit.lint.findings import Edit
from toolkit.lint.positions import KeyPosition

# A fix may uncover another: the value of a misspelt key is checked only once the key is renamed.
MAX_ROUNDS = 5

Replacement = tuple[int, int, str]
"""Start and end offset of the text to replace, and the new text."""


def fixed_text(path: Path) -> str:
    """Return the text of a file after every mechanical fix; what needs a decision stays as it is."""
    document = load_document(path)
    for _ in range(MAX_ROUNDS):
        edits = [edit for _, edit in findings_with_edits(document) if edit is not None]
        changed = apply_edits(document, edits)
        if changed == document.text:
            break
        try:
            document = with_deepspeed_json(read_text(changed, str(path)))
        except ToolkitError:  # the file's layout does not allow an edit line by line: keep the text from before it
            break
    return document.text


def apply_edits(document: Document, edits: Sequence[Edit]) -> str:
    """Return the text with every edit that overlaps no other; the rest waits for the next round.

    >>> document = read_text("a: 1  # why\\nb: 2\\n", "mine.yaml")
    >>> apply_edits(document, [Edit(key="a", rename="c"), Edit(key="b")])
    'c: 1  # why\\n'
    """
    text, end = document.text, len(document.text) + 1
    replacements = {_replacement(document, edit) for edit in edits if edit.key in document.positions}
    for start, stop, new in sorted(replacements, reverse=True):
        if stop <= end:
            text, end = text[:start] + new + text[stop:], start
    return text


def _replacement(document: Document, edit: Edit) -> Replacement:
    position = document.positions[edit.key]
    if edit.rename is not None:
        quoted = document.text[position.key_span[0]] == '"'
        return (*position.key_span, json.dumps(edit.rename) if quoted else edit.rename)
    if edit.value is not None:
        return (*position.value_span, _literal(edit.value, is_json=document.is_json or position.in_braces))
    return (_remove_from_braces if position.in_braces else _remove_lines)(document.text, position)


def _literal(value: str | bool, *, is_json: bool) -> str:
    if isinstance(value, bool) or value.isdigit():
        return str(value).lower()
    return json.dumps(value) if is_json or not re.fullmatch(r"[\w./-]+", value) or value == "no" else value


def _remove_lines(text: str, position: KeyPosition) -> Replacement:
    """Remove complete lines, including the comment after the value."""
    start = text.rfind("\n", 0, position.key_span[0]) + 1
    stop = text.find("\n", max(position.value_span[1], position.key_span[1]))
    return start, len(text) if stop < 0 else stop + 1, ""


def _remove_from_braces(text: str, position: KeyPosition) -> Replacement:
    """Remove a key with the comma after it, or for the last key with the comma before it."""
    start, stop = position.key_span[0], position.value_span[1]
    comma_after = re.compile(r"\s*,\s*").match(text, stop)
    if comma_after:
        return start, comma_after.end(), ""
    comma_before = re.compile(r",?\s*$").search(text, 0, start)
    return comma_before.start() if comma_before else start, stop, ""
