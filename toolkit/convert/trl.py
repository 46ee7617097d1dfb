"""`trl sft`: its flags and its YAML (tables/trl.yaml). TRL's source is named where a rule comes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import NUM_PROCESSES, PRESET, Conversion, Draft
from toolkit.convert.data_sources import NamedData, named_data, set_datasets
from toolkit.convert.dialect import load_dialect
from toolkit.convert.strategy import FSDP1_NOTE, Choice, find_file, preset_of_accelerate, take_strategy
from toolkit.errors import ToolkitError
from toolkit.files.yaml_files import read_configuration
from toolkit.job.job import Job

# `trl sft --accelerate_config NAME`: files of that name in trl/accelerate_configs
ACCELERATE_CONFIGS = {name: name for name in ("zero1", "zero2", "zero3", "fsdp2")}
ACCELERATE_CONFIGS |= {"single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp2"}


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the settings of `trl sft`, from its flags, its YAML or both."""
    if not values.get("model_name_or_path"):
        raise ToolkitError(f"{file} names no model_name_or_path", hint="is it a configuration of `trl sft`?")
    draft = Draft(load_dialect("trl"), values)
    if values.get("max_length", "") is None:
        draft.report("max_length", None, draft.dialect.reason("max_length"))
    _take_lora(draft)
    _take_data(draft)
    _take_loss(draft)
    draft.take_checkpointing_options()
    draft.take_warmup()
    draft.translate()
    draft.set_defaults()
    preset = _take_launch(draft, file)
    return draft.finish(preset=preset)


def _take_lora(draft: Draft) -> None:
    """LoRA is trained with `use_peft` only; the defaults are those of trainer/model_config.py."""
    flags = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    if not draft.is_on("use_peft"):
        for key in (*flags, *draft.dialect.lora_config, "lora_task_type"):
            draft.leave_out(key, "no adapter is trained: `use_peft` is not set")
        return
    draft.assign("lora_r", draft.get("lora_r", 16), keys=draft.among("use_peft", "lora_r"))
    for name in flags[1:]:
        draft.move(name, name)
    draft.default("lora_alpha", 32)
    draft.default("lora_dropout", 0.05)
    modules = draft.arguments.get("lora_target_modules")
    if isinstance(modules, str):
        draft.arguments["lora_target_modules"] = [modules]
    note = "peft's default for Llama, Mistral, Gemma and Qwen; `[all-linear]` adapts all linear layers"
    draft.default("lora_target_modules", ["q_proj", "v_proj"], note=note)
    if draft.is_on("load_in_4bit"):
        draft.assign("load_in_4bit", True, keys=["load_in_4bit"])
        draft.drop_if("bnb_4bit_quant_type", "nf4")
        draft.drop_if("use_bnb_nested_quant", True)
        draft.drop_if("bnb_4bit_quant_storage", "bfloat16")
    draft.drop_if("lora_task_type", "CAUSAL_LM")
    for key in draft.among(*draft.dialect.lora_config):  # flags: text for a switch, and for a list of one name
        value = draft.get(key)
        if key.startswith("use_"):
            draft.left[key] = value not in (False, "false")
        elif value not in (False, "false"):
            draft.left[key] = value if isinstance(value, list) else [value]
    draft.take_lora_config()


def _take_data(draft: Draft) -> None:
    sources = draft.entries("datasets")
    if sources:
        draft.leave_out("dataset_name", "`datasets` is given, and used instead")
        note = "TRL leaves rows out until the shares are right; here rows of the smaller data sets are repeated"
        set_datasets(draft, [_entry(draft, prefix) for prefix in sources], weights_note=note)
        draft.move("test_split_size", "val_size")
    name = draft.get("dataset_name")
    if name is None:
        return
    split, config = ((draft.get(key), key) for key in ("dataset_train_split", "dataset_config"))
    set_datasets(draft, [NamedData(path=str(name), keys=("dataset_name",), split=split, config=config)])
    # TRL evaluates on another split of the same data (scripts/sft.py, scripts/utils.py).
    if str(draft.get("eval_strategy", "no")) == "no":
        draft.leave_out("dataset_test_split", "there is no evaluation: `eval_strategy` is not set")
        return
    draft.default("eval_dataset", str(name))
    draft.move("dataset_test_split", "eval_dataset_split")
    draft.default("eval_dataset_split", "test")


def _entry(draft: Draft, prefix: str) -> NamedData:
    key = f"{prefix}fraction"
    weight = draft.number(key, 1) if key in draft.left else None
    return replace(named_data(draft.nested(prefix), prefix), weight=weight, weight_keys=(key,))


def _take_loss(draft: Draft) -> None:
    """The default depends on the data: trainer/sft_config.py."""
    for key in ("assistant_only_loss", "completion_only_loss"):
        if draft.is_on(key):
            draft.assign("loss_on", "assistant", keys=[key])
    if "completion_only_loss" in draft.left and "loss_on" not in draft.arguments:
        draft.assign("loss_on", "all", keys=["completion_only_loss"])
    note = "TRL's default for conversations; remove it for prompt/completion data, where only the completion counts"
    draft.default("loss_on", "all", note=note)


def _take_launch(draft: Draft, file: Path) -> str:
    """The preset and the number of processes, from the flags of `accelerate launch` and torchrun."""
    chosen = _accelerate_choice(draft, file)
    for key in draft.among("num_processes", "nproc_per_node"):
        draft.num_processes = int(draft.number(key, 1))
        draft.use(key, NUM_PROCESSES)
    if chosen is None and draft.is_on("use_deepspeed"):
        keys = draft.among("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
        config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {name: draft.get(name) for name in keys}}
        chosen = replace(preset_of_accelerate(config, file), keys=tuple(keys))
    # Flags of `accelerate launch` that decide the preset, beside fsdp_*.
    switches = [key for key in ("multi_gpu", "use_deepspeed", "use_fsdp") if draft.is_on(key)]
    preset = take_strategy(draft, file, job=Job.from_values(draft.arguments), chosen=chosen)
    for key in switches:
        draft.use(key, PRESET)
    return preset


def _accelerate_choice(draft: Draft, file: Path) -> Choice | None:
    for key in draft.among("accelerate_config", "config_file"):
        name = str(draft.get(key))
        path = find_file(name, file)
        if path is not None:
            config = read_configuration(path)
            processes = config.get("num_processes")
            draft.num_processes = processes if type(processes) is int else None
            return replace(preset_of_accelerate(config, path), keys=(key,))
        known = ACCELERATE_CONFIGS.get(Path(name).stem.removeprefix("deepspeed_"))
        if known is None:
            raise ToolkitError(
                f"{file}: no such accelerate configuration: {name[:200]}", hint="run this where the file is"
            )
        return Choice(preset=known, note=FSDP1_NOTE if known == "fsdp2" and "1" in name else None, keys=(key,))
    return None
