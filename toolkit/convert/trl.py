"""`trl sft`: its flags and its YAML (tables/trl.yaml). TRL's source is named where a rule comes from it."""

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.convert import sources
from toolkit.convert.draft import Conversion, Draft, load_dialect
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
LLAMA_FACTORY = "llama-factory"
# Options of launchers that say how many ranks train, and how these share the model.
OF_THE_LAUNCH = (
    *("config_file", "num_processes", "use_deepspeed", "deepspeed_config_file", "zero_stage", "use_fsdp"),
    *("offload_optimizer_device", "offload_param_device", "fsdp_sharding_strategy", "fsdp_version"),
)
TRAINING = ("", "train", "sft", "pt", "rlhf")  # commands of `OF_TOOLS` that train
COUNTS = ("num-processes", "nproc-per-node", "num-gpus")  # which `processes_of_call` reads
# Programs whose commands alone say whose file it is.
OF_TOOLS = {"llamafactory-cli": LLAMA_FACTORY, "swift": "ms-swift", "axolotl": "axolotl"}
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


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the settings of `trl sft`, from its flags, its YAML or both."""
    if not values.get("model_name_or_path"):
        raise ToolkitError(f"{file} names no model_name_or_path", hint="is it a configuration of `trl sft`?")
    draft = Draft(load_dialect("trl"), values)
    if values.get("max_length", "") is None:
        draft.report("max_length", None, draft.dialect.reason("max_length"))
    _take_lora(draft)
    _take_data(draft)
    draft.translate()
    if "loss_on" not in draft.arguments and "completion_only_loss" in draft.left:
        draft.assign("loss_on", "all", "completion_only_loss")
    draft.set_defaults()
    return draft.finish(preset=sources.take_launch(draft, file))


def _take_lora(draft: Draft) -> None:
    settings, fields = draft.dialect.defaults_with["lora_r"], draft.dialect.lora_config
    if not draft.is_on("use_peft"):
        reason = "no adapter is trained: `use_peft` is not set"
        draft.leave_out("lora_r", *settings, *fields, "lora_task_type", reason=reason, has_effect=False)
        return
    draft.assign("lora_r", draft.get("lora_r", 16), "use_peft", "lora_r")
    for name in settings:
        draft.move(name)
    if draft.is_on("load_in_4bit"):
        draft.move("load_in_4bit")
    draft.take_lora_config()


def _take_data(draft: Draft) -> None:
    listed = []
    for prefix in draft.entries("datasets"):
        key = f"{prefix}fraction"
        weight = draft.number(key, 1) if key in draft.left else None
        listed.append(sources.named_data(draft.nested(prefix), prefix)._replace(weight=(weight, key)))
    if listed:
        draft.leave_out("dataset_name", reason="`datasets` is given, and used instead")
        note = "TRL leaves rows out until the shares are right; here rows of the smaller data sets are repeated"
        sources.set_datasets(draft, listed, weights_note=note)
        draft.move("test_split_size", "val_size")
    name = draft.get("dataset_name")
    if name is None:
        return
    split, config = ((draft.get(key), key) for key in ("dataset_train_split", "dataset_config"))
    sources.set_datasets(draft, [sources.NamedData(str(name), ("dataset_name",), split, config)])
    # TRL evaluates on another split of the same data (scripts/sft.py, scripts/utils.py).
    if str(draft.get("eval_strategy", "no")) == "no":
        draft.leave_out("dataset_test_split", reason="there is no evaluation: `eval_strategy` is not set")
        return
    draft.default("eval_dataset", str(name))
    draft.move("dataset_test_split", "eval_dataset_split")
    draft.default("eval_dataset_split", "test")
