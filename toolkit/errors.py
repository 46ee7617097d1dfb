"""Errors that name the value, what was expected, and the next thing to type.

>>> print(ToolkitError("unknown preset 'zero4'", hint="did you mean `zero3`?"))
unknown preset 'zero4'
  hint: did you mean `zero3`?
"""

import difflib
import itertools
import re
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_RUN_FAILED = 1
EXIT_INVALID_INPUT = 2
EXIT_OUT_OF_MEMORY = 3

MAX_SHOWN = 80  # characters of a value in a message

# As `toolkit.entry_point` and ranks print an error, after what a launcher may put before the lines of a rank.
_PRINTED = re.compile(r"^(?:\[\w+\]:)?error: (?P<message>.+)(?:\n(?:\[\w+\]:)?  hint: (?P<hint>.+))?", re.MULTILINE)
# Control characters, and those that reverse the direction of text: a terminal would obey them.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(value: object, *, limit: int = MAX_SHOWN) -> str:
    """Return a value for a message: escaped, and cut to 80 characters or another limit."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def visible(text: str, *, keep: str = "") -> str:
    r"""Return a text with its control characters written out, except those of `keep`.

    >>> print(visible("rows\x1b[2J\n.jsonl"))
    rows\x1b[2J\n.jsonl
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


class ToolkitError(Exception):
    """Invalid input, two lines and exit code 2: `message` says what is wrong, `hint` is the next thing to type."""

    exit_code = EXIT_INVALID_INPUT

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message] if self.hint is None else [self.message, f"  hint: {self.hint}"]
        return "\n".join(visible(line) for line in lines)


def printed_errors(text: str) -> list[ToolkitError]:
    """Return the errors that another process has printed, in their order.

    >>> [(error.message, error.hint) for error in printed_errors("loading\\nerror: no such file: a\\n  hint: b\\n")]
    [('no such file: a', 'b')]
    """
    return [ToolkitError(found["message"], hint=found["hint"]) for found in _PRINTED.finditer(text)]


class OverLimit(ToolkitError):
    """A file is larger, longer or deeper than any file of its kind."""


class RunFailed(ToolkitError):
    """The run started and failed."""

    exit_code = EXIT_RUN_FAILED


class AttestationFailed(RunFailed):
    """What is in effect differs from what the preset specifies."""


class OutOfMemory(ToolkitError):
    """A GPU or the host ran out of memory."""

    exit_code = EXIT_OUT_OF_MEMORY


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name closest to `name`, or None when nothing is close."""
    return next(iter(alike(name, known, cutoff=cutoff)), None)


def alike(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are close to `name`, the closest first: their similarity, raised as Winkler (1990)
    raises it for up to four first letters that are the same.

    >>> alike("adamm", ["adalomo", "adamw", "sgd"])
    ['adamw', 'adalomo']
    """

    def likeness(other: str) -> float:
        ratio = difflib.SequenceMatcher(None, other, name).ratio()
        begins = sum(itertools.accumulate((a == b for a, b in zip(name[:4], other, strict=False)), min))
        return ratio + 0.1 * begins * (1 - ratio)

    return sorted(difflib.get_close_matches(name, list(known), n=8, cutoff=cutoff), key=likeness, reverse=True)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str | None:
    """Return a hint with the nearest known name, or `otherwise` when nothing is close."""
    close = nearest(name, known)
    return f"did you mean `{close}`?" if close else otherwise
