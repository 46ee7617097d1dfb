"""Read one long JSON list element by element, so that its size costs no memory and a mistake has a row and a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.data.lines import Lines, Placed, failure_at, json_failure
from toolkit.errors import ToolkitError

CHUNK_CHARS = 2**20

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class JsonList:
    """The elements of one long JSON list, decoded as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        """Where in `text` the next thing starts."""
        self.chars_dropped = 0
        self.line = 1
        self.line_position = 0
        """`line` is the line of the character at `line_position`."""

    def rows(self) -> Iterator[Placed]:
        with self.path.open(encoding="utf-8-sig") as self.file:
            number = 0
            self._take("[")
            while self._peek() != "]":
                if number:
                    self._take(",")
                    self._peek()
                number += 1
                self.line, self.line_position = self._line(self.position), self.position
                place = f"row {number}, line {self.line}"
                yield place, self._value(place), self.chars_dropped + self.position
            self._take("]")
            if self._peek():
                raise self._failure("more text after the end of the list")

    def _more(self) -> bool:
        """Drop what was decoded and read on; False at the end of the file."""
        self.line, self.line_position = self._line(self.position), 0
        self.chars_dropped += self.position
        rest = self.text[self.position :]
        try:
            chunk = self.file.read(max(CHUNK_CHARS, len(rest)))
        except UnicodeDecodeError:
            for _ in Lines(self.path):  # raises where the wrong byte is
                pass
            raise
        self.text, self.position = rest + chunk, 0
        return bool(chunk)

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.position)
            self.position = space.end() if space else self.position
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._more():
                return ""

    def _take(self, expected: str) -> None:
        if self._peek() != expected:
            raise self._failure(f"malformed JSON: expected `{expected}`" + (" or `]`" if expected == "," else ""))
        self.position += 1

    def _value(self, place: str) -> Any:
        """Decode one element. A mistake stays where it is when more text is read; a row cut by the buffer does not."""
        failed_at = -1
        while True:
            try:
                value, self.position = _DECODER.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                offset = error.pos - self.position
                settled = offset == failed_at and not error.msg.startswith("Unterminated string")
                line = self._line(error.pos)
                if settled or not self._more():
                    where = place if place.endswith(f"line {line}") else f"{place} (error in line {line})"
                    raise failure_at(self.path, where, f"malformed JSON: {error.msg}") from None
                failed_at = offset
            except (ValueError, RecursionError) as error:
                raise failure_at(self.path, place, json_failure(error)) from None

    def _line(self, position: int) -> int:
        return self.line + self.text.count("\n", self.line_position, position)

    def _failure(self, why: str) -> ToolkitError:
        return failure_at(self.path, f"line {self._line(self.position)}", why)
