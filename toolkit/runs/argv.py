"""Training arguments read without torch: names and values are checked before any rank starts.

    >>> read_arguments(["--max_steps", "8"])["max_steps"]
    '8'

The training script parses the same arguments again with transformers' own parser.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.installed import training_argument_types
from toolkit.runs.arguments import DataArguments, ModelArguments

DEFAULT_BATCH = 8  # transformers' per_device_train_batch_size
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# What transformers' own parser takes for a boolean.
TRUE_WORDS = {"true", "1", "yes", "y", "t"}
FALSE_WORDS = {"false", "0", "no", "n", "f"}


@functools.cache
def argument_types() -> dict[str, str]:
    """Every argument of the training script: ours, then `TrainingArguments`'."""
    ours = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]
    if not training_argument_types():
        raise ToolkitError("transformers is not installed", hint="pip install finetune-toolkit")
    return {field.name: str(field.type) for field in ours} | training_argument_types()


def read_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Names and values from an optional leading YAML or JSON file and flags; flags win.

    Raises ToolkitError for an unknown name (with the nearest one), a word that belongs to no flag, a number
    that is none, or a file that cannot be read.
    """
    rest = list(argv)
    values = read_config_file(Path(rest.pop(0))) if rest and rest[0].endswith(CONFIG_SUFFIXES) else {}
    values |= _read_flags(rest)
    for name, value in values.items():
        _check_value(name, value)
    return values


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys of a training configuration file, each a known argument."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ToolkitError(f"no such configuration file: {path}") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ToolkitError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ToolkitError(f"{path} holds no keys and values", hint="write one `name: value` a line")
    for name in content:
        _check_name(str(name), where=f"{path}: unknown key {name!r}", prefix="")
    return content


def resumes(values: dict[str, Any]) -> bool:
    """Whether the run is to go on from a checkpoint."""
    return str(values.get("resume_from_checkpoint") or "false").lower() not in ("false", "none")


def flag(value: Any) -> bool:
    """A boolean as the command line or a YAML file gives it; a flag without a value is true."""
    return value is True or str(value).lower() in TRUE_WORDS


def integer(values: dict[str, Any], name: str, default: int) -> int:
    """An integer argument, or its default where it is absent or null."""
    return default if values.get(name) is None else int(float(values[name]))


def _read_flags(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ToolkitError(f"unexpected word {word!r}; a flag starts with `--`", hint=f"did you mean `--{word}`?")
        name, equals, given = word[2:].partition("=")
        name = name.replace("-", "_")
        following = [given] if equals else _take_values(words)
        if name not in argument_types() and name.startswith("no_") and _is_boolean(name[3:]):
            name, following = name[3:], ["false"]
        _check_name(name, where=f"unknown argument --{name}", prefix="--")
        values[name] = _one_value(name, following)
    return values


def _one_value(name: str, following: list[str]) -> Any:
    """The words after a flag: one, none where the flag is a boolean, several where it takes a list."""
    if len(following) == 1:
        return following[0]
    if following and "list" not in argument_types()[name]:
        raise ToolkitError(f"unexpected word {following[1]!r} after --{name} {following[0]}")
    if not following and not _is_boolean(name):
        raise ToolkitError(f"--{name} has no value", hint=f"`--{name} VALUE`")
    return following or True


def _take_values(words: list[str]) -> list[str]:
    taken: list[str] = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _is_boolean(name: str) -> bool:
    return "bool" in argument_types().get(name, "")


def _check_name(name: str, *, where: str, prefix: str) -> None:
    types = argument_types()
    if name not in types:
        close = did_you_mean(name, types)
        hint = close.replace("`", f"`{prefix}", 1) if close else "see `python -m toolkit.train --help`"
        raise ToolkitError(where, hint=hint)


def _check_value(name: str, value: Any) -> None:
    """Refuse what is no number, or neither true nor false, where only that can stand."""
    annotation = argument_types()[name]
    if annotation in ("bool", "bool | None") and str(value).lower() not in TRUE_WORDS | FALSE_WORDS | {"none"}:
        raise ToolkitError(f"--{name} is {value!r}, expected true or false")
    expected = {"int": int, "int | None": int, "float": float, "float | None": float}.get(annotation)
    if expected is None or value is None:
        return
    try:
        expected(value)
    except (TypeError, ValueError):
        kind = "a whole number" if expected is int else "a number"
        raise ToolkitError(f"--{name} is {value!r}, expected {kind}") from None
