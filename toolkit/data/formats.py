"""Detect a row's format, check it, and convert it to a conversation, a prompt with its completion, or a text.

    >>> sample = to_sample({"instruction": "Hej", "input": "", "output": "Hello"}, "alpaca")
    >>> [message["role"] for message in sample.messages]
    ['user', 'assistant']

A key whose value is None counts as missing, because Arrow adds such keys to rows that lack them.
"""

import contextlib
import json
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, nearest

Row = Mapping[str, Any]
Message = dict[str, Any]
Columns = Mapping[str, str]  # field of a format -> column of the data that holds it
NO_COLUMNS: Columns = {}

# In order of preference: a row with both `messages` and `prompt` (UltraChat) is a conversation.
REQUIRED_FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL_FIELDS = dict.fromkeys(REQUIRED_FIELDS, ("tools",)) | {"alpaca": ("input", "system"), "text": ()}
FORMATS = tuple(REQUIRED_FIELDS)
FORMAT_FIELDS = {name: fields + OPTIONAL_FIELDS[name] for name, fields in REQUIRED_FIELDS.items()}
FIELDS = {field: field for fields in FORMAT_FIELDS.values() for field in fields}
# Names that other data sets give to the fields, beside those of the answer.
OTHER_NAMES = {"question": "instruction", "query": "instruction", "context": "input", "content": "text"}
OTHER_NAMES |= {"system_prompt": "system", **FIELDS}

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# LLaMA-Factory's `function_call` is the model's turn, `observation` the tool's result.
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "tool_response", "function", "function_response", "observation"), "tool"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One row of any format: exactly one of `messages`, `prompt` (with `completion`) and `text` is set."""

    messages: list[Message] | None = None
    first_supervised_message: int = 0  # assistant turns before it are context: the prompt of a row
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


def detect_format(row: Row, columns: Columns = NO_COLUMNS) -> str:
    """Return the first format of `FORMATS` whose required fields are all in the row, those of a named column first.

    Raises ToolkitError with the fields found and the fields expected.
    """
    present = _present(with_columns(row, named := columns_of(row, columns)))
    for name in sorted(FORMATS, key=lambda name: not named.keys() & set(FORMAT_FIELDS[name])):
        if all(field in present for field in REQUIRED_FIELDS[name]):
            return name
    for field in (field for field, column in named.items() if value_at(row, column) is None):
        raise no_column_error(field, columns, row)
    if {"chosen", "rejected"} <= present.keys():
        hint = (
            "`toolkit train --preset NAME --module trl.scripts.dpo -- --dataset_name FOLDER_OR_HUB_ID ...` trains on it"
        )
        raise ToolkitError("`chosen` and `rejected` are preference data, for DPO and not for this script", hint=hint)
    expected = "; ".join(f"{' + '.join(fields)} ({name})" for name, fields in REQUIRED_FIELDS.items())
    raise ToolkitError(
        f"fields found: {field_names(present)}",
        hint=_suggested_columns(row, columns) or f"expected one of: {expected}; `--column text=NAME` names a column",
    )


def _suggested_columns(row: Row, columns: Columns) -> str | None:
    """The columns to name, if the row has the fields of a format under names that other data sets give to them."""
    for answer in ("output", "completion"):
        known, found = OTHER_NAMES | dict.fromkeys(("answer", "response", "target"), answer), dict(columns)
        for name, value in _present(row).items():
            field = known.get(nearest(name.lower(), known, cutoff=0.8) or "", name)
            if field not in row:
                found.setdefault(field, name + ((field == answer and _path_of_text(value)) or ""))
        for name in FORMATS:
            named = {field: column for field, column in found.items() if field in FORMAT_FIELDS[name]}
            with contextlib.suppress(ToolkitError):
                check_row(with_columns(row, named), name)
                return f"did you mean `{_words(named)}`?"
    return None


def _path_of_text(value: object) -> str | None:
    """The path to a text, if there is one: `.text.0` in `{"text": ["Lund"], "answer_start": [3]}`."""
    items = sorted(_items(value).items(), key=lambda item: item[0] not in ("text", "value"))
    paths = ((key, _path_of_text(item)) for key, item in items)
    return "" if isinstance(value, str) else next((f".{key}{path}" for key, path in paths if path is not None), None)


def check_row(row: Row, data_format: str, columns: Columns = NO_COLUMNS) -> None:
    """Raise ToolkitError with the name of a field that is missing or has the wrong type, and of its column."""
    present, labels = _present(row), {field: f"`{field}`" for field in FORMAT_FIELDS[data_format]}
    labels |= {field: f"`{field}` (column `{name[:80]}`)" for field, name in columns.items()}
    for field in REQUIRED_FIELDS[data_format]:
        if field not in present:
            expected = " + ".join(REQUIRED_FIELDS[data_format])
            is_null = field in row and field not in columns  # a column that is missing is None too
            problem = f"{labels[field]} is null" if is_null else f"no field {labels[field]}"
            raise ToolkitError(
                f"{problem}; fields found: {field_names(present)}",
                hint=f"the first row has the {data_format} format: {expected}; every row needs these fields",
            )
    fields = {name: value for name, value in format_fields(present, data_format).items() if name != "tools"}
    has_lists = data_format == "prompt_completion" and any(isinstance(value, list) for value in fields.values())
    has_turns = has_lists or data_format in ("messages", "sharegpt")
    for field, value in fields.items():
        if has_turns:
            _check_turns(value, field)
        else:
            _check_text(value, labels[field])
    _tools(present)


def to_sample(row: Row, data_format: str) -> Sample:
    """Convert a row that has passed `check_row`."""
    row = _present(row)
    if data_format == "messages":
        return Sample(messages=_messages(row["messages"]), tools=_tools(row))
    if data_format == "sharegpt":
        messages = [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return Sample(messages=messages, tools=_tools(row))
    if data_format == "alpaca":
        user = "\n\n".join(part for part in (row["instruction"], row.get("input", "")) if part)
        turns = [("system", row.get("system")), ("user", user), ("assistant", row["output"])]
        return Sample(messages=[{"role": role, "content": text} for role, text in turns if text or role != "system"])
    if data_format == "text":
        return Sample(text=row["text"])
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Sample(prompt=prompt, completion=completion)
    messages = _messages(prompt) + _messages(completion)
    return Sample(messages=messages, first_supervised_message=len(prompt), tools=_tools(row))


def with_system_prompt(sample: Sample, system_prompt: str | None) -> Sample:
    """Return the conversation with this system message in front, unless it begins with its own."""
    messages = sample.messages
    if system_prompt is None or not messages or messages[0]["role"] in ("system", "developer"):
        return sample
    context = sample.first_supervised_message + 1 if sample.first_supervised_message else 0
    opened = [{"role": "system", "content": system_prompt}, *messages]
    return replace(sample, messages=opened, first_supervised_message=context)


def format_fields(row: Row, data_format: str) -> dict[str, Any]:
    """Return the fields that the format reads; others (ids, dates, scores) are dropped."""
    return {name: row[name] for name in FORMAT_FIELDS[data_format] if row.get(name) is not None}


def field_names(fields: Iterable[str], *, at_most: int = 12) -> str:
    """Return field names in one printable line."""
    names = list(fields)
    shown = [name if name.isprintable() and len(name) <= 60 else repr(name[:60]) for name in names[:at_most]]
    return ", ".join(shown + [f"and {len(names) - at_most} more"] * (len(names) > at_most)) or "none"


def _present(row: Row) -> dict[str, Any]:
    return {str(key): value for key, value in row.items() if value is not None}


def _without_none(value: Any) -> Any:
    """Arrow unifies the tool calls of all rows into one struct, and fills a call's missing fields with None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", dict: "object"}
    return names.get(type(value), type(value).__name__)


