"""A conversion as the YAML file that the training script reads, and the command that trains with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from toolkit.convert.conversion import PRESET, Conversion
from toolkit.errors import visible

REQUIRED = {"model_name_or_path": "MODEL", "dataset": "FILE", "output_dir": "DIR"}
AT_MOST = 60  # characters of a value in a comment


def yaml_text(conversion: Conversion, *, source: str, file: str) -> str:
    """Return the arguments as YAML; comments name what differs in meaning, and every setting without a counterpart.

    Control characters in a comment are written out: a line break in a key would end the comment, and start an argument.
    """
    lines = [visible(f"# Converted from {conversion.tool}: {source}"), f"#   {launch_command(conversion, file)}"]
    if PRESET in conversion.notes:
        lines.append(visible(f"# --preset {conversion.preset}: {conversion.notes[PRESET]}"))
    given = [name for name in conversion.arguments if name not in conversion.defaults]
    lines += _argument_lines(conversion, given)
    if conversion.defaults:
        lines += ["", f"# Defaults of {conversion.tool}, which differ from ours:"]
        lines += _argument_lines(conversion, conversion.defaults)
    if conversion.not_converted:
        lines += ["", "# Not converted:"]
        left_out = (f"#   {cut(each.key)}: {short(each.value)}  ({each.reason})" for each in conversion.not_converted)
        lines += map(visible, left_out)
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


def short(value: Any) -> str:
    """Return a value in one line, for a comment."""
    return cut(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Return a text of at most 60 characters."""
    return text if len(text) <= AT_MOST else f"{text[: AT_MOST - 1]}…"


def _argument_lines(conversion: Conversion, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name in conversion.notes:
            yield visible(f"# {conversion.notes[name]}")
        yield yaml.safe_dump({name: conversion.arguments[name]}, allow_unicode=True, width=1000, sort_keys=False)[:-1]
