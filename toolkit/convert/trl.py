"""`trl sft`: its flags and its YAML (tables/trl.yaml). TRL's source is named where a rule comes from it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.convert import sources
from toolkit.convert.draft import NUM_PROCESSES, PRESET, Conversion, Draft, load_dialect
from toolkit.convert.job_script import LauncherCall, read_calls
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_configuration
from toolkit.files.paths import find_file, user_path
from toolkit.job.argument_reading import CONFIG_SUFFIXES

OPEN_R1 = "0.18.0"  # the version of TRL that its setup.py pins
WITH_ITS_TRAINER = "a preset works with TRL's own trainer: `toolkit preset export DIR`"


def read_command(text: str, path: Path, *, methods: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of the first command that trains with TRL or ms-swift, above those of its `--config`.

    A command for one of `methods` has that as its `method`, and one of ms-swift that as its `program`. Raises
    ToolkitError if there is no such command.
    """
    for call in read_calls(text):
        decided = _decided(call, ("sft", *methods), path)
        if decided is not None:
            flags = {**call.options, **{name: value for name, (value, _) in call.arguments.items()}}
            named = {name.replace("-", "_"): True if value is None else value for name, value in flags.items()}
            return _with_file(decided | named, path)
    hint = f"a configuration file is named {', '.join('*' + suffix for suffix in CONFIG_SUFFIXES)}"
    raise ToolkitError(f"{path} has no `trl sft` command", hint=hint)


def _decided(call: LauncherCall, methods: Collection[str], path: Path) -> dict[str, Any] | None:
    """What the words in front of a command's flags say; None if it does not train with TRL or ms-swift."""
    script = call.script or ""
    if call.tool == "swift":
        file = next((word for word in call.words[:1] if word.endswith(CONFIG_SUFFIXES)), None)
        return {"program": "ms-swift"} | ({"config": file} if file else {})
    if call.tool == "trl":
        method = script.removeprefix("trl ")
        if method not in methods:
            raise ToolkitError(f"{path} is for `{script}`, not supervised fine-tuning", hint=WITH_ITS_TRAINER)
    else:
        name = Path(script).name
        method = name.removesuffix(".py").removeprefix("trl.scripts.")
        if name in ("trl", "$(which trl)"):  # TRL's program, started by the launcher instead of by itself
            method = next(iter(call.words), "")
        if method == name or method not in methods:
            return None
    pinned = {"pinned_trl": OPEN_R1} if "open_r1" in script else {}
    return pinned | ({} if method == "sft" else {"method": method})


def _with_file(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings of flags, above those of the YAML that `--config` names."""
    for name in ("nproc_per_node", "num_processes"):  # a variable that the script does not assign: it is not known
        if str(settings.get(name)).startswith("$"):
            del settings[name]
    for name in ("m", "module"):  # of `python -m` and accelerate
        settings.pop(name, None)
    named = settings.pop("config", None)
    if named is None:
        return settings
    found = find_file(str(named), path)
    if found is None:
        hint = f"tried {path.parent / user_path(str(named))}, and the folders above"
        raise ToolkitError(f"{path} names --config {str(named)[:200]}, which does not exist", hint=hint)
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
    return draft.finish(preset=_take_launch(draft, file))


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


def _take_launch(draft: Draft, file: Path) -> str:
    """The preset and the number of processes, from the flags of `accelerate launch` and torchrun."""
    chosen: sources.Choice | None = None
    for key in draft.among("accelerate_config", "config_file")[:1]:
        name = str(draft.get(key))
        path = find_file(name, file)
        known = draft.dialect.accelerate_configs.get(Path(name).stem.removeprefix("deepspeed_"))
        if path is not None:
            config = read_configuration(path)
            processes = config.get("num_processes")
            draft.num_processes = processes if type(processes) is int else None
            chosen = sources.preset_of_accelerate(config, path)._replace(keys=[key])
        elif known is not None:
            chosen = sources.Choice(known, sources.FSDP1_NOTE if known == "fsdp2" and "1" in name else None, [key])
        else:
            message = f"{file}: no such accelerate configuration: {name[:200]}"
            raise ToolkitError(message, hint="run this where the file is, or name a preset: `--preset`")
    for key in draft.among("num_processes", "nproc_per_node"):
        draft.num_processes = int(draft.number(key, 1))
        draft.use(key, by=NUM_PROCESSES)
    if chosen is None and draft.is_on("use_deepspeed"):
        keys = draft.among("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
        config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {name: draft.get(name) for name in keys}}
        chosen = sources.preset_of_accelerate(config, file)._replace(keys=keys)
    switches = [key for key in ("multi_gpu", "use_deepspeed", "use_fsdp") if draft.is_on(key)]
    preset = sources.take_strategy(draft, file, chosen=chosen)
    draft.use(*switches, by=PRESET)
    return preset