def read_columns(value: Any) -> dict[str, str]:
    """Return the columns of `--column`, words or a mapping. Raises ToolkitError for what is not a field of a format."""
    pairs = value.items() if isinstance(value, Mapping) else (str(word).partition("=")[::2] for word in value)
    columns = {str(field): str(column or "") for field, column in pairs}
    right = {field: column for field, column in columns.items() if field in FIELDS and column}
    for field, column in sorted(columns.items() - right.items()):
        close = OTHER_NAMES.get(field) or nearest(field.lower(), FIELDS) or "text"
        right |= {column: field} if column in FIELDS else {close: column or (field not in FIELDS and field) or "NAME"}
        what = f"--column {field[:80]}={column[:80]}: expected FIELD=COLUMN, and a field of {', '.join(FIELDS)}"
        raise ToolkitError(what, hint=f"did you mean `{_words(right)}`?")
    return columns


def _words(columns: Columns) -> str:
    return " ".join(["--column", *(shlex.quote(f"{field}={column}") for field, column in columns.items())])


def columns_of(row: Row, columns: Columns) -> Columns:
    """Return the columns that a data set is read with, by its first row: not those of another whose fields it has."""
    return {f: name for f, name in columns.items() if f not in row or name in row or value_at(row, name) is not None}


def value_at(row: Row, column: str) -> Any:
    """Return the value of a column, or at a path of keys and indices with dots between them; None for none."""
    value: Any = row
    for key in [column] if column in row else column.split("."):
        value = _items(value).get(key)
    return value


