"""What pydantic found in a file, in one line: key, value and what was expected."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import MAX_SHOWN, shown

# A message may quote the value.
MAX_MESSAGE = 200
_T = TypeVar("_T")


def validate(adapter: TypeAdapter[_T], content: Any, name: str) -> _T:
    """Return `content` as the adapter's type.

    >>> validate(TypeAdapter(dict[str, int]), {"a": 1}, "a.json")
    {'a': 1}

    Raises ToolkitError with the first value of another type, in a file that messages call `name`.
    """
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        raise ToolkitError(f"{name}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Return the first place where a document does not match its type, with all keys that are missing there.

    >>> from pydantic import create_model
    >>> try:
    ...     create_model("Trial", steps=list[int], name=str).model_validate({"steps": [1, "two"]})
    ... except ValidationError as error:
    ...     explain(error)
    "steps[1] is 'two', expected a valid integer, unable to parse string as an integer"
    """
    errors = error.errors(include_url=False)
    place = errors[0]["loc"][:-1]
    missing = [str(found["loc"][-1]) for found in errors if found["type"] == "missing" and found["loc"][:-1] == place]
    if missing:
        return f"{_path(place)} has no {', '.join(missing)}"
    message = str(errors[0]["msg"])[:MAX_MESSAGE].removeprefix("Value error, ").removeprefix("Input should be ")
    if errors[0]["type"] == "value_error" and isinstance(errors[0]["input"], dict):
        return f"{_path(errors[0]['loc'])}: {message}" if errors[0]["loc"] else message
    expected = message if message.startswith("expected") else f"expected {message[:1].lower()}{message[1:]}"
    return f"{_path(errors[0]['loc'])} is {shown(errors[0]['input'])}, {expected}"


def _path(place: tuple[int | str, ...]) -> str:
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in place)
    return words.removeprefix(".") or "it"


def _key(text: str) -> str:
    return text if text.isprintable() and len(text) <= MAX_SHOWN else shown(text)
