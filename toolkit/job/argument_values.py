"""One training argument at a time: its type, its word and its range, as `TrainingArguments` and torch accept them.

>>> check_type("--max_steps", "many", "int")
Traceback (most recent call last):
toolkit.errors.ToolkitError: --max_steps is 'many', expected a whole number

Arguments come from a command line, where each is a word, or from a YAML file, where each has a type.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import MAX_SHOWN, ToolkitError, nearest, shown

# Defaults and limits that options of commands share; the first two are transformers' own, so that a plain
# `accelerate launch` and a plan mean the same job.
PER_DEVICE_TRAIN_BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 1
MAX_SEQ_LENGTH = 1024
# Adding up a trained head's gradient in fp32 moves 8 bytes per weight and chunk, so small chunks cost bandwidth: at
# 1,024 tokens it is as much as the full loss's additional passes over the logits where the hidden size is 2,048.
LOSS_CHUNK_TOKENS = 1024
YEAR_MINUTES = 366 * 24 * 60
# The words that transformers' parser accepts for a boolean.
TRUE_WORDS = {"true", "1", "yes", "y", "t"}
FALSE_WORDS = {"false", "0", "no", "n", "f"}
LARGEST_INTEGER = 2**63 - 1
SHOWN_WORDS = 12
QUOTE_HINT = "quote it in the YAML file"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The numbers that an argument may have."""

    lowest: float | None = None
    highest: float | None = None
    above: float | None = None  # the number must be larger than this
    below: float | None = None
    also: float | None = None  # a number outside that has a meaning of its own

    def has(self, number: float) -> bool:
        """Return True for a number in the range."""
        return number == self.also or (
            (self.lowest is None or number >= self.lowest)
            and (self.highest is None or number <= self.highest)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def expected(self, number: float) -> str:
        """Return what is expected instead of a number outside the range, the words of an error."""
        also = "" if self.also is None else f", or {self.also:g}"
        if self.below is not None:
            return f"a fraction {'above 0 and' if self.lowest is None else 'from 0 to'} below {self.below:g}"
        if self.highest is not None and number > self.highest:
            return f"{self.highest:,} or less"
        return (f"{self.lowest:g} or more" if self.lowest is not None else f"more than {self.above:g}") + also


def is_true(value: Any) -> bool:
    """Return True for a boolean or its word, as transformers' parser reads it."""
    return str(value).lower() in TRUE_WORDS


def as_list(value: Any) -> list[Any]:
    """Return the values of an argument that takes one or more; empty for none."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def check_type(option: str, value: Any, annotation: str) -> None:
    """Raise ToolkitError unless a value can be what the annotation says: a boolean, a number or text."""
    kinds = set(annotation.split(" | "))
    if value is None:
        if kinds <= {"int", "float"}:
            raise ToolkitError(f"{option} is null, expected a number", hint="leave it out for the default")
    elif "bool" in kinds and kinds <= {"bool", "None"}:
        if str(value).lower() not in TRUE_WORDS | FALSE_WORDS:
            raise ToolkitError(f"{option} is {shown(value)}, expected true or false")
    elif kinds <= {"int", "None"}:
        _check_integer(option, value)
    elif kinds <= {"float", "None"}:
        _check_number(option, value)
    elif kinds <= {"list[float]", "None"}:
        for each in as_list(value):
            _check_number(option, each)
    elif "str" in kinds and not any("[" in kind or kind in ("bool", "dict") for kind in kinds):
        _check_text(option, value)
    elif kinds <= {"list[str]", "str", "None"} and not isinstance(value, dict):
        for each in as_list(value):
            _check_text(option, each)


def check_range(option: str, value: Any, allowed: Range) -> None:
    """Raise ToolkitError for a number outside the range; null is the default."""
    if value is not None and not allowed.has(float(value)):
        given = f"{value:g}" if isinstance(value, float) else value
        raise ToolkitError(f"{option} is {given}, expected {allowed.expected(float(value))}")


def check_word(option: str, value: Any, words: Sequence[str]) -> None:
    """Raise ToolkitError, with the nearest word, for a word that is not in the list."""
    if value in words:
        return
    close = nearest_word(str(value), words)
    more = len(words) - SHOWN_WORDS
    listed = [*words[:SHOWN_WORDS], f"{more} more"] if more > 0 else list(words)
    hint = None if close is None else f"did you mean `{close}`?"
    raise ToolkitError(f"{option} is {shown(value)}, expected {', '.join(listed[:-1])} or {listed[-1]}", hint=hint)


def nearest_word(word: str, words: Collection[str]) -> str | None:
    """Return the first of the words that begins like this one, or else the nearest.

    >>> nearest_word("adamw", ["sgd", "adamw_torch", "adamw_8bit"])
    'adamw_torch'
    """
    word = word[:MAX_SHOWN].lower()
    return next((known for known in words if word and known.startswith(word)), None) or nearest(word, words)


def _check_integer(option: str, value: Any) -> None:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ToolkitError(f"{option} is {shown(value)}, expected a whole number")
    if abs(number) > LARGEST_INTEGER:
        raise ToolkitError(f"{option} is {shown(value)}, expected a whole number of at most 64 bits")


def _check_number(option: str, value: Any) -> None:
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool):
        raise ToolkitError(f"{option} is {shown(value)}, expected a number")
    if not math.isfinite(number):
        raise ToolkitError(f"{option} is {shown(value)}, expected a finite number")


def _check_text(option: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ToolkitError(f"{option} is {shown(value)}, expected text", hint=QUOTE_HINT)
    if "\0" in value:
        raise ToolkitError(f"{option} is {shown(value)}, expected text without a null byte")
