"""Read text files of rows: lines, and one long JSON list element by element. A syntax error has a row and a line."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files.documents import open_file
from toolkit.units import MIB

# A row is a document at most: a long book has 5 MiB.
MAX_ROW_BYTES = 16 * MIB
LONGEST_TOKEN = 16  # characters of what JSON has beside texts and numbers: `-Infinity`, `\ud83d`
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class ReadValue(NamedTuple):
    """A value read from a file: usually a row."""

    place: str  # its place in words, for error messages: `row 250, line 250`
    value: Any
    bytes_read: int  # approximate bytes read up to its end


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
    """The elements of one JSON list, decoded as they are read: the text of two rows, at most, is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self.position = 0  # index in `text` of the next character to decode
        self.line = 1  # the line of that character
        self.chars_dropped = 0

    def rows(self) -> Iterator[ReadValue]:
        """Yield every element. Raises ToolkitError with row and line for malformed JSON."""
        with io.TextIOWrapper(open_file(self.path), encoding="utf-8-sig") as self.file:
            number = 0
            self._take("[")
            while self._next() != "]":
                if number:
                    self._take(",")
                    self._next()
                number += 1
                place = f"row {number}, line {self.line}"
                yield ReadValue(place, self._value(place), self.chars_dropped + self.position)
            self._take("]")
            if self._next():
                raise error_at(self.path, f"line {self.line}", "more text after the end of the list")

    def _next(self) -> str:
        """Go to the next character that is not white space, and return it; empty at the end of the file.

        A row that begins there is completely in `text`.
        """
        while True:
            space = _SPACE.match(self.text, self.position)
            self._go_to(space.end() if space else self.position)
            if len(self.text) - self.position >= MAX_ROW_BYTES or not (chunk := self._read()):
                return self.text[self.position : self.position + 1]
            self.chars_dropped += self.position
            self.text, self.position = self.text[self.position :] + chunk, 0

    def _go_to(self, position: int) -> None:
        self.line += self.text.count("\n", self.position, position)
        self.position = position

    def _read(self) -> str:
        try:
            return self.file.read(MAX_ROW_BYTES)
        except UnicodeDecodeError:
            for _ in Lines(self.path):  # raises at the invalid byte
                pass
            raise

    def _take(self, expected: str) -> None:
        if self._next() != expected:
            why = f"malformed JSON: expected `{expected}`" + (" or `]`" if expected == "," else "")
            raise error_at(self.path, f"line {self.line}", why)
        self.position += 1

    def _value(self, place: str) -> Any:
        try:
            value, end = _DECODER.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            at_end = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - LONGEST_TOKEN
            if at_end and len(self.text) - self.position > MAX_ROW_BYTES:
                raise over_limit(self.path, place) from None
            line = self.line + self.text.count("\n", self.position, error.pos)
            where = place if line == self.line else f"{place} (error in line {line})"
            raise error_at(self.path, where, f"malformed JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise error_at(self.path, place, describe_json_error(error)) from None
        self._go_to(end)
        return value
