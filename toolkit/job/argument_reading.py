"""Arguments read from a command line or from a YAML or JSON file: names, aliases and types, checked without torch.

>>> read_arguments(["--max_steps", "8", "--packing"])
{'max_steps': 8, 'packing': True}
"""

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.formats import read_columns
from toolkit.errors import ToolkitError, did_you_mean, nearest, shown
from toolkit.files.documents import (
    CONFIGURATION,
    parse_json,
    parse_yaml,
    read_configuration,
    read_json_object,
    unexpected,
)
from toolkit.files.paths import expand_home, find_file, user_path
from toolkit.files.secrets import hide_words, remember_secrets
from toolkit.job.argument_aliases import ALIASES, HINTS, alias_value, canonical_values
from toolkit.job.argument_fields import ARGUMENTS, OWN_ARGUMENTS, DataArguments, ModelArguments
from toolkit.job.argument_values import FALSE_WORDS, TRUE_WORDS, as_list, check_type
from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.optimizers import MUON
from toolkit.parallel.layout import DEGREES
from toolkit.versions import lora_config_fields

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Arguments whose value is a path, or may be one.
PATHS = (
    "model_name_or_path",
    "dataset",
    "eval_dataset",
    "chat_template",
    "output_dir",
    "resume_from_checkpoint",
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
)
# Arguments that hold JSON, and an example of each.
JSON_ARGUMENTS = {
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "activation_checkpointing_kwargs": '{"use_reentrant": false}',
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "accelerator_config": '{"split_batches": true}',
}
# Fields of peft's `LoraConfig` that are set by arguments of their own.
LORA_ARGUMENTS = {
    "r": "--lora_r",
    "lora_alpha": "--lora_alpha",
    "lora_dropout": "--lora_dropout",
    "target_modules": "--lora_target_modules",
}
# Our annotations as they are written on a command line: `--lora_config` is `key=value` words there, keys in a file.
_WORDS = {"tuple[str, ...]": "list[str]", "tuple[float, ...]": "list[float]", "Mapping[str, Any] | None": "list[str]"}


@functools.cache
def argument_types() -> dict[str, str]:
    """Return the name and annotation of every argument of the training script: ours, then `TrainingArguments`'."""
    ours = {name: _WORDS.get(str(field.type), str(field.type)) for name, field in OWN_ARGUMENTS.items()}
    return ours | {name: field.type for name, field in trainer_schema().fields.items()}


@functools.cache
def argument_words() -> dict[str, Sequence[str]]:
    """Return the words of every argument that takes one of a list: ours, then `TrainingArguments`'."""
    ours = {name: field.metadata["choices"] for name, field in OWN_ARGUMENTS.items() if "choices" in field.metadata}
    theirs = {name: field.choices for name, field in trainer_schema().fields.items() if field.choices}
    return ours | theirs | {"optim": (*theirs.get("optim", ()), MUON)}


def read_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Read typed values from an optional leading file and flags; flags win. Raises ToolkitError for invalid ones."""
    hide_words(argv)  # remembers its secrets: an error may quote a word
    rest = list(argv)
    values = read_config_file(Path(rest.pop(0))) if has_config_file(rest) else {}
    return typed_values(values | _read_flags(rest))


def typed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in their types, with `~` expanded in every path; a null is the default and is left out.

    Raises ToolkitError for an unknown name, and for a value of the wrong type.

    >>> typed_values({"dataset": "owner/name", "learning_rate": "2e-5", "lora_r": None})
    {'dataset': ('owner/name',), 'learning_rate': 2e-05}
    """
    for name, value in values.items():
        _check_name(name, where=f"unknown argument --{name[:80]}", prefix="--")
        check_type(f"--{name}", value, argument_types()[name])
    return {name: _typed(name, value) for name, value in values.items() if value is not None}


