"""Files that anyone may have written: only regular ones, JSON and YAML within limits; and words for a refused value.

Lines of JSON are appended by a process that may be killed at any byte: a last line without its line feed was cut off
and is left out; any other line that is no object is an error, with its number.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import yaml

from toolkit.errors import MAX_SHOWN, OverLimit, ToolkitError, shown
from toolkit.units import KIB, MIB

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

MAX_TEXT_BYTES = 64 * MIB
MAX_LINES_BYTES = 4096 * MIB
MAX_YAML_BYTES = MIB
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YAML_TAG = "tag:yaml.org,2002:"
# PyYAML takes quadratic time for `1:2:3...` (base 60), minutes for a megabyte of it.
MAX_NUMBER_CHARACTERS = 400
_NUMBER = re.compile(r"[-+0-9.][0-9a-fA-Fx_:.+-]*")
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
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
_T = TypeVar("_T")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises ToolkitError, also for a pipe or a device, which might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would wait for a writer
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ToolkitError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, expected a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return a file's content. Raises ToolkitError as `open_file` does, and OverLimit above `max_bytes`."""
    with open_file(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(content) > max_bytes:
        most = f"{max_bytes // MIB} MiB" if max_bytes >= MIB else f"{max_bytes // KIB} KiB"
        raise OverLimit(f"{path} has more than {most}, expected at most that for a file of its kind")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a UTF-8 file's text. Raises ToolkitError as `read_bytes` does, and for bytes that are not UTF-8."""
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ToolkitError(f"{path} is not UTF-8 text: byte {error.start}") from None


def _unreadable(path: Path, error: OSError | ValueError) -> ToolkitError:
    name = str(path)[:1024]
    if isinstance(error, FileNotFoundError):
        return ToolkitError(f"no such file: {name}")
    return ToolkitError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")


def read_folder_name(path: Path) -> str:
    """Return the name in DeepSpeed's `latest`. Raises ToolkitError for anything but the name of a folder beside it."""
    name = read_text(path, max_bytes=256).strip()
    if name in ("", ".", "..") or "/" in name or "\0" in name or not (path.parent / name).is_dir():
        raise ToolkitError(f"{path} holds {name[:40]!r}, expected the name of a folder beside it")
    return name


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


CONFIGURATION = Limits(values=20_000, depth=40)  # a configuration has a few hundred values, four levels deep
RECORDS = Limits(values=5_000_000, depth=64)  # results of a long comparison, and the index of a large model's shards
# transformers writes 10**30 as the `model_max_length` of a tokenizer that has none.
TOKENIZER = Limits(values=5_000_000, depth=64, integer_bits=128)


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


# -- JSON


def read_json(path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False) -> Any:
    """Return the value in a JSON file. Raises ToolkitError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path), limits=limits, allow_nan=allow_nan)


def read_json_object(
    path: Path, *, limits: Limits = RECORDS, max_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ToolkitError as `read_json` does, and for another type."""
    return as_mapping(read_json(path, limits=limits, max_bytes=max_bytes, allow_nan=allow_nan), str(path))


def parse_json(
    text: str, name: str, *, limits: Limits = RECORDS, allow_nan: bool = False, is_line: bool = False
) -> Any:
    """Return the value in a text that messages call `name`; `is_line` where that names a line already.

    Raises ToolkitError for malformed JSON, with its line; for more or deeper values than `limits`; for integers beyond
    64 bits; and, unless `allow_nan`, for NaN and infinities.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        place = name if is_line else f"{name}, line {error.lineno}"
        raise ToolkitError(f"{place}: not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        limits.check(name, values=0, depth=limits.depth + 1)
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ToolkitError(f"{name} is not JSON: {str(error).split(';')[0]}") from None
    check_values(content, name, limits, allow_nan=allow_nan)
    return content


def settings_for_path(value: str, name: str) -> dict[str, Any] | None:
    """Return the settings that stand where a path may: JSON, or base64 of it, as accelerate takes both; or None.

    Raises ToolkitError as `parse_json` does.
    """
    with suppress(ValueError):
        value = value if value.lstrip().startswith("{") else base64.urlsafe_b64decode(value).decode()
    return as_mapping(parse_json(value, name, limits=CONFIGURATION), name) if value.lstrip().startswith("{") else None


def as_mapping(content: Any, name: str) -> dict[str, Any]:
    """Return a value that must be keys and values. Raises ToolkitError for another type."""
    if not isinstance(content, dict):
        raise ToolkitError(f"{name} holds {type(content).__name__}, expected keys and values")
    return content


def read_json_lines(
    path: Path, *, max_line_bytes: int = MAX_TEXT_BYTES, allow_nan: bool = False, hint: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete lines of a file, without blank ones: what messages call the line, and its object.

    Raises ToolkitError as `open_file` does, and with `hint` for a line that is not a JSON object; OverLimit for a
    larger file or line.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
            raise OverLimit(f"{path} has more than {MAX_LINES_BYTES // MIB} MiB, more than any file of its kind")
        for number, line in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), start=1):
            name = f"{path}, line {number}"
            if len(line) > max_line_bytes:
                raise OverLimit(f"{name}: longer than {max_line_bytes:,} bytes")
            if not line.endswith(b"\n"):
                return
            if line.strip():
                try:
                    content = as_mapping(parse_json(line.decode(), name, allow_nan=allow_nan, is_line=True), name)
                except UnicodeDecodeError as error:
                    raise ToolkitError(f"{name}: not UTF-8 text (byte {error.start})", hint=hint) from None
                except ToolkitError as error:
                    raise type(error)(error.message, hint=error.hint or hint) from None
                yield name, content


def complete_bytes(path: Path) -> int:
    """Return the size of a file without a last line that was cut off; 0 without a file."""
    if not path.exists():
        return 0
    with open_file(path) as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))


# -- YAML


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration: JSON if its name ends so, otherwise YAML.

    Raises ToolkitError as `read_text` and `parse_yaml` do, for another type, and for a key that is not text.
    """
    if path.suffix == ".json":
        return as_mapping(read_json(path, limits=CONFIGURATION, max_bytes=MAX_YAML_BYTES), str(path))
    content = as_mapping(parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), str(path)), str(path))
    for key in content:
        if not isinstance(key, str):
            raise ToolkitError(f"{path} has the key {shown(key)}, expected a name", hint="put the key in quotes")
    return content


