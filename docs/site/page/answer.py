"""Answers of the planner page: the commands `toolkit plan` and `toolkit recommend`, run in the browser's Python.

    {"command": "plan", "model": "Qwen/Qwen3-8B", "fields": {"gpu": "h100-sxm", "gpus": "8", "lora_r": "16"}}

becomes `{"text": ..., "words": ...}`, what the command prints with `--json` and its command line, or `{"error": ...}`
with its message, its hint and the field that it is about. Fields have the names of the command's options, and their
values are texts, as on a command line.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import json
import re
import shlex
import types
import zipfile
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import toolkit.versions as versions

# What the planner reads in the source of transformers, which is not here: as it was where the page was built. Before
# the imports below, which take these names.
FACTS = json.loads(Path(__file__).with_name("transformers_facts.json").read_text())
versions.attention_names = lambda: tuple(FACTS["attention_names"])
versions.model_types = lambda: tuple(FACTS["model_types"])
versions.model_plans = lambda model_type: FACTS["model_plans"].get(model_type, {})
versions.model_class_flags = lambda model_type: FACTS["model_class_flags"].get(model_type)

import toolkit.presets.preset as preset_files  # noqa: E402
from toolkit.cli import plan as commands  # noqa: E402
from toolkit.errors import ToolkitError  # noqa: E402
from toolkit.models.decoders import types_with_formulas  # noqa: E402
from toolkit.models.hub import hub_refusal, hub_unreachable  # noqa: E402
from toolkit.plan.options import PlanOptions, RecommendOptions  # noqa: E402

CONFIG = "config.json"
COMMANDS: dict[str, tuple[Any, type, dict[str, Any]]] = {
    "plan": (commands.plan, PlanOptions, {"context": None, "cpu": None}),
    "recommend": (commands.recommend, RecommendOptions, {}),
}
ON = "on"
FLAG = re.compile(r"--([a-z0-9-]+)")
# Options whose field has another name: GPUs are counted per node, and both commands have the one price.
FIELD_OF = {"num_processes": "gpus", "gpus_per_node": "nodes", "price_per_gpu_hour": "price"}

# The files of the presets do not change while a page is open.
preset_files.read_preset = functools.cache(preset_files.read_preset)


def answer(request_text: str) -> str:
    """Return the answer to a request, both JSON."""
    request = json.loads(request_text)
    name, model = request["command"], request["model"].strip()
    options: dict[str, str] = {}
    try:
        if "refused" in request:
            address = f"https://huggingface.co/{model}"
            reason, status = request["refused"], request.get("status")
            raise hub_unreachable(model) if status is None else hub_refusal(model, reason, status, address=address)
        if request.get("config") is not None:
            save_config(model, request["config"])
        options = options_of(name, request["fields"])
        return json.dumps({"text": printed(name, model, options), "words": command_line(name, model, options)})
    except ToolkitError as error:
        words = command_line(name, model, options) if options else None
        return json.dumps({"error": described(error), "words": words})
    except OSError:  # a process was to be started, which no browser can do: the architecture is to be counted
        message = "transformers has to count this architecture, which takes torch and cannot run in a browser"
        hint = f"run this where both are installed: {command_line(name, model, options)}"
        known = f"the page has formulas for {', '.join(types_with_formulas())}"
        return json.dumps({"error": {"message": f"{message}; {known}", "hint": hint, "field": "model"}})


def described(error: ToolkitError) -> dict[str, str | None]:
    """Return an error as the page shows it, with the field that it is about: of an option, or else the model's."""
    flag = FLAG.search(error.message)
    option = flag[1].replace("-", "_") if flag else "model"
    return {"message": error.message, "hint": error.hint, "field": FIELD_OF.get(option, option)}


def save_config(model: str, text: str) -> None:
    """Write a configuration to where the commands look for the model: a folder, or a config.json."""
    path = Path(model) if model.endswith(CONFIG) else Path(model) / CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def options_of(name: str, fields: dict[str, str]) -> dict[str, str]:
    """Return the options that the page's fields mean to a command. Raises ToolkitError for a text that is no number."""
    given = {field: text.strip() for field, text in fields.items() if text.strip()}
    gpus, nodes = whole("gpus", given.pop("gpus", "8")), whole("nodes", given.pop("nodes", "1"))
    given["num_processes"] = str(gpus * nodes)
    if nodes > 1:
        given["gpus_per_node"] = str(gpus)
    if "price" in given:
        given["price_per_gpu_hour"] = given["price"]
    sizes = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if "global_batch_size" not in given and all(size in given for size in sizes):
        given["global_batch_size"] = str(
            gpus * nodes * whole(sizes[0], given[sizes[0]]) * whole(sizes[1], given[sizes[1]])
        )
    elif "global_batch_size" in given and sizes[0] in given and sizes[1] not in given:
        rows, share = (
            whole("global_batch_size", given["global_batch_size"]),
            gpus * nodes * whole(sizes[0], given[sizes[0]]),
        )
        if share == 0 or rows % share:
            raise ToolkitError(f"--global-batch-size is {rows}, expected a multiple of {share}, a step of all GPUs")
        given[sizes[1]] = str(rows // share)
    known = {field.name for field in dataclasses.fields(COMMANDS[name][1])}
    return {option: text for option, text in given.items() if option in known}


def whole(field: str, text: str) -> int:
    """Return a text as a whole number. Raises ToolkitError for any other."""
    return int(number(field, text, int))


def number(name: str, text: str, kind: type) -> Any:
    """Return a text as a number of a kind, or as it is where no number is due."""
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ToolkitError(f"--{name.replace('_', '-')} is {text[:80]!r}, expected {expected}") from None


def printed(name: str, model: str, given: dict[str, str]) -> str:
    """Return what a command prints with `--json`. Raises ToolkitError as the command does."""
    command, options, arguments = COMMANDS[name]
    values = {field.name: field.default for field in dataclasses.fields(options)}
    for option, text in given.items():
        kind = kind_of(options, option)
        if get_origin(kind) is tuple:
            values[option] = tuple(number(option, word, get_args(kind)[0]) for word in text.split(","))
        else:
            values[option] = text == ON if kind is bool else number(option, text, kind)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command(model=model, as_json=True, **arguments, **values)
    return output.getvalue()


@functools.cache
def kind_of(options: type, name: str) -> Any:
    """Return the type of an option's value: `int` of `int | None`."""
    hint = get_type_hints(options, include_extras=True)[name]
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(kind, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind


def command_line(name: str, model: str, given: dict[str, str]) -> str:
    """Return a command with its options, for a shell."""
    options, words = COMMANDS[name][1], ["toolkit", name, model]
    for option, text in given.items():
        flag, kind = f"--{option.replace('_', '-')}", kind_of(options, option)
        if kind is bool:
            words += [flag] if text == ON else [f"--no-{flag[2:]}"] if option == "activation_checkpointing" else []
        else:
            values = text.split(",") if get_origin(kind) is tuple else [text]
            words += [word for value in values for word in (flag, value)]
    return shlex.join(words)


def files_of(preset: str) -> str:
    """Return a preset's files as a zip, base64."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file, text in preset_files.load_preset(preset).texts().items():
            archive.writestr(file, text)
    return base64.b64encode(packed.getvalue()).decode()
