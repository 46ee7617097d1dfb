"""Detect a row's format, check it, and convert it to a conversation, a prompt with its completion, or a text.

    >>> sample = to_sample({"instruction": "Hej", "input": "", "output": "Hello"}, "alpaca")
    >>> [message["role"] for message in sample.messages]
    ['user', 'assistant']

A key whose value is None counts as missing, because Arrow adds such keys to rows that lack them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, nearest

Row = Mapping[str, Any]
Message = dict[str, Any]

# In order of preference: a row with both `messages` and `prompt` (UltraChat) is a conversation.
REQUIRED_FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL_FIELDS = {"alpaca": ("input",), **dict.fromkeys(("messages", "sharegpt", "prompt_completion"), ("tools",))}
FORMATS = tuple(REQUIRED_FIELDS)

ANSWERS = ("answer", "response", "target")  # names that other data sets give to the text to learn

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
    first_supervised_message: int = 0
    """Assistant turns before this index are context: the prompt of a prompt/completion row."""
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


def detect_format(row: Row) -> str:
    """Return the first format of `FORMATS` whose required fields are all in the row.

    Raises ToolkitError with the fields found and the fields expected.
    """
    present = _present(row)
    for name, fields in REQUIRED_FIELDS.items():
        if all(field in present for field in fields):
            return name
    if {"chosen", "rejected"} <= present.keys():
        hint = (
            "`toolkit train --preset NAME --module trl.scripts.dpo -- --dataset_name FOLDER_OR_HUB_ID ...` trains on it"
        )
        raise ToolkitError("`chosen` and `rejected` are preference data, for DPO and not for this script", hint=hint)
    expected = "; ".join(f"{' + '.join(fields)} ({name})" for name, fields in REQUIRED_FIELDS.items())
    raise ToolkitError(
        f"fields found: {field_names(present)}",
        hint=_renaming(present) or f"expected one of: {expected}; `datasets.Dataset.rename_columns` renames yours",
    )


def _renaming(present: Row) -> str | None:
    """How to rename the fields, if they are those of a format under names that other data sets give to them."""
    for answer in ("output", "completion"):
        known = {"question": "instruction", "query": "instruction", "content": "text", **dict.fromkeys(ANSWERS, answer)}
        known |= {field: field for fields in REQUIRED_FIELDS.values() for field in fields}
        close = {name: known.get(nearest(name.lower(), known, cutoff=0.8) or "", name) for name in present}
        renames = {name: field for name, field in close.items() if name != field}
        if any(set(fields) <= set(close.values()) for fields in REQUIRED_FIELDS.values()):
            asked = ", ".join(f"`{field}` for `{name}`" for name, field in renames.items())
            code = f"load_dataset('json', data_files='FILE')['train'].rename_columns({renames}).to_json('NEW.jsonl')"
            return f"did you mean {asked}? To rename: `from datasets import load_dataset; {code}`"
    return None


def check_row(row: Row, data_format: str) -> None:
    """Raise ToolkitError with the name of a field that is missing or has the wrong type."""
    present = _present(row)
    for field in REQUIRED_FIELDS[data_format]:
        if field not in present:
            expected = " + ".join(REQUIRED_FIELDS[data_format])
            raise ToolkitError(
                f"no field `{field}`; fields found: {field_names(present)}",
                hint=f"the first row has the {data_format} format: {expected}; every row needs these fields",
            )
    fields = {name: value for name, value in format_fields(present, data_format).items() if name != "tools"}
    has_lists = data_format == "prompt_completion" and any(isinstance(value, list) for value in fields.values())
    has_turns = has_lists or data_format in ("messages", "sharegpt")
    for field, value in fields.items():
        if has_turns:
            _check_turns(value, field)
        else:
            _check_text(value, f"`{field}`")
    _tools(present)


def to_sample(row: Row, data_format: str) -> Sample:
    """Convert a row that has passed `check_row`."""
    row = _present(row)
    if data_format == "messages":
        return Sample(messages=_messages(row["messages"]), tools=_tools(row))
    if data_format == "sharegpt":
        turns = [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return Sample(messages=turns, tools=_tools(row))
    if data_format == "alpaca":
        user = "\n\n".join(part for part in (row["instruction"], row.get("input", "")) if part)
        return Sample(messages=[{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}])
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
    names = REQUIRED_FIELDS[data_format] + OPTIONAL_FIELDS.get(data_format, ())
    return {name: row[name] for name in names if row.get(name) is not None}


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
