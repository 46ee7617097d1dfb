"""Convert the file of another tool, and write the result as the YAML file that the training script reads.

>>> recognise({"base_model": "Qwen/Qwen3-8B", "micro_batch_size": 2})
'axolotl'
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.convert import axolotl, llama_factory, trl
from toolkit.convert.draft import PRESET, Conversion, load_dialect
from toolkit.errors import ToolkitError, did_you_mean, shown, visible
from toolkit.files.documents import read_configuration
from toolkit.files.reading import read_text
from toolkit.job.argument_reading import CONFIG_SUFFIXES
from toolkit.units import KIB

TOOLS: dict[str, Callable[[Mapping[str, Any], Path], Conversion]] = {
    "trl": trl.convert,
    "axolotl": axolotl.convert,
    "llama-factory": llama_factory.convert,
}
MAX_COMMAND_BYTES = 256 * KIB  # splitting a line into words is slow
REQUIRED = {"model_name_or_path": "MODEL", "dataset": "FILE", "output_dir": "DIR"}
AT_MOST = 60  # characters of a value in a comment


def convert_file(path: Path, tool: str | None = None) -> Conversion:
    """Convert a TRL command or YAML, an axolotl YAML or a LLaMA-Factory YAML; `tool` overrides which of them it is.

    Raises ToolkitError for a file that cannot be read or recognised, and for training that has no counterpart.
    """
    if tool is not None and tool not in TOOLS:
        raise ToolkitError(f"--from is {shown(tool)}, expected {', '.join(TOOLS)}", hint=did_you_mean(tool, TOOLS))
    if path.suffix not in CONFIG_SUFFIXES and tool in (None, "trl"):
        values, found = trl.read_command(read_text(path, max_bytes=MAX_COMMAND_BYTES), path), "trl"
    else:
        values = read_configuration(path)
        found = tool or recognise(values) or ""
    if found not in TOOLS:
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


def yaml_text(conversion: Conversion, *, source: str, file: str) -> str:
    """Return the arguments as YAML; comments name what differs in meaning, and every setting without a counterpart.

    Control characters in a comment are written out: a line break in a key would end the comment, and start an argument.
    """
    lines = [visible(f"# Converted from {conversion.tool}: {source}"), f"#   {launch_command(conversion, file)}"]
    if PRESET in conversion.notes:
        lines.append(visible(f"# --preset {conversion.preset}: {conversion.notes[PRESET]}"))
    lines += _argument_lines(conversion, [name for name in conversion.arguments if name not in conversion.defaults])
    if conversion.defaults:
        lines += ["", f"# Defaults of {conversion.tool}, which differ from ours:"]
        lines += _argument_lines(conversion, conversion.defaults)
    if conversion.not_converted:
        lines += ["", "# Not converted:"]
    for each in conversion.not_converted:
        value = cut(json.dumps(each.value, ensure_ascii=False, default=str))
        lines.append(visible(f"#   {cut(each.key)}: {value}  ({each.reason})"))
    if conversion.redundant:
        lines += ["", visible(f"# Needs nothing here: {', '.join(map(cut, conversion.redundant))}")]
    return "\n".join(lines) + "\n"


def launch_command(conversion: Conversion, file: str) -> str:
    """Return the command that trains with the file, with a placeholder for what the configuration does not say."""
    words = ["toolkit train --preset", conversion.preset]
    if conversion.num_processes is not None:
        words.append(f"--num-processes {conversion.num_processes}")
    missing = [f"--{name} {value}" for name, value in REQUIRED.items() if name not in conversion.arguments]
    return " ".join([*words, "--", visible(shlex.quote(file)), *missing])


def cut(text: str) -> str:
    """Return a text of at most 60 characters."""
    return text if len(text) <= AT_MOST else f"{text[: AT_MOST - 1]}…"


def _argument_lines(conversion: Conversion, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name in conversion.notes:
            yield visible(f"# {conversion.notes[name]}")
        yield yaml.safe_dump({name: conversion.arguments[name]}, allow_unicode=True, width=1000, sort_keys=False)[:-1]
