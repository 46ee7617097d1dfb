"""Read text files of rows: lines, and one long JSON list element by element. A syntax error has a row and a line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files.reading import open_file
from toolkit.units import MIB

# A row is a document at most: a long book has 5 MiB.
MAX_ROW_BYTES = 16 * MIB
_CHUNK_CHARS = 2**20
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class ReadValue(NamedTuple):
    """A value read from a file: usually a row."""

    place: str
    """Its place in words, for error messages: `row 250, line 250`."""
    value: Any
    bytes_read: int
    """Approximate bytes read up to its end."""


def error_at(path: Path, place: str, why: str, *, hint: str | None = None) -> ToolkitError:
    """Return an error that names the file, the place in it, and the cause."""
    return ToolkitError(f"{path}: {place}: {why}", hint=hint)


def over_limit(path: Path, place: str) -> OverLimit:
    """Return the error for a row, line or cell that is longer than any document."""
    return OverLimit(f"{path}: {place}: more than {MAX_ROW_BYTES // MIB} MiB, longer than any row")


class Lines:
    """The lines of a UTF-8 file, decoded one by one so that an invalid byte has a line number.

    Raises OverLimit for a line that is longer than any row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        with open_file(self.path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
                self.bytes_read += len(line)
                if len(line) > MAX_ROW_BYTES:
                    raise over_limit(self.path, f"line {number}")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    why = f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
                    raise error_at(self.path, f"line {number}", why, hint="save the file as UTF-8") from None
                yield text


def describe_json_error(error: ValueError | RecursionError) -> str:
    """Return the cause of a failed `json.loads` in one line.

    >>> describe_json_error(json.JSONDecodeError("Expecting value", "[,]", 1))
    'malformed JSON: Expecting value (column 2)'
    """
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON: {error.msg} (column {error.colno})"
    return "malformed JSON: " + ("nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0])


class JsonList:
    """The elements of one JSON list, decoded as they are read, so that memory does not grow with the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        """Index in `text` of the next character to decode."""
        self.chars_dropped = 0
        self.line = 1
        self.line_position = 0
        """`line` is the line of the character at `line_position`."""

    def rows(self) -> Iterator[ReadValue]:
        """Yield every element. Raises ToolkitError with row and line for malformed JSON."""
        with io.TextIOWrapper(open_file(self.path), encoding="utf-8-sig") as self.file:
            number = 0
            self._take("[")
            while self._peek() != "]":
                if number:
                    self._take(",")
                    self._peek()
                number += 1
                self.line, self.line_position = self._line(self.position), self.position
                place = f"row {number}, line {self.line}"
                yield ReadValue(place, self._value(place), self.chars_dropped + self.position)
            self._take("]")
            if self._peek():
                raise error_at(self.path, f"line {self._line(self.position)}", "more text after the end of the list")

    def _more(self) -> bool:
        """Drop the decoded text and read the next chunk; False at the end of the file."""
        self.line, self.line_position = self._line(self.position), 0
        self.chars_dropped += self.position
        rest = self.text[self.position :]
        try:
            chunk = self.file.read(max(_CHUNK_CHARS, len(rest)))
        except UnicodeDecodeError:
            for _ in Lines(self.path):  # raises at the invalid byte
                pass
            raise
        self.text, self.position = rest + chunk, 0
        return bool(chunk)

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.position)
            self.position = space.end() if space else self.position
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._more():
                return ""

    def _take(self, expected: str) -> None:
        if self._peek() != expected:
            why = f"malformed JSON: expected `{expected}`" + (" or `]`" if expected == "," else "")
            raise error_at(self.path, f"line {self._line(self.position)}", why)
        self.position += 1

    def _value(self, place: str) -> Any:
        """Decode one element. An error that moves when more text is read is an element cut off by the chunk."""
        failed_at = -1
        while True:
            try:
                value, self.position = _DECODER.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                offset = error.pos - self.position
                is_final = offset == failed_at and not error.msg.startswith("Unterminated string")
                line = self._line(error.pos)
                if len(self.text) - self.position > MAX_ROW_BYTES:
                    raise over_limit(self.path, place) from None
                if is_final or not self._more():
                    where = place if place.endswith(f"line {line}") else f"{place} (error in line {line})"
                    raise error_at(self.path, where, f"malformed JSON: {error.msg}") from None
                failed_at = offset
            except (ValueError, RecursionError) as error:
                raise error_at(self.path, place, describe_json_error(error)) from None

    def _line(self, position: int) -> int:
        return self.line + self.text.count("\n", self.line_position, position)
