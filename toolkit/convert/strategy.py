"""The preset for another configuration's DeepSpeed, FSDP or accelerate settings.

>>> preset_of_deepspeed("deepspeed_configs/zero3_bf16_cpuoffload_all.json", Path()).preset
'zero3_cpu_offload'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import PRESET, Draft, block_of
from toolkit.convert.dialect import Dialect, fsdp_reasons, fsdp_redundant
from toolkit.errors import ToolkitError
from toolkit.files.reading import is_file, user_path
from toolkit.files.value_limits import shown
from toolkit.files.yaml_files import read_configuration
from toolkit.job.argument_values import is_true
from toolkit.job.job import Job
from toolkit.presets import load_preset
from toolkit.presets.known_keys import OFFLOAD_DEVICES
from toolkit.presets.support import reasons, unsupported

FSDP1_NOTE = "FSDP1 became FSDP2"
# The nearest preset where a configuration's own does not work with 4-bit weights.
_FOR_4BIT_WEIGHTS = {"zero2_cpu_offload": "zero2", "zero3_nvme_offload": "zero3_cpu_offload", "zeropp": "zero3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A preset, and what it does differently."""

    preset: str
    note: str | None = None
    keys: tuple[str, ...] = ()
    """The settings that decided it."""


def find_file(name: str, near: Path) -> Path | None:
    """Return the file that a configuration names, relative to the working directory or to a folder above `near`."""
    path = user_path(name)
    folders = [Path.cwd(), *near.resolve().parents]
    return next((folder / path for folder in folders if is_file(folder / path)), None)


def take_strategy(draft: Draft, near: Path, *, job: Job, chosen: Choice | None = None) -> str:
    """Use the sharding settings of a configuration, and return the preset's name.

    `job` decides what is possible: 4-bit weights are not swapped to a disk, for example. `chosen` is what settings
    decide that only one tool has.
    """
    choice = chosen or Choice(preset="ddp")
    if chosen is None and draft.get("deepspeed"):
        choice = replace(preset_of_deepspeed(draft.get("deepspeed"), near), keys=("deepspeed",))
    elif chosen is None and any(value for key, value in draft.left.items() if key.startswith("fsdp")):
        choice = _preset_of_fsdp(draft)
    why = next((reason for reason in reasons(load_preset(choice.preset), job) if reason.rule == "qlora"), None)
    if why is not None:
        for key in choice.keys:
            draft.leave_out(key, f"not with load_in_4bit: {why.why}")
        draft.notes[PRESET] = f"4-bit weights do not work under {choice.preset}: {why.why}"
        choice = Choice(preset=_FOR_4BIT_WEIGHTS[choice.preset])
    for key in choice.keys:
        draft.use(key, PRESET)
    if choice.note is not None:
        draft.notes[PRESET] = choice.note
    if draft.num_processes == 1:  # where no other preset is of use
        if unsupported(load_preset(choice.preset), world_size=1) is not None:
            draft.notes[PRESET] = f"one process: {choice.preset} needs more"
            return "single"
        return "single" if choice.preset == "ddp" else choice.preset
    return choice.preset


def preset_of_deepspeed(value: Any, near: Path) -> Choice:
    """Return the preset for a DeepSpeed configuration: its settings, or the path of its JSON.

    Where the file is not at hand, its name decides. Raises ToolkitError for a name that says no ZeRO stage.
    """
    if isinstance(value, Mapping):
        return _preset_of_zero(value.get("zero_optimization"))
    path = find_file(str(value), near)
    if path is not None:
        return _preset_of_zero(read_configuration(path).get("zero_optimization"))
    name = str(value)
    found = re.search(r"(?:zero|z|stage)[_-]?([0-3])", Path(name).name.lower())
    if found is None:
        raise ToolkitError(
            f"no such DeepSpeed configuration: {name[:200]}",
            hint="run this where it is, or name it after its ZeRO stage",
        )
    device = "cpu" if "offload" in name.lower() else None
    note = f"chosen by the name {name[:200]}: there is no such file here"
    return replace(_preset_of_stage(found[1], optimizer=device, param=device), note=note)


def _preset_of_zero(settings: Any) -> Choice:
    zero = settings if isinstance(settings, Mapping) else {}
    if zero.get("zero_hpz_partition_size", 1) != 1 or zero.get("zero_quantized_weights"):
        return Choice(preset="zeropp")
    blocks = (zero.get(f"offload_{part}") for part in ("optimizer", "param"))
    optimizer, param = (block.get("device") if isinstance(block, Mapping) else None for block in blocks)
    return _preset_of_stage(zero.get("stage", 0), optimizer=optimizer, param=param)


