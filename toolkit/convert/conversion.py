"""Convert the file of another tool, and write the result as the YAML file that the training script reads."""

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.convert import axolotl, llama_factory, trl
from toolkit.convert.commands import MS_SWIFT, WITH_ITS_TRAINER, named_arguments, read_command
from toolkit.convert.draft import PRESET, Conversion, Draft, load_dialect, plan_table
from toolkit.convert.job_script import read_calls
from toolkit.convert.programs import TORCHTUNE, program_of, program_schema
from toolkit.convert.sources import take_launch
from toolkit.errors import ToolkitError, did_you_mean, shown, visible
from toolkit.files.documents import read_configuration, read_text
from toolkit.job.argument_reading import CONFIG_SUFFIXES
from toolkit.units import KIB

# The module that runs another tool's file, and the words before it.
MODULES = {
    **{"TRL": "trl.scripts.sft -- --config", "axolotl": "axolotl.cli.train --"},
    **{"LLaMA-Factory": "llamafactory.launcher --", "ms-swift": "swift.cli.sft -- --config"},
}
TOOLS = {"trl": trl.convert, "axolotl": axolotl.convert, "llama-factory": llama_factory.convert}
COMMON_COMMANDS = ("grpo", "dpo", "kto", "reward")  # of those that have the same settings
MAX_COMMAND_BYTES = 256 * KIB  # splitting a line into words is slow
MODEL_NAMES = ("model_name_or_path", "model", "base_model", "model_name", "model_id", "model_path")
OWN_SCRIPT = "a script"  # of one's own, in the table of what is not read
WORDS = ("--preset", "--optim", "--method")
A_METHOD = re.compile(r"(?<![a-z])(?:dpo|grpo|kto|orpo|simpo|rloo)(?![a-z]|_v)")  # in a script's name
OFF = ("false", "no", "0", "none", "")
SWITCHES = ("--activation-checkpointing", "--packing", "--load-in-4bit")
REQUIRED = {"model_name_or_path": "MODEL", "dataset": "FILE", "output_dir": "DIR"}
AT_MOST = 60  # characters of a value in a comment


def convert_file(path: Path, tool: str | None = None) -> Conversion:
    """Convert a TRL command or YAML, an axolotl YAML or a LLaMA-Factory YAML; `tool` overrides which of them it is.

    Raises ToolkitError for a file that cannot be read or recognised, and for training that has no counterpart.
    """
    tool, values = read_settings(path, tool)
    commands = program_schema(tool).commands_of(values)
    if commands and "sft" not in commands:
        command = next((each for each in COMMON_COMMANDS if each in commands), commands[0])
        raise ToolkitError(f"{path} is for `trl {command}`, not supervised fine-tuning", hint=WITH_ITS_TRAINER)
    return convert_settings(tool, values, path)


