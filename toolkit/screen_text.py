"""Text on a terminal: wrapped between words under a hanging indent, with levels and verdicts in colour.

A pipe or a file gets it as it is, each line whole and without colour, so that it can be searched and parsed.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TextIO

NARROW = 80  # columns that a table fits into
_HANGING = 2
_LABEL = re.compile(r" *\S+ {2,}(?=\S)")  # `  because   planned ...`: the text below starts where it started
_RED, _GREEN, _YELLOW, _BOLD = "1;31", "32", "33", "1"
_LEVELS = {r"^error(?=:)|(?<=: )error(?=\[)": _RED, r"^warning(?=:)|(?<=: )warning(?=\[)": _YELLOW}
_VERDICTS = {
    r"\b(?:does not fit|nothing fits|no preset)\b": _RED,
    r"\btoo close\b": _YELLOW,
    r"\bfits\b": _GREEN,
    r"^use +\S+": _BOLD,
}


def shown_on(stream: TextIO, text: str, *, verdicts: bool = False) -> str:
    """Return a text as a stream shows it: on a terminal wrapped, and in colour unless NO_COLOR is set."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    text = "\n".join(part for line in text.split("\n") for part in wrapped(line, width))
    if not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", None):
        for words, colour in (_LEVELS | (_VERDICTS if verdicts else {})).items():
            text = re.sub(words, f"\x1b[{colour}m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    return text


def print_lines(lines: Iterable[str]) -> None:
    """Print the lines of an answer to stdout, with verdicts in colour on a terminal."""
    for line in lines:
        print(shown_on(sys.stdout, line, verdicts=True))


def wrapped(line: str, width: int) -> list[str]:
    """Return a line as lines of at most `width` columns, broken between words only; a command to copy stays whole.

    >>> print(*wrapped("  because   it is the fastest of those that fit", 40), sep="\\n")
      because   it is the fastest of those
                that fit
    """
    if line.count(" --") > 2:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label and len(label[0]) <= width // 3 else len(line) - len(line.lstrip()) + _HANGING
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, **options) or [""]  # type: ignore[arg-type]


def table_lines(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> Iterator[str]:
    """Yield rows of cells in aligned columns, those of `left` from the left, as narrow as 80 columns ask for.

    >>> print(*table_lines([("preset", "GiB"), ("zero3", "41.6")]), sep="\\n")
    preset   GiB
    zero3   41.6
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= NARROW else " "
    for cells in rows:
        padded = (f"{cell:{'<' if at in left else '>'}{widths[at]}}" for at, cell in enumerate(cells))
        yield gap.join(padded).rstrip()
