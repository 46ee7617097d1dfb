"""What configurations of all tools name: data sets, and the DeepSpeed, FSDP or accelerate settings of a preset.

>>> preset_of_deepspeed("deepspeed_configs/zero3_bf16_cpuoffload_all.json", Path()).preset
'zero3_cpu_offload'
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.convert.draft import NUM_PROCESSES, PRESET, Draft, block_of, load_dialect
from toolkit.data.data_files import DATASET_CARD, SUFFIXES, is_hub_id
from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import read_configuration, settings_for_path
from toolkit.files.paths import find_file, is_file
from toolkit.job.argument_values import is_true
from toolkit.job.job import Job
from toolkit.presets.known_keys import OFFLOAD_DEVICES
from toolkit.presets.preset import load_preset
from toolkit.presets.support import reasons, unsupported

OTHER_SUFFIXES = (".arrow", ".gz", ".txt", ".zip", ".zst")  # `data/pages.txt` would read as a hub id
# Sizes in a DeepSpeed JSON that the presets leave to the Trainer ("auto"), or to DeepSpeed.
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size")
FSDP1_NOTE = "FSDP1 became FSDP2"
# The nearest preset where a configuration's own does not work with 4-bit weights.
_FOR_4BIT_WEIGHTS = {"zero2_cpu_offload": "zero2", "zero3_nvme_offload": "zero3_cpu_offload", "zeropp": "zero3"}


# -- data sets, as `--dataset` and the arguments next to it


class NamedData(NamedTuple):
    """A data set, and the settings that named it; a value that is not named is (None, "")."""

    path: str  # a file or a hub id
    keys: tuple[str, ...]
    split: tuple[Any, str] = (None, "")
    config: tuple[Any, str] = (None, "")
    weight: tuple[float | None, str] = (None, "")
    columns: Mapping[str, str] = {}  # of the fields that have another name


def named_data(settings: Mapping[str, Any], prefix: str) -> NamedData:
    """Return the data set of an entry with the arguments of `datasets.load_dataset`, as TRL and axolotl have them."""
    path, files, names = str(settings.get("path", "")), settings.get("data_files"), ["path"]
    if path in ("json", "csv", "parquet") and isinstance(files, (str, list)) and files:
        path, names = str(files[0] if isinstance(files, list) else files), ["path", "data_files"]
    keys = tuple(f"{prefix}{name}" for name in names)
    return NamedData(path, keys, (settings.get("split"), f"{prefix}split"), (settings.get("name"), f"{prefix}name"))


def set_datasets(
    draft: Draft, named: Sequence[NamedData], argument: str = "dataset", *, weights_note: str | None = None
) -> None:
    """Set `dataset` or `eval_dataset`, its split, and for several the weights, which mean different things."""
    columns = dict(draft.arguments.get("column") or {})
    usable = [data for data in named if _is_usable(draft, data, columns)]
    if not usable:
        return
    paths = list(dict.fromkeys(data.path for data in usable))
    keys = [key for data in usable for key in data.keys]
    if argument != "dataset" and len(paths) > 1:
        draft.leave_out(*(key for data in usable[1:] for key in data.keys), reason=f"one {argument} is read")
        paths, keys = paths[:1], [*usable[0].keys]
    draft.assign(argument, paths if len(paths) > 1 else paths[0], *keys)
    if columns:
        draft.arguments["column"] = columns
    on_hub = all(is_hub_id(data.path) for data in usable)
    _set_same(draft, f"{argument}_split", [data.split for data in usable], on_hub=on_hub)
    _set_same(draft, f"{argument}_config", [data.config for data in usable], on_hub=True)
    weights = [data.weight for data in usable if data.weight[0] is not None]
    if len(weights) == len(paths) > 1:
        shares, share_keys = zip(*weights, strict=True)
        draft.assign("dataset_weights", list(shares), *share_keys, note=weights_note)


def _is_usable(draft: Draft, data: NamedData, columns: dict[str, str]) -> bool:
    """Add the columns of a data set that can be read; list the settings of another one."""
    suffix = Path(data.path).suffix.lower()
    is_copy = is_file(Path(data.path) / DATASET_CARD)
    reason = f"not a data file ({', '.join(SUFFIXES)}), hub id or copy of a hub data set"
    if suffix in SUFFIXES or is_copy or (is_hub_id(data.path) and suffix not in OTHER_SUFFIXES):
        if all(columns.setdefault(field, column) == column for field, column in data.columns.items()):
            return True
        reason = "`--column` names one column for a field, and another data set has another one"
    for key in data.keys:
        draft.report(key, data.path, reason)
        draft.left.pop(key, None)
    return False


def _set_same(draft: Draft, argument: str, found: Sequence[tuple[Any, str]], *, on_hub: bool) -> None:
    """Set an argument that all data sets share, from values that are all the same."""
    given = {key: str(value) for value, key in found if value is not None}
    values = set(given.values())
    if argument == "dataset_split" and values == {"train"}:
        draft.drop(*given)
    elif len(values) == 1 and len(given) == len(found) and on_hub:
        draft.assign(argument, values.pop(), *given)
    else:
        for key, value in given.items():
            draft.left.pop(key, None)
            draft.report(key, value, f"`{argument}` is one name, for data of the hub")


def row_fields_reason(messages: str, role: str, content: str) -> str | None:
    """Return why conversations with these field names are not recognised, or None if they are."""
    if (messages, role, content) in (("messages", "role", "content"), ("conversations", "from", "value")):
        return None
    return (
        f"rows of `{messages}` with {role} and {content}: rename them to `messages` with role and content, or to"
        " `conversations` with from and value"
    )


# -- the preset


class Choice(NamedTuple):
    """A preset, what it does differently, and the settings that decided it."""

    preset: str
    note: str | None = None
    keys: Sequence[str] = ()


def take_launch(draft: Draft, file: Path, *, chosen: Choice | None = None) -> str:
    """The preset and the number of processes, from the flags of `accelerate launch` and torchrun."""
    for key in draft.among("accelerate_config", "config_file")[:1]:
        name = str(draft.get(key))
        path = find_file(name, file)
        known = draft.dialect.accelerate_configs.get(Path(name).stem.removeprefix("deepspeed_"))
        if path is not None:
            config = read_configuration(path)
            processes = config.get("num_processes")
            draft.num_processes = processes if type(processes) is int else None
            chosen = preset_of_accelerate(config, path)._replace(keys=[key])
        elif known is not None:
            chosen = Choice(known, FSDP1_NOTE if known == "fsdp2" and "1" in name else None, [key])
        else:
            message = f"{file}: no such accelerate configuration: {name[:200]}"
            raise ToolkitError(message, hint="run this where the file is, or name a preset: `--preset`")
    for key in draft.among("num_processes"):
        draft.num_processes = int(draft.number(key, 1))
        draft.use(key, by=NUM_PROCESSES)
    if chosen is None and draft.is_on("use_deepspeed"):
        keys = draft.among("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
        config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {name: draft.get(name) for name in keys}}
        chosen = preset_of_accelerate(config, file)._replace(keys=keys)
    switches = [key for key in ("multi_gpu", "use_deepspeed", "use_fsdp") if draft.is_on(key)]
    preset = take_strategy(draft, file, chosen=chosen)
    draft.use(*switches, by=PRESET)
    return preset


def take_strategy(draft: Draft, near: Path, *, chosen: Choice | None = None) -> str:
    """Use the sharding settings of a configuration, and return the name of a preset that works with its arguments.

    `chosen` is what settings decide that only one tool has.
    """
    if chosen is not None:
        preset, note, keys = chosen
    elif draft.get("deepspeed"):
        preset, note, keys = preset_of_deepspeed(draft.get("deepspeed"), near)._replace(keys=["deepspeed"])
    elif any(value for key, value in draft.left.items() if key.startswith("fsdp")):
        preset, note, keys = _preset_of_fsdp(draft)
    else:
        preset, note, keys = Choice("ddp")
    job = Job.from_values(draft.arguments)
    why = next((each.why for each in reasons(load_preset(preset), job) if each.rule == "qlora"), None)
    if why is not None:
        draft.leave_out(*keys, reason=f"not with load_in_4bit: {why}")
        note = f"4-bit weights do not work under {preset}: {why}"
        preset = _FOR_4BIT_WEIGHTS[preset]
    draft.use(*keys, by=PRESET)
    if draft.num_processes == 1 and unsupported(load_preset(preset), world_size=1) is not None:
        preset, note = "single", f"one process: {preset} needs more"
    if note is not None:
        draft.notes[PRESET] = note
    return "single" if draft.num_processes == 1 and preset == "ddp" else preset


def preset_of_deepspeed(value: Any, near: Path) -> Choice:
    """Return the preset for a DeepSpeed configuration: its settings, also as text, or the path of its JSON.

    Where the file is not at hand, its name decides. Raises ToolkitError for a name that says no ZeRO stage.
    """
    if not isinstance(value, Mapping):
        value = settings_for_path(str(value), str(near)) or value
    path = None if isinstance(value, Mapping) else find_file(str(value), near)
    if isinstance(value, Mapping) or path is not None:
        zero = (value if path is None else read_configuration(path)).get("zero_optimization")
        zero = zero if isinstance(zero, Mapping) else {}
        if zero.get("zero_hpz_partition_size", 1) != 1 or zero.get("zero_quantized_weights"):
            return Choice("zeropp")
        blocks = (zero.get(f"offload_{part}") for part in ("optimizer", "param"))
        devices = (block.get("device") if isinstance(block, Mapping) else None for block in blocks)
        sizes = [name for name in BUCKETS if type(zero.get(name)) in (int, float)]
        chosen = _preset_of_stage(zero.get("stage", 0), *devices)
        return chosen._replace(note=chosen.note or f"not with its own {', '.join(sizes)}") if sizes else chosen
    name = str(value)
    found = re.search(r"(?:zero|z|stage)[_-]?([0-3])", Path(name).name.lower())
    if found is None:
        hint = "run this where it is, or name it after its ZeRO stage"
        raise ToolkitError(f"no such DeepSpeed configuration: {name[:200]}", hint=hint)
    device = "cpu" if "offload" in name.lower() else None
    note = f"chosen by the name {name[:200]}: there is no such file here"
    return _preset_of_stage(found[1], device, device)._replace(note=note)


def _preset_of_stage(stage: Any, optimizer: Any, param: Any) -> Choice:
    if str(stage) not in ("0", "1", "2", "3"):
        raise ToolkitError(f"the ZeRO stage is {shown(stage)}, expected 0, 1, 2 or 3")
    for device in (optimizer, param):
        if device not in (None, *OFFLOAD_DEVICES):
            raise ToolkitError(f"an offload device is {shown(device)}, expected {', '.join(OFFLOAD_DEVICES)}")
    stage, devices = int(stage), {optimizer, param} - {None, "none"}
    if stage == 0 or not devices:
        return Choice(("ddp", "zero1", "zero2", "zero3")[stage])
    if stage < 3:
        return Choice("zero2_cpu_offload", "optimizer states and gradients are sharded" if stage == 1 else None)
    note = None if {optimizer, param} == devices else "offloads both the parameters and the optimizer states"
    return Choice("zero3_nvme_offload" if "nvme" in devices else "zero3_cpu_offload", note)


def _fsdp_keys(name: str) -> tuple[str, ...]:
    return (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}", f"fsdp_{name}")


def _preset_of_fsdp(draft: Draft) -> Choice:
    """The preset for `fsdp`, `fsdp_config`, `fsdp_version` and the flags of `accelerate launch`."""
    nested = draft.nested("fsdp_config.")
    nested |= {key: value for key, value in draft.left.items() if key.startswith("fsdp_") and "fsdp_config" not in key}
    nested = {name.removeprefix("fsdp_"): value for name, value in nested.items()}
    for name, value in nested.items():
        for key in draft.among(*_fsdp_keys(name)):
            if name == "activation_checkpointing" and is_true(value):
                draft.assign("activation_checkpointing", True, key)
            elif draft.dialect.fsdp_redundant.get(name) == value:
                draft.drop(key)
            elif name in draft.dialect.fsdp_reasons:
                draft.leave_out(key, reason=draft.dialect.fsdp_reasons[name])
    words = draft.get("fsdp", "")
    named = " ".join(map(str, words)) if isinstance(words, list) else str(words)
    strategy = f"{named} {nested.get('sharding_strategy', '')} {nested.get('reshard_after_forward', '')}".lower()
    if "no_shard" in strategy:
        preset = "ddp"
    elif is_true(nested.get("offload_params", False)) or "offload" in strategy:
        preset = "fsdp2_cpu_offload"
    elif "hybrid" in strategy or draft.number("dp_replicate_size", 1) > 1:
        draft.use("dp_replicate_size", by=PRESET)
        preset = "fsdp2_hybrid"
    else:
        preset = "fsdp2_grad_op" if "shard_grad_op" in strategy or "false" in strategy else "fsdp2"
    is_old = str(nested.get("version", draft.get("fsdp_version", "1"))) == "1"
    deciding = ("fsdp_version", "version", "sharding_strategy", "reshard_after_forward", "offload_params")
    keys = ("fsdp", "fsdp_version", "fsdp_config", *(key for name in deciding for key in _fsdp_keys(name)))
    return Choice(preset, FSDP1_NOTE if is_old else None, keys)


def preset_of_accelerate(config: Mapping[str, Any], near: Path) -> Choice:
    """Return the preset for the content of an accelerate YAML."""
    kind = str(config.get("distributed_type", "NO"))
    if kind == "DEEPSPEED":
        deepspeed = block_of(config, "deepspeed_config", near)
        if deepspeed.get("deepspeed_config_file"):
            return preset_of_deepspeed(deepspeed["deepspeed_config_file"], near)
        devices = (deepspeed.get(f"offload_{part}_device") for part in ("optimizer", "param"))
        return _preset_of_stage(deepspeed.get("zero_stage", 2), *devices)
    if kind == "FSDP":
        return _preset_of_fsdp(Draft(load_dialect("trl"), {"fsdp_config": block_of(config, "fsdp_config", near)}))
    return Choice("single" if kind == "NO" else "ddp")