def has_config_file(argv: Sequence[str]) -> bool:
    """Return True if a configuration file stands before the flags."""
    return bool(argv) and argv[0].endswith(CONFIG_SUFFIXES) and not argv[0].startswith("--")


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a training configuration file; values stay as they are. Raises ToolkitError with file and key."""
    path = user_path(path)
    given = read_configuration(path)
    remember_secrets(given)
    content = canonical_values(given, where=f"{path}: ")
    for name, value in content.items():
        _check_name(name, where=f"{path}: unknown key {shown(name)}", prefix="")
        annotation = argument_types()[name]
        if isinstance(value, dict) and "dict" not in annotation and name not in ("lora_config", "column"):
            raise unexpected(path, name, value, "a value without keys")
        if value is not None:
            check_type(f"{path}: {name}", value, annotation)
    for name in ("dataset", "eval_dataset", "chat_template"):
        if isinstance(value := content.get(name), str | list):  # a file may be named relative to this one
            files = [each if os.path.lexists(each) else str(find_file(each, path) or each) for each in as_list(value)]
            content[name] = files if isinstance(value, list) else files[0]
    return content


def without_degrees(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return training arguments without some degrees of parallelism; one in a YAML file is overridden by 1.

    >>> without_degrees(["--tp", "2", "--cp=2", "--max_steps", "8"], ["tp", "cp"])
    ['--max_steps', '8']
    """
    left = without_flags(words, names)
    in_file = [name for name in DEGREES if name in names and name in read_arguments(left)]
    return [*left, *(word for name in in_file for word in (f"--{name}", "1"))]