def read_settings(
    path: Path, tool: str | None = None, *, methods: Collection[str] = (), others: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the tool that a file is for, and its settings; of TRL's commands for `methods`, `method` is one.

    `others` are programs that have no converter, and are read too.

    Raises ToolkitError for a file that cannot be read or recognised.
    """
    if tool is not None and tool not in TOOLS:
        raise ToolkitError(f"--from is {shown(tool)}, expected {', '.join(TOOLS)}", hint=did_you_mean(tool, TOOLS))
    if path.suffix not in CONFIG_SUFFIXES and tool in (None, "trl"):
        text = read_text(path, max_bytes=MAX_COMMAND_BYTES)
        found = read_command(text, path, methods=methods)
        if found is None:
            raise _no_command(text, path)
        values, tool = found, str(found.pop("program", "trl"))
    else:
        values = read_configuration(path)
        tool = tool or program_of(values)
    if tool in (*TOOLS, *others):
        return tool, values
    if tool is not None:
        raise ToolkitError(f"{path} is a file of {tool}, which is not read", hint=flags_instead(tool, values, path))
    hint = f"name the tool: `--from {'`, `--from '.join(TOOLS)}`"
    if "distributed_type" in values or "compute_environment" in values:
        hint = f"an accelerate YAML is a preset: `toolkit plan MODEL --preset {path}`, `toolkit lint {path}`"
    raise ToolkitError(f"{path} is not recognised", hint=hint)


def _no_command(text: str, path: Path) -> ToolkitError:
    """Return what to type where no program is known: of a script of one's own, what its words say."""
    names = {name for key in plan_table()["unread"][OWN_SCRIPT] for name in re.split("[+=]", key)} | {*MODEL_NAMES}
    calls = [(len(names & call.arguments.keys()), call) for call in read_calls(text) if call.script]
    known, call = max(calls, key=lambda counted: counted[0], default=(0, None))
    if call is not None and known:
        values = named_arguments(call)
        with contextlib.suppress(ToolkitError):
            draft = Draft(load_dialect("trl"), values)
            values["preset"] = take_launch(draft, path)
            values |= {"num_processes": draft.num_processes} if draft.num_processes else {}
        method = A_METHOD.search(str(values.pop("method", f"{path.name} {call.script}")).lower())
        values |= {"method": method[0]} if method else {}
        if any(str(values.get(name, True)).lower() in OFF for name in ("use_lora", "lora_enable", "use_peft", "lora")):
            values = {name: value for name, value in values.items() if not name.startswith("lora_r")}
        message = f"{path} starts {cut(str(call.script))}: what its settings mean is in its own code"
        return ToolkitError(message, hint=f"{flags_instead(OWN_SCRIPT, values, path)}, and what that code decides")
    file = next((word for _, call in calls for word in call.words if word.endswith(CONFIG_SUFFIXES)), None)
    hint = f"a configuration file is named {', '.join('*' + suffix for suffix in CONFIG_SUFFIXES)}"
    if file is not None:
        hint = f"`toolkit plan --config {shlex.quote(file)}`, where that is a file of one of them"
    return ToolkitError(f"{path} has no `trl`, `axolotl`, `llamafactory-cli` or `swift` command", hint=hint)


def flags_instead(program: str, values: Mapping[str, Any], path: Path) -> str:
    """Return the command that plans the job of a file that is not converted, with what is in the file."""
    if program == MS_SWIFT:
        runs = f"; `toolkit train --module {MODULES[MS_SWIFT]} {path}` runs it"
        return f"`toolkit plan --config {path}`{runs if path.suffix in CONFIG_SUFFIXES else ''}"
    model = next((str(values[name]) for name in MODEL_NAMES if isinstance(values.get(name), str)), "$")
    words = [f"toolkit plan {'MODEL' if '$' in model else shlex.quote(model)}"]
    if program == TORCHTUNE:
        words.append("--loss chunked_output")
    if program == OWN_SCRIPT:
        words.append(f"--program {'trl' if 'method' in values else 'trainer'}")
    for key, flag in plan_table()["unread"][program].items():
        names, _, only = key.partition("=")
        parts = [_nested(values, name) for name in names.split("+")]
        is_sum = len(parts) > 1 and all(str(each).isdecimal() for each in parts)
        value = sum(map(int, parts)) if is_sum else parts[0] if len(parts) == 1 else None
        is_known = isinstance(value, int | str) and str(value).lower() not in OFF
        is_number = re.fullmatch("[1-9][0-9]{0,8}", str(value)) is not None
        is_known &= flag in WORDS or value is True or is_number or flag in SWITCHES
        is_known &= only in ("", str(value))
        if is_known and not any(word.startswith(flag) for word in words):
            words.append(flag if value is True or flag in SWITCHES else f"{flag} {shlex.quote(str(value))}")
    if program == OWN_SCRIPT and not any(word.startswith("--max-seq-length") for word in words):
        words.append("--max-seq-length 2048")
    return f"`{' '.join(words)}`"


def _nested(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def add_reader(error: ToolkitError, files: Collection[str]) -> None:
    """Let a refused file that reads like another tool's say what reads it."""
    for file in (file for file in files if file.endswith(CONFIG_SUFFIXES) and file in error.message):
        with contextlib.suppress(ToolkitError):
            program = program_of(values := read_configuration(Path(file)))
            if program is not None and program not in TOOLS:
                error.hint = f"a file of {program}: {flags_instead(program, values, Path(file))}"
            elif program is not None:
                tool = program_schema(program).tool
                reads = f"; or `toolkit convert-config {file}`, `toolkit plan --config {file}`"
                error.hint = f"a file of {tool}: `toolkit train --module {MODULES[tool]} {file}` runs it{reads}"


def convert_settings(tool: str, values: Mapping[str, Any], path: Path) -> Conversion:
    """Convert the settings of a file. Raises ToolkitError for training that has no counterpart."""
    try:
        return TOOLS[tool](values, path)
    except ToolkitError as error:  # a setting is checked where the file's name is not known
        named = error.message if str(path) in error.message else f"{path}: {error.message}"
        is_variable = error.hint is None and "'$" in error.message
        hint = "a variable of the shell: write its value, or give the option" if is_variable else error.hint
        raise ToolkitError(named, hint=hint) from None


def yaml_text(conversion: Conversion, *, source: str, file: str) -> str:
    """Return the arguments as YAML; comments name what differs in meaning, and every setting without a counterpart.

    Control characters in a comment are written out: a line break in a key would end the comment, and start an argument.
    """
    lines = [visible(f"# Converted from {conversion.tool}: {source}"), f"#   {launch_command(conversion, file)}"]
    if PRESET in conversion.notes:
        lines.append(visible(f"# --preset {conversion.preset}: {conversion.notes[PRESET]}"))
    for name in [*(each for each in conversion.arguments if each not in conversion.defaults), *conversion.defaults]:
        if name in conversion.defaults[:1]:
            lines += ["", f"# Defaults of {conversion.tool}, which differ from ours:"]
        if name in conversion.notes:
            lines.append(visible(f"# {conversion.notes[name]}"))
        argument = {name: conversion.arguments[name]}
        lines.append(yaml.safe_dump(argument, allow_unicode=True, width=1000, sort_keys=False)[:-1])
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