def _items(value: Any) -> Row:
    items = {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
    return items if isinstance(items, Mapping) else {}


def with_columns(row: Row, columns: Columns) -> dict[str, Any]:
    """Return the row with each of the columns under the name of its field."""
    left = {name: value for name, value in row.items() if name not in columns.values()}
    return left | {field: value_at(row, column) for field, column in columns.items()}


def no_column_error(field: str, columns: Columns, row: Row) -> ToolkitError:
    """Return the error for a column that no row has, with the nearest of those that there are: the keys of `row`."""
    names, column = [*row, *(f"{name}.{key}" for name in row for key in _items(row[name]))], columns[field]
    close = nearest(column, names) or nearest(column.lower(), names) or "NAME"
    what = f"--column {field}={column[:80]}: the rows have no such column; theirs are {field_names(row)}"
    return ToolkitError(what, hint=f"did you mean `{_words({**columns, field: close})}`?")


# -- checks


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise ToolkitError(f"{what} is {_json_type(value)}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        why = f"has an unpaired surrogate at character {error.start}, which is not valid text"
        raise ToolkitError(f"{what} {why}") from None


def _check_turns(turns: object, field: str) -> None:
    if not isinstance(turns, list):
        hint = "CSV cells are strings: keep conversations in JSONL or Parquet" if isinstance(turns, str) else None
        raise ToolkitError(f"`{field}` is {_json_type(turns)}, expected a list of objects", hint=hint)
    if not turns:
        raise ToolkitError(f"`{field}` is empty: a conversation needs at least one message")
    for number, turn in enumerate(turns, start=1):
        where = f"message {number} of `{field}`"
        if not isinstance(turn, dict):
            raise ToolkitError(f"{where} is {_json_type(turn)}, expected an object")
        _check_turn(_present(turn), where, sharegpt=field == "conversations")


def _check_turn(turn: Row, where: str, *, sharegpt: bool) -> None:
    role, content = ("from", "value") if sharegpt else ("role", "content")
    known: Collection[str] = SHAREGPT_ROLES if sharegpt else ROLES
    if "tool_calls" in turn and not sharegpt:
        turn = {"content": "", **turn}
    missing = next((key for key in (role, content) if key not in turn), None)
    if missing is not None:
        hint = f"each message is {{{role}, {content}}}"
        if sharegpt and "role" in turn:
            hint = "rename the field `conversations` to `messages` for {role, content}"
        elif not sharegpt and "from" in turn:
            hint = "rename the field `messages` to `conversations` for {from, value}"
        raise ToolkitError(f"{where} has no `{missing}`; fields found: {field_names(turn)}", hint=hint)
    name = turn[role]
    _check_text(name, f"the role of {where}")
    if name not in known:
        nearest = did_you_mean(name, known, otherwise=f"expected one of: {', '.join(known)}")
        raise ToolkitError(f"{where} has the unknown role {name!r}", hint=nearest)
    _check_text(turn[content], f"the {content} of {where}")


# -- conversions


def _tools(row: Row) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise ToolkitError("`tools` is a string that is not JSON, expected a list of objects") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ToolkitError(f"`tools` is {_json_type(tools)}, expected a list of objects")
    return [_without_none(tool) for tool in tools] if tools else None


def _messages(messages: list[Message]) -> list[Message]:
    """Messages without None; a tool call without content gets an empty one, which every template renders."""
    return [{"content": "", **_without_none(message)} for message in messages]