def _preset_of_stage(given: Any, *, optimizer: str | None, param: str | None) -> Choice:
    if str(given) not in ("0", "1", "2", "3"):
        raise ToolkitError(f"the ZeRO stage is {shown(given)}, expected 0, 1, 2 or 3")
    for device in (optimizer, param):
        if device not in (None, *OFFLOAD_DEVICES):
            raise ToolkitError(f"an offload device is {shown(device)}, expected {', '.join(OFFLOAD_DEVICES)}")
    stage = int(given)
    devices = {device for device in (optimizer, param) if device not in (None, "none")}
    if stage == 0 or not devices:
        return Choice(preset=("ddp", "zero1", "zero2", "zero3")[stage])
    if stage < 3:
        note = "optimizer states and gradients are sharded" if stage == 1 else None
        return Choice(preset="zero2_cpu_offload", note=note)
    preset = "zero3_nvme_offload" if "nvme" in devices else "zero3_cpu_offload"
    both = {optimizer, param} == devices
    return Choice(preset=preset, note=None if both else "offloads both the parameters and the optimizer states")


def _preset_of_fsdp(draft: Draft) -> Choice:
    """The preset for `fsdp`, `fsdp_config`, `fsdp_version` and the flags of `accelerate launch`."""
    nested = {name.removeprefix("fsdp_"): value for name, value in draft.nested("fsdp_config.").items()}
    flags = [key for key in draft.left if key.startswith("fsdp_") and not key.startswith("fsdp_config")]
    nested |= {key.removeprefix("fsdp_"): draft.get(key) for key in flags}
    redundant, why = fsdp_redundant(), fsdp_reasons()
    for name, value in nested.items():
        for key in draft.among(*_fsdp_keys(name)):
            if name == "activation_checkpointing" and is_true(value):
                draft.assign("activation_checkpointing", True, keys=[key])
            elif redundant.get(name) == value:
                draft.drop(key)
            elif name in why:
                draft.leave_out(key, why[name])
    old = str(nested.get("fsdp_version", nested.get("version", draft.get("fsdp_version", "1")))) == "1"
    deciding = ("fsdp_version", "version", "sharding_strategy", "reshard_after_forward", "offload_params")
    keys = ("fsdp", "fsdp_version", "fsdp_config", *(key for name in deciding for key in _fsdp_keys(name)))
    return Choice(preset=_fsdp_preset_name(nested, draft), note=FSDP1_NOTE if old else None, keys=keys)


def _fsdp_keys(name: str) -> tuple[str, ...]:
    return (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}", f"fsdp_{name}")


def _fsdp_preset_name(nested: Mapping[str, Any], draft: Draft) -> str:
    words = draft.get("fsdp", "")
    named = " ".join(map(str, words)) if isinstance(words, list) else str(words)
    strategy = f"{named} {nested.get('sharding_strategy', '')} {nested.get('reshard_after_forward', '')}".lower()
    if "no_shard" in strategy:
        return "ddp"
    if is_true(nested.get("offload_params", False)) or "offload" in strategy:
        return "fsdp2_cpu_offload"
    if "hybrid" in strategy or draft.number("dp_replicate_size", 1) > 1:
        draft.use("dp_replicate_size", PRESET)
        return "fsdp2_hybrid"
    return "fsdp2_grad_op" if "shard_grad_op" in strategy or "false" in strategy else "fsdp2"


def preset_of_accelerate(config: Mapping[str, Any], near: Path) -> Choice:
    """Return the preset for the content of an accelerate YAML."""
    kind = str(config.get("distributed_type", "NO"))
    if kind == "DEEPSPEED":
        deepspeed = block_of(config, "deepspeed_config", near)
        if deepspeed.get("deepspeed_config_file"):
            return preset_of_deepspeed(deepspeed["deepspeed_config_file"], near)
        return _preset_of_stage(
            deepspeed.get("zero_stage", 2),
            optimizer=deepspeed.get("offload_optimizer_device"),
            param=deepspeed.get("offload_param_device"),
        )
    if kind == "FSDP":
        flat = {f"fsdp_config.{name}": value for name, value in block_of(config, "fsdp_config", near).items()}
        return replace(_preset_of_fsdp(Draft(Dialect(tool="accelerate"), flat)), keys=())
    return Choice(preset="single" if kind == "NO" else "ddp")
