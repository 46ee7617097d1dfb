"""What pydantic found in a file, in one line: key, value and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import shown, shown_key

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# A message may quote the value.
MAX_MESSAGE = 200
MAX_LISTED = 20
_EXPECTED = {
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "expected keys and values"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
    "too_long": "expected fewer",
    "too_short": "expected more",
}
_BOUNDS = {"greater_than_equal": "at least", "greater_than": "more than", "less_than_equal": "at most"}
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
    message, value = _expected(errors[0]), errors[0]["input"]
    if errors[0]["type"] == "value_error" and isinstance(value, dict):
        return f"{_path(errors[0]['loc'])}: {message}" if errors[0]["loc"] else message
    found = f"a list of {len(value):,} values" if isinstance(value, list) and len(value) > MAX_LISTED else shown(value)
    return f"{_path(errors[0]['loc'])} is {found}, {message}"


def _expected(error: ErrorDetails) -> str:
    """What a value should be, in the words of the file's format."""
    if error["type"] in _EXPECTED:
        return _EXPECTED[error["type"]]
    if error["type"] in _BOUNDS:
        return f"expected {_BOUNDS[error['type']]} {next(iter(error['ctx'].values())):g}"
    message = str(error["msg"])[:MAX_MESSAGE].removeprefix("Value error, ").removeprefix("Input should be ")
    if message.startswith("expected") or error["type"] == "value_error":
        return message
    return f"expected {message[:1].lower()}{message[1:]}"


def _path(place: tuple[int | str, ...]) -> str:
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{shown_key(part)}" for part in place)
    return words.removeprefix(".") or "it"
