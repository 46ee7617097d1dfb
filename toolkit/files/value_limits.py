"""Values that were read from JSON or YAML: how many, how deep, which numbers, and the words for one that is refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.errors import OverLimit, ToolkitError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

MAX_SHOWN = 80  # characters of a value in a message
MAX_SHOWN_PATH = 400
MAX_LISTED = 20
# Half of a UTF-16 pair, which `\ud800` in JSON makes; no text with one can be written to a file.
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPECTED = {
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "expected keys and values"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
    "too_long": "expected fewer",
    "too_short": "expected more",
}
_BOUNDS = {"greater_than_equal": "at least", "greater_than": "more than", "less_than_equal": "at most"}
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one kind of file holds at most."""

    values: int
    depth: int
    integer_bits: int = 64

    def check(self, name: str, *, values: float, depth: int) -> None:
        """Raise OverLimit for counts above the limits, before time is spent on them."""
        if values > self.values:
            raise OverLimit(f"{name} has more than {self.values:,} values, more than any file of its kind")
        if depth > self.depth:
            raise OverLimit(f"{name} is nested more than {self.depth} deep, deeper than any file of its kind")


# A configuration has a few hundred values, four levels deep.
CONFIGURATION = Limits(values=20_000, depth=40)
# Results of a long comparison, and the index of a large model's shards.
RECORDS = Limits(values=5_000_000, depth=64)
# transformers writes 10**30 as the `model_max_length` of a tokenizer that has none.
TOKENIZER = Limits(values=5_000_000, depth=64, integer_bits=128)


def shown(value: Any, *, limit: int = MAX_SHOWN) -> str:
    """Return a value for a message: escaped, and cut to 80 characters or another limit."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def unexpected(name: object, key: str, value: Any, expected: str, *, hint: str | None = None) -> ToolkitError:
    """Return the error for a value of a file: the file, the key, the value, and what was expected.

    >>> print(unexpected("mine.yaml", "zero_optimization.stage", [3], "0, 1, 2 or 3"))
    mine.yaml: zero_optimization.stage is [3], expected 0, 1, 2 or 3
    """
    return ToolkitError(f"{name}: {key} is {shown(value)}, expected {expected}", hint=hint)


def check_values(content: Any, name: str, limits: Limits, *, allow_nan: bool = False) -> None:
    """Raise ToolkitError for values beyond the limits and for numbers and text that no file of ours holds.

    Those are integers of more bits than `limits` allows, text that UTF-8 cannot hold, what YAML's tags make (bytes,
    sets, pairs), and (unless `allow_nan`) NaN and infinities. The message says under which key or index the value is.
    """
    pending: list[tuple[Any, int]] = [([content], 0)]
    seen = 0
    while pending:
        collection, depth = pending.pop()
        seen += len(collection)
        limits.check(name, values=seen, depth=depth + bool(collection))
        for key, value in collection.items() if isinstance(collection, dict) else enumerate(collection):
            if isinstance(value, dict | list):
                pending.append((value, depth + 1))
            problem = _problem(value, limits, allow_nan) or _problem(key, limits, allow_nan)
            if problem is not None:
                raise ToolkitError(f"{name}{f': {_path((key,))}' if depth else ''} {problem}")


def _problem(value: Any, limits: Limits, allow_nan: bool) -> str | None:
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            return f"is {value[:40]!r}, which is not valid Unicode"
    elif isinstance(value, float):
        if not math.isfinite(value) and not allow_nan:
            return f"is {value}, expected a finite number"
    elif isinstance(value, int):
        if value.bit_length() > limits.integer_bits:
            return f"is an integer of {value.bit_length():,} bits, expected at most {limits.integer_bits}"
    elif isinstance(value, bytes | set | tuple):
        return f"is of the type {type(value).__name__}, expected plain text, numbers and lists"
    return None


def validate(adapter: TypeAdapter[_T], content: Any, name: str) -> _T:
    """Return `content` as the adapter's type.

    Raises ToolkitError with the first value of another type, in a file that messages call `name`.
    """
    from pydantic import ValidationError

    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        raise ToolkitError(f"{name}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Return the first place where a document does not match its type, with all keys that are missing there.

    >>> from pydantic import ValidationError, create_model
    >>> try:
    ...     create_model("Trial", steps=list[int], name=str).model_validate({"steps": [1, "two"]})
    ... except ValidationError as error:
    ...     explain(error)
    "steps[1] is 'two', expected a valid integer, unable to parse string as an integer"
    """
    errors = error.errors(include_url=False)
    first, place = errors[0], errors[0]["loc"][:-1]
    missing = [str(each["loc"][-1]) for each in errors if each["type"] == "missing" and each["loc"][:-1] == place]
    if missing:
        return f"{_path(place)} has no {', '.join(missing)}"
    message, value = first["msg"][:200].removeprefix("Value error, "), first["input"]
    if first["type"] == "value_error" and isinstance(value, dict):
        return f"{_path(first['loc'])}: {message}" if first["loc"] else message
    if first["type"] in _BOUNDS:
        message = f"expected {_BOUNDS[first['type']]} {next(iter(first['ctx'].values())):g}"
    expected = _EXPECTED.get(first["type"]) or message.replace("Input should be", "expected")
    given = f"a list of {len(value):,} values" if isinstance(value, list) and len(value) > MAX_LISTED else shown(value)
    return f"{_path(first['loc'])} is {given}, {expected}"


def _path(place: tuple[int | str, ...]) -> str:
    """Return keys and indices as `jobs[3].name`; a key is escaped and cut only if it has to be."""
    words = ""
    for part in place:
        plain = str(part) if len(str(part)) <= MAX_SHOWN and str(part).isprintable() else shown(str(part))
        words += f"[{part}]" if isinstance(part, int) else f".{plain}"
    return words.removeprefix(".") or "it"