def read_table(module: str, name: str = "") -> Any:
    """Return the YAML file beside a module of the toolkit, given as its `__file__`: of its name, or another."""
    path = Path(module).with_suffix(".yaml")
    return yaml.load((path.with_stem(name) if name else path).read_text(encoding="utf-8"), Loader=LOADER)


def parse_yaml(text: str, name: str, *, limits: Limits = CONFIGURATION) -> Any:
    """Return the value in a text that messages call `name`.

    Raises ToolkitError for malformed YAML, with its line; for tags that name objects; and as `check_yaml` and
    `check_values` do.
    """
    check_yaml(text, name, limits)
    try:
        content = yaml.load(text, Loader=LOADER)
    except Exception as error:  # PyYAML raises KeyError, TypeError and more for scalars like `!!int ''`
        raise not_yaml(name, error) from None
    check_values(content, name, limits)
    return content


def not_yaml(name: str, error: Exception) -> ToolkitError:
    """Return the error for a text that PyYAML refuses, in one line."""
    if isinstance(error, yaml.constructor.ConstructorError) and "constructor for the tag" in str(error.problem):
        tag = str(error.problem).split("'")[1][:80]
        what = f"{name} has a value with the tag {tag!r}, which names an object; nothing was executed"
        return ToolkitError(what, hint="use only plain keys, numbers and strings")
    why = str(error) if isinstance(error, yaml.YAMLError | ValueError | OverflowError) else type(error).__name__
    why = " ".join(why.split()).replace('in "<unicode string>", ', "at ")
    hint = "indent with spaces" if "a tab character" in why or r"'\t'" in why else None
    return ToolkitError(f"{name} is not YAML: {why[:400]}", hint=hint)


def check_yaml(text: str, name: str, limits: Limits) -> None:
    """Raise ToolkitError for deeper or more values than the limits, counted before any value exists.

    An alias counts as often as it is used: a few lines of them can stand for billions of values.
    """
    around: list[tuple[str | None, float]] = [(None, 0)]  # anchor and values of each collection that is not closed yet
    anchored: dict[str | None, float] = {}
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, 1))
                anchored[event.anchor] = math.inf
                limits.check(name, values=0, depth=len(around) - 1)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, values = around.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor, values = None, anchored.get(event.anchor, 1)
                if values == math.inf:
                    raise ToolkitError(f"{name} has an alias *{str(event.anchor)[:40]} inside of what it stands for")
            elif isinstance(event, yaml.ScalarEvent):
                anchor, values = event.anchor, 1
                if len(event.value) > MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(event.value):
                    raise ToolkitError(f"{name} has a number of {len(event.value):,} characters")
            else:
                continue
            anchored[anchor] = values
            around[-1] = (around[-1][0], around[-1][1] + values)
            limits.check(name, values=around[-1][1], depth=0)
    except (yaml.YAMLError, ValueError) as error:
        raise not_yaml(name, error) from None


# -- messages


def unexpected(name: object, key: str, value: Any, expected: str, *, hint: str | None = None) -> ToolkitError:
    """Return the error for a value of a file: the file, the key, the value, and what was expected.

    >>> print(unexpected("mine.yaml", "zero_optimization.stage", [3], "0, 1, 2 or 3"))
    mine.yaml: zero_optimization.stage is [3], expected 0, 1, 2 or 3
    """
    return ToolkitError(f"{name}: {key} is {shown(value)}, expected {expected}", hint=hint)


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
