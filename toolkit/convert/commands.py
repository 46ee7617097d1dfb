"""Commands in shell scripts that train with a program whose files are known: what their words say."""

import contextlib
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.convert.job_script import (
    DEFAULT,
    PAIR,
    PYTHON,
    LauncherCall,
    processes_of_call,
    read_calls,
    with_exports,
)
from toolkit.convert.programs import program_of
from toolkit.errors import ToolkitError
from toolkit.files.documents import parse_yaml, read_configuration
from toolkit.files.paths import find_file, user_path
from toolkit.job.argument_reading import CONFIG_SUFFIXES

OPEN_R1 = "0.18.0"  # the version of TRL that its setup.py pins
LLAMA_FACTORY, MS_SWIFT = "llama-factory", "ms-swift"
# Options of launchers that say how many ranks train, and how these share the model.
OF_THE_LAUNCH = (
    *("config_file", "num_processes", "use_deepspeed", "deepspeed_config_file", "zero_stage", "use_fsdp"),
    *("offload_optimizer_device", "offload_param_device", "fsdp_sharding_strategy", "fsdp_version"),
)
TRAINING = ("", "train", "sft", "pt", "rlhf")  # commands of `OF_TOOLS` that train
COUNTS = ("num-processes", "nproc-per-node", "num-gpus")  # which `processes_of_call` reads
# Programs whose commands alone say whose file it is.
OF_TOOLS = {"llamafactory-cli": LLAMA_FACTORY, "swift": MS_SWIFT, "axolotl": "axolotl"}
WITH_ITS_TRAINER = "a preset works with TRL's own trainer: `toolkit preset export DIR`"


def read_command(text: str, path: Path, *, methods: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the settings of the first command that trains with a program whose files are known, above those of the
    file that it names; None without one.

    A command for one of `methods` has that as its `method`, and one of another program than TRL that as its `program`.
    """
    for call in read_calls(text):
        decided = _decided(call, ("sft", *methods), path)
        if decided is not None:
            named = named_arguments(with_exports(call, text), typed="program" in decided)
            return _with_file(decided | named, path)
    return None


def named_arguments(call: LauncherCall, *, typed: bool = False) -> dict[str, Any]:
    """Return the words behind a script's name, and the launcher's options, by their names; True for a flag.

    `typed`: numbers and booleans as in a YAML, `key=value` as well, and of the launcher's options those about ranks
    alone.
    """
    options = {name: value and DEFAULT.sub(r"\1", value) for name, value in call.options.items()}
    call = replace(call, options=options, before=DEFAULT.sub(r"\1", call.before))
    flags = {name.replace("-", "_"): value for name, value in options.items() if name not in COUNTS}
    named: dict[str, Any] = {name: value for name, value in flags.items() if not typed or name in OF_THE_LAUNCH}
    named |= dict(word.split("=", 1) for word in call.words if typed and PAIR.match(word))
    named |= {name.replace("-", "_"): value for name, (value, _) in call.arguments.items()}
    for name, value in named.items():
        value = DEFAULT.sub(r"\1", value) if isinstance(value, str) else value
        is_scalar = typed and re.fullmatch(r"\d+|[Tt]rue|[Ff]alse", str(value))
        named[name] = True if value is None else parse_yaml(str(value), name) if is_scalar else value
    processes = None if call.tool == PYTHON else processes_of_call(call)
    return named | ({} if processes is None else {"num_processes": processes})


def _decided(call: LauncherCall, methods: Collection[str], path: Path) -> dict[str, Any] | None:
    """What the words in front of a command's flags say; None if it does not train with one of these programs."""
    script, program = call.script or "", OF_TOOLS.get(call.tool)
    file = next((word for word in call.words[:1] if word.endswith(CONFIG_SUFFIXES)), None)
    if program is not None and script.rpartition(" ")[2] not in TRAINING:
        return None
    if {"finetuning_type", "stage"} <= call.arguments.keys():
        program = LLAMA_FACTORY
    elif program is None and file and (found := find_file(file, path)):
        with contextlib.suppress(ToolkitError):  # of data, for one
            program = program_of(read_configuration(found))
    named = {"config": file} if file else {}
    if program not in (None, "trl"):
        return {"program": program, **named}
    if call.tool == "trl":
        method = script.removeprefix("trl ")
        if method not in methods:
            raise ToolkitError(f"{path} is for `{script}`, not supervised fine-tuning", hint=WITH_ITS_TRAINER)
    else:
        name = Path(script).name
        method = name.removesuffix(".py").removeprefix("trl.scripts.")
        if name in ("trl", "$(which trl)"):  # TRL's program, started by the launcher instead of by itself
            method = next(iter(call.words), "")
        if program is not None:
            method = method.removeprefix("run_")  # as the alignment handbook names its scripts
        elif method == name or method not in methods:
            return None
    pinned = {"pinned_trl": OPEN_R1} if "open_r1" in script else {}
    return pinned | named | ({"method": method} if method != "sft" and method in methods else {})


def _with_file(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings of flags, above those of the YAML that a command names."""
    if "nproc_per_node" in settings:  # behind `axolotl train a.yml --launcher torchrun --`
        settings["num_processes"] = settings.pop("nproc_per_node")
    if str(settings.get("num_processes")).startswith("$"):  # a variable that the script does not assign
        del settings["num_processes"]
    for name in ("m", "module", "launcher"):  # of `python -m`, accelerate and axolotl
        settings.pop(name, None)
    named = settings.pop("config", None)
    if named is None:
        return settings
    found = find_file(str(named), path)
    if found is None:
        hint = f"tried {path.parent / user_path(str(named))}, and the folders above"
        raise ToolkitError(f"{path} names {str(named)[:200]}, which does not exist", hint=hint)
    return read_configuration(found) | settings
