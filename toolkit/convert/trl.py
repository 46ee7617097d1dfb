"""`trl sft`: its flags and its YAML (checked with trl 1.16.0; its source is named where a default comes from it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import NUM_PROCESSES, PRESET, Conversion, Draft, flattened
from toolkit.convert.data_sources import NamedData, named_data, set_datasets
from toolkit.convert.strategy import FSDP1_NOTE, FSDP_REASONS, Choice, find_file, preset_of_accelerate, take_strategy
from toolkit.convert.trainer_settings import (
    CHECKPOINTING_REASON,
    CPU_REASON,
    PRECISION,
    PRESET_REASON,
    REMOTE_CODE_REASON,
    shared_settings,
    take_checkpointing_options,
    take_warmup,
)
from toolkit.errors import ToolkitError
from toolkit.files.yaml_files import read_configuration
from toolkit.job.script_arguments import read_method

# Settings of the same name and meaning, beside transformers' own.
SAME = {"attn_implementation", "model_name_or_path", "packing"}
RENAMED = {"dataset_num_proc", "evaluation_strategy", "max_length", "model_revision", "warmup_ratio"}
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
LORA_CONFIG = {
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "target_parameters",
}
# `trl sft --accelerate_config NAME`: files of that name in trl/accelerate_configs
ACCELERATE_CONFIGS = {
    "single_gpu": "single",
    "multi_gpu": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp1": "fsdp2",
    "fsdp2": "fsdp2",
}
# Flags of `accelerate launch` that decide the preset, beside fsdp_*.
LAUNCH_SWITCHES = ("multi_gpu", "use_deepspeed", "use_fsdp")

_LAUNCH = "about the cluster: `toolkit train --help` has the options for several nodes"
_TOKENIZER = "the model's own tokenizer and special tokens are used"
_QUANTIZED = "4-bit NF4 with double quantization is what is supported"
REASONS = FSDP_REASONS | {
    **dict.fromkeys(PRECISION, PRESET_REASON),
    "mixed_precision": PRESET_REASON,
    "dtype": PRESET_REASON,
    "torch_dtype": PRESET_REASON,
    "model_init_kwargs": "`attn_implementation` and `revision` are arguments; the preset decides the dtype",
    "trust_remote_code": REMOTE_CODE_REASON,
    "use_cpu": CPU_REASON,
    "eos_token": _TOKENIZER,
    "pad_token": _TOKENIZER,
    "chat_template_path": "`chat_template: FILE` takes a Jinja file",
    "dataset_text_field": "rows are recognised by their fields: name the column `text`",
    "packing_strategy": "rows are packed whole, best fit first, without attention between them (bfd)",
    "eval_packing": "evaluation rows are packed if `packing` is on",
    "padding_free": "`packing: true` pads nothing",
    "pad_to_multiple_of": "batches are padded to their longest row",
    "loss_type": "the loss is cross-entropy (nll)",
    "router_aux_loss_coef": "the value of the model's config.json is used",
    "load_in_8bit": _QUANTIZED,
    "bnb_4bit_*": _QUANTIZED,
    "use_bnb_nested_quant": _QUANTIZED,
    "resume_from_checkpoint": "checkpoints of TRL cannot be resumed here",
    "env": "environment variables: set them where you run",
    "num_machines": _LAUNCH,
    "machine_rank": _LAUNCH,
    "main_process_*": _LAUNCH,
    "nnodes": _LAUNCH,
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "max_length": "null means no limit: name the length, `max_seq_length: 8192`",
    "datasets*": "expected a mapping with `path`",
    "gradient_checkpointing_kwargs": CHECKPOINTING_REASON,
    "fraction": "give each data set its share: `dataset_weights: [0.7, 0.3]`",
}


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the settings of `trl sft`, from its flags, its YAML or both."""
    if not values.get("model_name_or_path"):
        raise ToolkitError(f"{file} names no model_name_or_path", hint="is it a configuration of `trl sft`?")
    draft = Draft("TRL", flattened(values, blocks=["fsdp_config"], lists=["datasets"]))
    if "max_length" in values and values["max_length"] is None:
        draft.left["max_length"] = None
        draft.leave_out("max_length", REASONS["max_length"])
    _take_lora(draft)
    _take_data(draft)
    _take_loss(draft)
    draft.move("gradient_checkpointing", "activation_checkpointing")
    take_checkpointing_options(draft)
    if draft.is_on("activation_offloading"):
        draft.assign("activation_checkpointing_offload", True, keys=["activation_offloading"])
    take_warmup(draft)
    draft.drop_if("packing_strategy", "bfd")
    draft.drop_if("loss_type", "nll", "chunked_nll")
    draft.drop_if("dataset_text_field", "text")
    draft.drop_if("truncation_mode", "keep_start")
    draft.move_known(SAME | RENAMED | shared_settings())
    _set_defaults(draft)
    preset = _take_launch(draft, file)
    return draft.finish(preset=preset, reasons=REASONS, on_by_default={"bf16"})


