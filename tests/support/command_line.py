"""The command line in this process: what a user types, and what it prints."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
import jsonschema
import pytest
from launching import ROOT

from toolkit.cli.program import main, program

SCHEMAS = json.loads((ROOT / "docs" / "reference" / "answers.schema.json").read_text())["$defs"]


def exit_code(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def run_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = exit_code(*words)
    out, err = capsys.readouterr()
    return code, out, err


def parsed(words: Sequence[str]) -> click.Context:
    """Return the options of a command of `toolkit`, as it reads them; it is not run.

    The parent belongs to it: a command keeps the help option of its first context, which has `-h` from there.
    """
    command, (name, *rest) = program(), words
    parent = click.Context(command, info_name="toolkit", **command.context_settings)
    command = command.commands[name]
    while hasattr(command, "commands"):  # `toolkit preset show`: a command of commands
        name, *rest = rest
        command = command.commands[name]
    return command.make_context(name, rest, parent=parent)


def _undocumented(value: Any, schema: Any, place: str = "") -> Iterator[str]:
    """Yield the keys that a schema lists beside others, and not by name."""
    if isinstance(value, list):
        for each in value:
            yield from _undocumented(each, schema.get("items", {}), f"{place}[]")
    elif isinstance(value, dict) and "properties" in schema:
        for key, each in value.items():
            if key not in schema["properties"]:
                yield f"{place}.{key}"
            yield from _undocumented(each, schema["properties"].get(key, {}), f"{place}.{key}")


def check_answer(command: str, answer: Any) -> None:
    """Assert that an answer is as the published schema has it, and has no key that is not listed there."""
    schema = SCHEMAS["failure" if "failure" in answer else command]
    jsonschema.validate(answer, schema)
    assert sorted(set(_undocumented(answer, schema))) == []


def json_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `toolkit WORDS --json` prints; nothing may be on stderr."""
    code, out, err = run_command([*words, "--json"], capsys)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found
