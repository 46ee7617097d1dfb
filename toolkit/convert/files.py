"""Read the file of another tool, recognise the tool, and convert it.

>>> recognise({"base_model": "Qwen/Qwen3-8B", "micro_batch_size": 2})
'axolotl'
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.convert import axolotl, llama_factory, trl
from toolkit.convert.conversion import Conversion
from toolkit.convert.dialect import load_dialect
from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.reading import is_file, read_text, user_path
from toolkit.files.value_limits import shown
from toolkit.files.yaml_files import read_configuration
from toolkit.job.argument_reading import CONFIG_SUFFIXES
from toolkit.units import KIB

TOOLS: dict[str, Callable[[Mapping[str, Any], Path], Conversion]] = {
    "trl": trl.convert,
    "axolotl": axolotl.convert,
    "llama-factory": llama_factory.convert,
}
TRL_SCRIPTS = ("sft.py", "trl.scripts.sft")
MAX_COMMAND_BYTES = 256 * KIB  # splitting a line into words is slow
OTHER_TRL_COMMANDS = ("distillation", "dpo", "grpo", "kto", "reward", "rloo")


def convert_file(path: Path, tool: str | None = None) -> Conversion:
    """Convert a TRL command or YAML, an axolotl YAML or a LLaMA-Factory YAML; `tool` overrides which of them it is.

    Raises ToolkitError for a file that cannot be read or recognised, and for training that has no counterpart.
    """
    if tool is not None and tool not in TOOLS:
        raise ToolkitError(f"--from is {shown(tool)}, expected {', '.join(TOOLS)}", hint=did_you_mean(tool, TOOLS))
    is_command = path.suffix not in CONFIG_SUFFIXES and tool in (None, "trl")
    if is_command:
        values = read_command(read_text(path, max_bytes=MAX_COMMAND_BYTES), path)
    else:
        values = read_configuration(path)
    found = "trl" if is_command else tool or recognise(values)
    if found is None:
        hint = f"name the tool: `--from {'`, `--from '.join(TOOLS)}`"
        if "distributed_type" in values or "compute_environment" in values:
            hint = "an accelerate YAML is a preset already: `toolkit train --preset FILE`, `toolkit lint FILE`"
        raise ToolkitError(f"{path} is not recognised", hint=hint)
    try:
        return TOOLS[found](values, path)
    except ToolkitError as error:  # a setting is checked where the file's name is not known
        named = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise ToolkitError(named, hint=error.hint) from None


def recognise(values: Mapping[str, Any]) -> str | None:
    """Return the tool that most of the settings belong to, or None."""
    counts = {tool: len(set(load_dialect(tool).markers) & set(values)) for tool in TOOLS}
    best = max(counts.values())
    tools = [tool for tool, count in counts.items() if count == best]
    return tools[0] if best and len(tools) == 1 else None


def read_command(text: str, path: Path) -> dict[str, Any]:
    """Return the settings of a `trl sft ...` or `accelerate launch ... sft.py ...` command, and of its `--config`.

    Raises ToolkitError if there is no such command.
    """
    for line in text.replace("\\\n", " ").splitlines():
        if not any(name in line for name in ("trl", *TRL_SCRIPTS)):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an open quote: text that is not this command
            continue
        found = _training_words(words, path)
        if found is not None:
            return _with_config(_flags(found), path)
    hint = f"a configuration file is named {', '.join('*' + suffix for suffix in CONFIG_SUFFIXES)}"
    raise ToolkitError(f"{path} has no `trl sft` command", hint=hint)


def _training_words(words: Sequence[str], path: Path) -> list[str] | None:
    """The flags of a command line, those of its launcher first; None if it does not train with TRL."""
    names = [Path(word).name for word in words]
    if "trl" in names:
        command = names[names.index("trl") + 1 :]
        if command[:1] == ["sft"]:
            return list(words[names.index("trl") + 2 :])
        if command and command[0] in OTHER_TRL_COMMANDS:
            raise ToolkitError(
                f"{path} is for `trl {command[0]}`, not supervised fine-tuning",
                hint="a preset works with TRL's own trainer: `toolkit preset export DIR`",
            )
    script = next((number for number, name in enumerate(names) if name in TRL_SCRIPTS), None)
    if script is None:
        return None
    launcher = [number for number, name in enumerate(names[:script]) if name in ("launch", "torchrun", "run")]
    before = words[launcher[0] + 1 : script] if launcher else []
    return [*(word for word in before if word != "-m"), *words[script + 1 :]]


def _flags(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    name: str | None = None
    given: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            given.append(word)
            continue
        if name is not None:
            values[name] = True if not given else given[0] if len(given) == 1 else given
        name, equals, value = word[2:].partition("=")
        name, given = name.replace("-", "_"), [value] if equals else []
    return values


def _with_config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Settings of the YAML that `--config` names; flags win."""
    named = values.pop("config", None)
    if named is None:
        return values
    tried = [user_path(str(named)), path.parent / user_path(str(named))]
    found = next(filter(is_file, tried), None)
    if found is None:
        raise ToolkitError(f"{path} names --config {str(named)[:200]}, which does not exist", hint=f"tried {tried[-1]}")
    return read_configuration(found) | values