def _take_lora(draft: Draft) -> None:
    """LoRA is trained with `use_peft` only; the defaults are those of trainer/model_config.py."""
    if not draft.is_on("use_peft"):
        for key in (*LORA, *LORA_CONFIG, "lora_task_type"):
            draft.leave_out(key, "no adapter is trained: `use_peft` is not set")
        return
    draft.assign("lora_r", draft.get("lora_r", 16), keys=[key for key in ("use_peft", "lora_r") if key in draft.left])
    for name in LORA[1:]:
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
    named = {key: name for key, name in LORA_CONFIG.items() if draft.get(key) not in (None, False, "false")}
    if named:
        draft.assign(
            "lora_config", {name: _listed(key, draft.get(key)) for key, name in named.items()}, keys=list(named)
        )


def _listed(key: str, value: Any) -> Any:
    return True if key.startswith("use_") else value if isinstance(value, list) else [value]


def _take_data(draft: Draft) -> None:
    sources = list(dict.fromkeys(f"{key.partition('.')[0]}." for key in draft.left if key.startswith("datasets[")))
    if sources:
        draft.leave_out("dataset_name", "`datasets` is given, and used instead")
        note = "TRL leaves rows out until the shares are right; here rows of the smaller data sets are repeated"
        set_datasets(draft, [_entry(draft, prefix) for prefix in sources], weights_note=note)
        draft.move("test_split_size", "val_size")
    name = draft.get("dataset_name")
    if name is not None:
        split, config = draft.get("dataset_train_split"), draft.get("dataset_config")
        data = NamedData(
            path=str(name),
            keys=("dataset_name",),
            split=None if split is None else (str(split), "dataset_train_split"),
            config=None if config is None else (str(config), "dataset_config"),
        )
        set_datasets(draft, [data])
        _take_test_split(draft, str(name))
    if draft.is_on("dataset_streaming"):
        draft.assign("streaming", True, keys=["dataset_streaming"])


def _entry(draft: Draft, prefix: str) -> NamedData:
    settings = draft.nested(prefix)
    key = f"{prefix}fraction"
    weight = draft.number(key, 1) if key in draft.left else None
    return replace(named_data(settings, prefix), weight=weight, weight_keys=(key,))


def _take_test_split(draft: Draft, name: str) -> None:
    """TRL evaluates on another split of the same data (scripts/sft.py, scripts/utils.py)."""
    if str(draft.get("eval_strategy", "no")) == "no":
        draft.leave_out("dataset_test_split", "there is no evaluation: `eval_strategy` is not set")
        return
    draft.default("eval_dataset", name)
    if "dataset_test_split" in draft.left:
        draft.move("dataset_test_split", "eval_dataset_split")
    draft.default("eval_dataset_split", "test")


def _take_loss(draft: Draft) -> None:
    """The default depends on the data: trainer/sft_config.py."""
    for key in ("assistant_only_loss", "completion_only_loss"):
        if draft.is_on(key):
            draft.assign("loss_on", "assistant", keys=[key])
    if "completion_only_loss" in draft.left and "loss_on" not in draft.arguments:
        draft.assign("loss_on", "all", keys=["completion_only_loss"])
    note = "TRL's default for conversations; remove it for prompt/completion data, where only the completion counts"
    draft.default("loss_on", "all", note=note)


def _set_defaults(draft: Draft) -> None:
    """Set what TRL does when a setting is absent, where that differs from ours."""
    draft.default("output_dir", "trainer_output")  # transformers' training_args.py
    draft.default("learning_rate", 2e-5)  # trainer/sft_config.py
    draft.default("activation_checkpointing", True)  # trainer/base_config.py
    draft.default("logging_steps", 10)  # trainer/base_config.py


def _take_launch(draft: Draft, file: Path) -> str:
    """The preset and the number of processes, from the flags of `accelerate launch` and torchrun."""
    chosen = _accelerate_choice(draft, file)
    for key in ("num_processes", "nproc_per_node"):
        if key in draft.left:
            draft.num_processes = int(draft.number(key, 1))
            draft.use(key, NUM_PROCESSES)
    if chosen is None and draft.is_on("use_deepspeed"):
        chosen = _choice_of_flags(draft, file)
    switches = [key for key in LAUNCH_SWITCHES if draft.is_on(key)]
    preset = take_strategy(draft, file, method=read_method(draft.arguments), chosen=chosen)
    for key in switches:
        draft.use(key, PRESET)
    return preset


def _accelerate_choice(draft: Draft, file: Path) -> Choice | None:
    for key in ("accelerate_config", "config_file"):
        name = draft.get(key)
        if name is None:
            continue
        path = find_file(str(name), file)
        if path is not None:
            config = read_configuration(path)
            processes = config.get("num_processes")
            draft.num_processes = processes if type(processes) is int else None
            return replace(preset_of_accelerate(config, path), keys=(key,))
        known = ACCELERATE_CONFIGS.get(Path(str(name)).stem.removeprefix("deepspeed_"))
        if known is None:
            raise ToolkitError(
                f"{file}: no such accelerate configuration: {str(name)[:200]}", hint="run this where the file is"
            )
        return Choice(preset=known, note=FSDP1_NOTE if known == "fsdp2" and "1" in str(name) else None, keys=(key,))
    return None


def _choice_of_flags(draft: Draft, file: Path) -> Choice:
    names = ("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
    keys = tuple(name for name in names if name in draft.left)
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {name: draft.get(name) for name in keys}}
    return replace(preset_of_accelerate(config, file), keys=keys)