def without_flags(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return training arguments without some flags and the one value of each.

    >>> without_flags(["--max_steps", "8", "--seed=1"], ["max_steps"])
    ['--seed=1']
    """
    flags = {f"--{name}" for name in names}
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if before not in flags and word.partition("=")[0] not in flags]


def _typed(name: str, value: Any) -> Any:
    kinds = set(argument_types()[name].split(" | ")) - {"None"}
    if name in PATHS:
        value = [_expanded(each) for each in value] if isinstance(value, list) else _expanded(value)
    if name == "lora_config":
        return lora_fields(value)
    if name == "column":
        return read_columns(value if isinstance(value, dict) else as_list(value))
    if name in JSON_ARGUMENTS or name == "liger_kernel_config":
        return _json_object(name, value)
    if name == "debug" and isinstance(value, list):
        return " ".join(map(str, value))  # as `TrainingArguments` reads several of them
    if kinds == {"int"} or kinds == {"float"}:
        return int(value) if kinds == {"int"} else float(value)
    if "bool" in kinds and str(value).lower() in TRUE_WORDS | FALSE_WORDS:
        return str(value).lower() in TRUE_WORDS
    if name in OWN_ARGUMENTS and kinds <= {"list[str]", "list[float]"}:
        return tuple(float(each) if kinds == {"list[float]"} else str(each) for each in as_list(value))
    return as_list(value) if kinds == {"list[str]"} else value


def _expanded(value: Any) -> Any:
    return expand_home(value) if isinstance(value, str) else value


def _json_object(name: str, value: Any) -> dict[str, Any]:
    option = f"--{name}"
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.startswith("{"):
        content = parse_json(value, option, limits=CONFIGURATION)
        assert isinstance(content, dict)
        return {key: _unquoted(each) for key, each in content.items()}
    if isinstance(value, str) and name == "accelerator_config" and value.endswith(".json"):
        return read_json_object(Path(value), limits=CONFIGURATION)
    if name == "liger_kernel_config":
        hint = "put it into a YAML file: `liger_kernel_config: {rope: true}`"
        raise ToolkitError(f"{option} is {shown(value)}, expected keys and values", hint=hint)
    hint = f"`{option} '{JSON_ARGUMENTS[name]}'`"
    raise ToolkitError(f"{option} is {shown(value)}, expected a JSON object", hint=hint)


def lora_fields(value: Any) -> dict[str, Any]:
    """Return the fields and values of `--lora_config`: `key=value` words, or a mapping of a YAML file.

    >>> lora_fields(["use_dora=true", "layers_to_transform=[0, 1]"])
    {'use_dora': True, 'layers_to_transform': [0, 1]}

    They are any fields of peft's `LoraConfig`, which checks their values itself. Raises ToolkitError for an unknown
    field (with the nearest one), or one that has an argument of its own.
    """
    fields = dict(value) if isinstance(value, dict) else {}
    known = lora_config_fields()
    for word in [] if isinstance(value, dict) else map(str, as_list(value)):
        name, equals, text = word.partition("=")
        if not equals:
            hint = f"`--lora_config {word[:80]}=true`"
            raise ToolkitError(f"--lora_config {shown(word)} is not key=value", hint=hint)
        try:
            fields[name] = parse_yaml(text, f"--lora_config {name}")
        except ToolkitError:
            raise ToolkitError(f"--lora_config {name[:80]} is {shown(text)}, expected a YAML or JSON value") from None
    for name in fields:
        if name in LORA_ARGUMENTS:
            hint = f"`{LORA_ARGUMENTS[name]} VALUE`"
            raise ToolkitError(f"--lora_config {name} has an argument of its own", hint=hint)
        if name not in known:
            hint = did_you_mean(str(name), known, otherwise="see the documentation of peft's `LoraConfig`") or ""
            raise ToolkitError(f"--lora_config has no field {shown(name)}", hint=hint)
    return fields


def _unquoted(value: Any) -> Any:
    """A value of a JSON word, in which `TrainingArguments` takes quoted booleans and numbers for what they hold."""
    if isinstance(value, dict):
        return {key: _unquoted(each) for key, each in value.items()}
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return int(value) if value.isdigit() else float(value)
    return value


def _read_flags(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            hint = f"did you mean `--{word[:80]}`?"
            raise ToolkitError(f"unexpected word {shown(word)}; a flag starts with `--`", hint=hint)
        name, equals, given = word[2:].partition("=")
        name = name.replace("-", "_")
        following = [given] if equals else []
        while not equals and words and not words[0].startswith("--"):
            following.append(words.pop(0))
        if name not in argument_types() and name.startswith("no_") and _is_boolean(name[3:]):
            name, following = name[3:], ["false"]
        alias = ALIASES.get(name)
        if alias is None:
            _check_name(name, where=f"unknown argument --{name[:80]}", prefix="--")
            before = as_list(values.get(name)) if name == "column" else []
            values[name] = _one_value(name, [*before, *following])
        elif alias.values is not None and not following:
            values[alias.name] = alias_value(name, alias, "true")
        else:
            values[alias.name] = alias_value(name, alias, _one_value(alias.name, following))
    return values


def _one_value(name: str, following: list[str]) -> Any:
    if len(following) == 1:
        return following[0]
    if following and "list" not in argument_types()[name]:
        raise ToolkitError(f"unexpected word {shown(following[1])} after --{name} {following[0][:80]}")
    if not following and not _is_boolean(name):
        raise ToolkitError(f"--{name} has no value", hint=f"`--{name} VALUE`")
    return following or True


def _is_boolean(name: str) -> bool:
    return "bool" in argument_types().get(name, "")


def _check_name(name: str, *, where: str, prefix: str) -> None:
    types = argument_types()
    if name not in types:
        close = nearest(name[:200], [*types, *ALIASES])
        ours = ALIASES[close].name if close in ALIASES else close
        guess = f"did you mean `{prefix}{ours}`?" if ours else "see `toolkit train -- --help`"
        raise ToolkitError(where, hint=HINTS.get(name, guess))


def help_text(program: str = "python -m toolkit.train") -> str:
    """Return the help of the training arguments, after the words of a `program`: ours by topic, then transformers'."""
    usage = f"{program} [config.yaml] [--argument VALUE ...]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    topics = {"model, method and measurement": ModelArguments, "data": DataArguments}
    names = {topic: [each.name for each in dataclasses.fields(fields)] for topic, fields in topics.items()}
    for topic, listed in (names | {"of transformers' TrainingArguments": list(trainer_schema().fields)}).items():
        group = parser.add_argument_group(topic)
        for name in listed:
            default, words = getattr(ARGUMENTS.get(name), "default", None), argument_words().get(name, ())
            text = ARGUMENTS[name].metadata["help"] if name in OWN_ARGUMENTS else trainer_schema().fields[name].help
            if not all(word in text for word in words):
                text += f" One of: {', '.join(words)}."
            if default not in (None, ()):
                text += f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
            kind = "WORD" if words else re.split(r" \| |\[", argument_types()[name].removeprefix("None | "))[0].upper()
            group.add_argument(f"--{name}", help=text.replace("%", "%%"), metavar=kind)
    return parser.format_help()
