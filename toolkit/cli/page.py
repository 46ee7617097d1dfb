"""`toolkit page`: the planner in a browser, which asks for what `toolkit plan` and `toolkit recommend` print.

    {"request": {"command": "plan", "model": "Qwen/Qwen3-8B", "fields": {"gpu": "h100-sxm", "gpus": "8"}}}

becomes `{"text": ..., "words": ...}`, the command's JSON and its command line, or `{"error": ...}` with the message,
the hint and the field that it is about. Fields have the names of options, and texts as values.
"""

import base64
import contextlib
import dataclasses
import io
import json
import os
import platform
import re
import shlex
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from toolkit.cli.plan import plan, recommend
from toolkit.entry_point import print_message
from toolkit.errors import ToolkitError, shown
from toolkit.models.config_fields import CONFIG
from toolkit.models.hub import no_such_model
from toolkit.plan.options import PlanOptions, RecommendOptions

OPTIONS = {"plan": PlanOptions, "recommend": RecommendOptions}
# Options that read other files or start processes: no page asks for them.
NOT_ASKED = {"config", "dataset", "measured", "verify"}
FLAGS = {"load_in_4bit": {"on": "--load-in-4bit"}}
FLAGS["activation_checkpointing"] = {"on": "--activation-checkpointing", "off": "--no-activation-checkpointing"}
# Options whose field has another name: GPUs are counted per node.
FIELD_OF = {"num_processes": "gpus", "gpus_per_node": "nodes"}
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")  # without one, a browser would take the terminal
FLAG = re.compile(r"--([a-z0-9-]+)")


def page(
    port: Annotated[
        int | None, typer.Option(help="port of this node; by default 8642, or a free one", min=0, max=65535)
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open the page in a browser")] = True,
) -> None:
    """Plan in a browser: what fits, the preset to use, time and cost, as you type.

    Serves the planner page to you alone, on this node, until Ctrl-C. Its answers are those of `plan` and `recommend`.
    """
    import webbrowser

    from toolkit.page.server import DEFAULT_PORT, PageServer

    try:
        server = PageServer(DEFAULT_PORT if port is None else port, reply)
    except OSError as error:
        if port is not None:
            raise ToolkitError(f"port {port}: {error.strerror}", hint="`--port 0` takes a free one") from None
        server = PageServer(0, reply)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(server.address, flush=True)
        if browser and (sys.platform == "darwin" or any(map(os.environ.get, SCREENS))):
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
            print_message("Ctrl-C ends it")
        else:
            tunnel = f"ssh -L {server.port}:127.0.0.1:{server.port} {platform.node()}"
            print_message(f"open it in a browser; from another computer, `{tunnel}` first; Ctrl-C ends it")
        server.serve_forever()


def reply(message: str) -> str:
    """Return the answer to a message of the page, both JSON. Raises ToolkitError for one that no page sends."""
    match json.loads(message):
        case {"preset": str(preset)}:
            return json.dumps({"files": _files_of(preset)})
        case {"request": {"command": "plan" | "recommend" as name, "model": str(model), "fields": dict(fields)} as job}:
            config = job.get("config")
            if all(isinstance(text, str) for text in (config or "", *fields.values())):
                return json.dumps(_answer(name, model.strip(), fields, config))
    raise ToolkitError("this is not a message of the planner page", hint="reload the page")


def _answer(name: str, model: str, fields: Mapping[str, str], config: str | None) -> dict[str, Any]:
    words: dict[str, str] = {}
    try:
        if model.startswith("-"):
            raise no_such_model(model)
        options = _options_of(name, fields)
        words["words"] = shlex.join(["toolkit", *_command_line(name, model, options)])
        with _folder_with(config, model):
            return {"text": _printed(name, model, options), **words}
    except ToolkitError as error:
        return {"error": described(error), **words}


def described(error: ToolkitError) -> dict[str, str | None]:
    """Return an error as the page shows it, with the field that it is about: of an option, or else the model's."""
    flag = FLAG.search(error.message)
    option = flag[1].replace("-", "_") if flag else "model"
    return {"message": error.message, "hint": error.hint, "field": FIELD_OF.get(option, option)}


@contextlib.contextmanager
def _folder_with(config: str | None, model: str) -> Iterator[None]:
    """Work in a folder where MODEL has this configuration, if there is one: a folder's, or a config.json itself."""
    if config is None:
        yield
        return
    path = Path(model) if model.endswith(CONFIG) else Path(model) / CONFIG
    if path.is_absolute() or ".." in path.parts or model.startswith("~"):
        raise ToolkitError(f"{shown(model)} is not a name for a pasted configuration", hint=f"use `{CONFIG}`")
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config, encoding="utf-8", errors="surrogatepass")
        yield


def _options_of(name: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the options that the page's fields mean to a command. Raises ToolkitError for a text that is no number."""
    given = {field: text.strip() for field, text in fields.items() if text.strip()}
    known = {field.name for field in dataclasses.fields(OPTIONS[name])} - NOT_ASKED
    gpus, nodes = _whole("gpus", given.pop("gpus", "8")), _whole("nodes", given.pop("nodes", "1"))
    given["num_processes"] = str(gpus * nodes)
    if nodes > 1:
        given["gpus_per_node"] = str(gpus)
    micro_batch, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    if micro_batch in given and (steps in given or "global_batch_size" in given):
        share = gpus * nodes * _whole(micro_batch, given[micro_batch])
        if "global_batch_size" not in given:
            given["global_batch_size"] = str(share * _whole(steps, given[steps]))
        elif steps not in given:
            sequences = _whole("global_batch_size", given["global_batch_size"])
            if share == 0 or sequences % share:
                raise ToolkitError(
                    f"--global-batch-size is {sequences}, expected a multiple of {share}, a step of all GPUs"
                )
            given[steps] = str(sequences // share)
    return {option: text for option, text in given.items() if option in known}


def _whole(field: str, text: str) -> int:
    return int(_value(field, text, int))


def _value(option: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return (_value(option, text, get_args(kind)[0]),)
    if isinstance(kind, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    try:
        return text == "on" if kind is bool else kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ToolkitError(f"--{option.replace('_', '-')} is {shown(text)}, expected {expected}") from None


def _command_line(name: str, model: str, options: Mapping[str, str]) -> list[str]:
    words = [name, model]
    for option, text in options.items():
        if option in FLAGS:
            words += [FLAGS[option][text]] if text in FLAGS[option] else []
        else:
            words += [f"--{option.replace('_', '-')}", text]
    return words


def _printed(name: str, model: str, options: Mapping[str, str]) -> str:
    """Return what a command prints with `--json`; not through Typer, whose pydantic no browser has."""
    kinds = get_type_hints(OPTIONS[name])
    values = {field.name: field.default for field in dataclasses.fields(OPTIONS[name])}
    values |= {option: _value(option, text, kinds[option]) for option, text in options.items()}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if name == "plan":
            plan(context=None, model=model, as_json=True, cpu=None, **values)
        else:
            recommend(model=model, as_json=True, **values)
    return output.getvalue()


def _files_of(preset: str) -> str:
    import zipfile

    from toolkit.presets.preset import load_preset

    if preset.endswith((".yaml", ".yml")):  # a user's
        raise ToolkitError(f"{shown(preset)} is not the name of a preset")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file, text in load_preset(preset).texts().items():
            archive.writestr(file, text)
    return base64.b64encode(packed.getvalue()).decode()
