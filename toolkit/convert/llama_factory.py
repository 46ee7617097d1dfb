"""LLaMA-Factory's YAML (checked with llamafactory 0.9.5; its source is named where a default comes from it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import Conversion, Draft, block_of, flattened, text_of
from toolkit.convert.data_sources import ROW_FIELDS_REASON, NamedData, row_fields_reason, set_datasets
from toolkit.convert.strategy import FSDP_REASONS, Choice, find_file, preset_of_deepspeed, take_strategy
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
from toolkit.files.value_limits import shown
from toolkit.files.yaml_files import read_configuration
from toolkit.job.argument_aliases import HINTS
from toolkit.job.script_arguments import read_method
from toolkit.presets.optimizers import MUON

# Settings of the same name and meaning, beside transformers' own.
SAME = {"model_name_or_path", "lora_alpha", "lora_dropout", "packing", "preprocessing_num_workers", "streaming"}
RENAMED = {"evaluation_strategy", "model_revision", "warmup_ratio"}
STAGES = ("sft", "pt")
ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
BLOCKS = ("dist_config", "fsdp_config", "init_config", "kernel_config", "peft_config", "quant_config")
IMAGE_KEYS = ("image_max_pixels", "video_max_pixels", "freeze_vision_tower", "crop_to_patches", "media_dir")
ON_BY_DEFAULT = {"bf16", "double_quantization", "enable_thinking", "ignore_pad_token_for_loss", "use_fast_tokenizer"}

_OPTIMIZER = "has no counterpart: `optim` names the optimizer, adamw_torch_fused by default"
_OTHER_LOSS = "changes the loss: here it is cross-entropy"
_MEGATRON = "Megatron's, whose engine no preset uses"
_QUANTIZED = "4-bit NF4 of bitsandbytes is the quantization that is supported: `quantization_bit: 4`"
_WEIGHTS_NOTE = (
    "here an epoch has every row at least once (interleave_over); interleave_under stops with the first data set"
)
REASONS = FSDP_REASONS | {
    **dict.fromkeys(PRECISION, PRESET_REASON),
    "gradient_checkpointing_kwargs": CHECKPOINTING_REASON,
    "use_cpu": CPU_REASON,
    "pure_bf16": "trained weights have fp32 masters under every preset",
    "fp8*": PRESET_REASON,
    "template": HINTS["template"],
    "trust_remote_code": REMOTE_CODE_REASON,
    "overwrite_output_dir": HINTS["overwrite_output_dir"],
    "plot_loss": "`toolkit train` records the loss of each step: run folder, ranks/rank0.jsonl",
    "overwrite_cache": "tokenised rows are cached by their content",
    "tokenized_path": "tokenised rows are cached by their content",
    "max_samples": HINTS["max_samples"],
    "adapter_name_or_path": "training starts with new adapters: merge the old ones into the model first",
    "resume_from_checkpoint": "checkpoints of LLaMA-Factory cannot be resumed here",
    "mask_history": "every assistant turn is trained",
    "use_badam": _OPTIMIZER,
    "badam_*": _OPTIMIZER,
    "use_galore": _OPTIMIZER,
    "galore_*": _OPTIMIZER,
    "use_apollo": _OPTIMIZER,
    "apollo_*": _OPTIMIZER,
    "use_adam_mini": _OPTIMIZER,
    "loraplus_*": _OPTIMIZER,
    "use_dft_loss": _OTHER_LOSS,
    "use_asft_loss": _OTHER_LOSS,
    "asft_*": _OTHER_LOSS,
    "use_eaft_loss": _OTHER_LOSS,
    "eaft_*": _OTHER_LOSS,
    "mixture_of_depths": "changes the model",
    "use_llama_pro": "changes the model",
    "tensor_model_parallel_size": "Megatron's; `--preset fsdp2_tp`, or `tp` without sharding, with `--tp`",
    "pipeline_model_parallel_size": "Megatron's; no preset divides layers into stages",
    "expert_model_parallel_size": "Megatron's; `--preset ep` with `--ep`",
    "sequence_parallel": _MEGATRON,
    "bias_activation_fusion": _MEGATRON,
    "apply_rope_fusion": _MEGATRON,
    "use_distributed_optimizer": _MEGATRON,
    "overlap_*": _MEGATRON,
    "moe_*": _MEGATRON,
    "recompute_granularity": _MEGATRON,
    "use_kt": "KTransformers, which keeps experts on the CPU, has no counterpart",
    "ray_*": "`toolkit train` starts the processes",
    "quantization_method": _QUANTIZED,
    "quantization_type": _QUANTIZED,
    "double_quantization": "always NF4 with double quantization",
    "quant_config*": _QUANTIZED,
    "use_unsloth": "`use_liger_kernel: true` has fused kernels",
    "use_unsloth_gc": "`activation_checkpointing_offload: true` keeps the checkpointed activations in host memory",
    "use_v1_kernels": "`use_liger_kernel: true` has fused kernels",
    "kernel_config*": "`use_liger_kernel: true` has fused kernels",
    "mix_strategy": "the rows of all data sets are mixed; `dataset_weights` sets their shares",
    "max_new_tokens": "generates text, which training does not",
    "sample_backend": "generates text, which training does not",
    "pissa_convert": "the adapter is saved as PiSSA leaves it",
    "batching_strategy": "`packing: true` pads nothing",
    "dist_config*": "no preset divides a layer or a sequence among GPUs",
    "init_config*": "the presets load the weights on one rank, and send them to the others",
    "dataset_dir": "data sets are named by file or hub id",
}


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the content of a LLaMA-Factory YAML. Raises ToolkitError for what is not supervised fine-tuning."""
    is_v1 = "model" in values and "model_name_or_path" not in values
    _check_training(values, file)
    draft = Draft("LLaMA-Factory", flattened(values, blocks=BLOCKS))
    method = _take_v1(draft) if is_v1 else str(draft.get("finetuning_type", "lora"))  # finetuning_args.py
    chosen = _v1_choice(draft, file) if is_v1 else None
    _check_method(method, file)
    if method == "lora":
        _take_lora(draft)
    draft.use("finetuning_type", "lora_r") if method == "lora" else draft.drop("finetuning_type")
    _take_quantization(draft)
    _take_model(draft)
    _take_data(draft, file)
    take_warmup(draft)
    if draft.is_on("use_muon"):  # third_party/muon: for 2-D weights but embeddings and head, scaled as ours
        draft.assign("optim", MUON, keys=["use_muon"])
    draft.move_known(SAME | RENAMED | shared_settings())
    _set_defaults(draft, checkpointing=not is_v1)
    preset = take_strategy(draft, file, method=read_method(draft.arguments), chosen=chosen)
    return draft.finish(preset=preset, reasons=REASONS, on_by_default=ON_BY_DEFAULT)


def _check_training(values: Mapping[str, Any], file: Path) -> None:
    stage = values.get("stage", "sft")
    if stage not in STAGES:
        raise ToolkitError(f"{file} is for stage {shown(stage)}, not supervised fine-tuning", hint=HINTS["stage"])
    if not values.get("dataset") and not values.get("train_dataset"):
        why = (
            "it is for inference, export or prediction"
            if values.keys() & {"model", "model_name_or_path"}
            else "nor a model"
        )
        raise ToolkitError(f"{file} names no dataset to train on: {why}", hint="convert the file of `train`")
    if any(values.get(key) for key in IMAGE_KEYS):
        raise ToolkitError(
            f"{file} trains on images or video, and the toolkit on text",
            hint="a preset works with any trainer that accelerate launches: `toolkit preset export DIR`",
        )


def _check_method(method: str, file: Path) -> None:
    if method == "freeze":
        raise ToolkitError(
            f"{file}: finetuning_type 'freeze' counts layers from the end, and `train_only` names them",
            hint="write `finetuning_type: full`, convert, and add `train_only: ['model.layers.30.*', ...]`",
        )
    if method not in ("lora", "full"):
        raise ToolkitError(
            f"{file}: finetuning_type {shown(method)} has no counterpart", hint="`lora` and `full` have one"
        )


def _take_v1(draft: Draft) -> str:
    """Use what only the format under `examples/v1` has (src/llamafactory/v1), and return the fine-tuning method."""
    draft.move("model", "model_name_or_path")
    draft.move_known({"micro_batch_size"})
    draft.drop_if("model_class", "llm")
    method = str(draft.get("peft_config.name", "full"))
    draft.move("peft_config.r", "lora_r")
    draft.move("peft_config.lora_alpha", "lora_alpha")
    draft.move("peft_config.lora_dropout", "lora_dropout")
    if draft.get("peft_config.target_modules") == "all":
        draft.assign("lora_target_modules", ["all-linear"], keys=["peft_config.target_modules"])
    draft.move("peft_config.target_modules", "lora_target_modules")
    if method == "lora":
        draft.use("peft_config.name", "lora_r")
    if draft.get("quant_config.quantization_bit") == 4:
        draft.assign("load_in_4bit", True, keys=["quant_config.quantization_bit", "quant_config.name"])
    return method


def _v1_choice(draft: Draft, file: Path) -> Choice:
    name, config = draft.get("dist_config.name"), draft.get("dist_config.config_file")
    if name == "deepspeed" and config:
        return replace(preset_of_deepspeed(config, file), keys=("dist_config.name", "dist_config.config_file"))
    return Choice(preset="fsdp2" if name == "fsdp2" else "ddp", keys=("dist_config.name",))


def _take_lora(draft: Draft) -> None:
    draft.move_known({"lora_rank", "lora_target", "lora_alpha", "lora_dropout"})
    draft.default("lora_r", 8)  # finetuning_args.py: lora_rank; alpha is twice the rank, as here
    fields: dict[str, Any] = {}
    keys = [key for key in ("use_dora", "use_rslora") if draft.is_on(key)]
    fields |= dict.fromkeys(keys, True)
    if draft.get("additional_target"):
        fields["modules_to_save"] = _names(draft.get("additional_target"))
        keys.append("additional_target")
    if draft.is_on("pissa_init"):
        iterations = int(draft.number("pissa_iter", 16))
        fields["init_lora_weights"] = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        keys += [key for key in ("pissa_init", "pissa_iter") if key in draft.left]
    if fields:
        draft.assign("lora_config", fields, keys=keys)


def _take_quantization(draft: Draft) -> None:
    bits, kind = draft.get("quantization_bit"), str(draft.get("quantization_method", "bnb")).lower()
    if bits == 4 and kind in ("bnb", "bitsandbytes") and draft.get("quantization_type", "nf4") == "nf4":
        draft.assign("load_in_4bit", True, keys=["quantization_bit"])
        for key in ("quantization_method", "quantization_type"):
            draft.drop(key)
    elif bits is not None:
        draft.leave_out("quantization_bit", _QUANTIZED)
    draft.drop_if("double_quantization", True)


def _take_model(draft: Draft) -> None:
    name = draft.get("flash_attn", "auto")
    draft.drop_if("flash_attn", "auto")
    if str(name) in ATTENTION:
        draft.assign("attn_implementation", ATTENTION[str(name)], keys=["flash_attn"])
    draft.drop_if("stage", "sft")
    draft.drop_if("mix_strategy", "concat", "interleave_over")
    for key in ("do_train", "do_eval"):
        draft.drop_if(key, True, False)
    if draft.is_on("enable_liger_kernel"):
        draft.assign("use_liger_kernel", True, keys=["enable_liger_kernel"])
    if draft.get("kernel_config.name") == "liger_kernel":
        draft.assign("use_liger_kernel", True, keys=["kernel_config.name"])
    draft.drop_if("kernel_config.include_kernels", "auto")
    if draft.is_on("disable_gradient_checkpointing"):
        draft.assign("activation_checkpointing", False, keys=["disable_gradient_checkpointing"])
    draft.move("gradient_checkpointing", "activation_checkpointing")
    take_checkpointing_options(draft)


def _take_data(draft: Draft, file: Path) -> None:
    draft.move(
        "cutoff_len",
        "max_seq_length",
        note="LLaMA-Factory shortens both the prompt and the answer of a longer row; here the row's end is cut off",
    )
    if draft.get("stage") == "pt":  # hparams/parser.py: rows are packed by default
        draft.assign(
            "packing", draft.get("packing", True), keys=[key for key in ("stage", "packing") if key in draft.left]
        )
        draft.notes["max_seq_length"] = "LLaMA-Factory splits a longer text into several rows; here it is truncated"
        draft.notes["packing"] = "rows do not attend to each other here; LLaMA-Factory joins them in pre-training"
    if draft.is_on("neat_packing"):
        draft.assign("packing", True, keys=[key for key in ("neat_packing", "packing") if key in draft.left])
    elif draft.is_on("packing"):
        draft.move(
            "packing", "packing", note="rows do not attend to each other here (neat_packing); in LLaMA-Factory they do"
        )
    if draft.is_on("train_on_prompt"):
        draft.assign("loss_on", "all", keys=["train_on_prompt"])
    draft.move("default_system", "system_prompt")
    if draft.get("val_size"):
        draft.move("val_size", "val_size")
    if draft.is_on("streaming"):
        draft.move("buffer_size", "streaming_buffer_size")
    _take_named_data(draft, file, "dataset")
    _take_named_data(draft, file, "eval_dataset")
    if "train_dataset" in draft.left:
        _take_v1_data(draft, file)


def _take_named_data(draft: Draft, file: Path, key: str) -> None:
    """Look the names up in dataset_info.json, as LLaMA-Factory does (data/parser.py)."""
    names = _names(draft.get(key, ""))
    if not names:
        return
    folder = str(draft.get("dataset_dir", "data"))
    info_path = find_file(f"{folder}/dataset_info.json", file)
    info = read_configuration(info_path) if info_path is not None else None
    weights = _names(draft.get("interleave_probs", "")) if key == "dataset" else []
    found: list[NamedData] = []
    for number, name in enumerate(names):
        if folder == "ONLINE":
            data: NamedData | str = NamedData(path=name, keys=(key,))
        elif info is None or info_path is None:
            data = f"a name in {folder}/dataset_info.json, which is not here: write its file or hub id"
        else:
            data = _entry(name, info, info_path, key)
        if isinstance(data, str):
            draft.report(key, name, data)
        else:
            weight = _share(weights[number]) if len(weights) == len(names) else None
            found.append(replace(data, weight=weight, weight_keys=("interleave_probs",)))
    if found:
        set_datasets(draft, found, key, weights_note=_WEIGHTS_NOTE)
    draft.left.pop(key, None)
    if info_path is not None and key == "dataset":
        draft.use("dataset_dir", "dataset")


def _take_v1_data(draft: Draft, file: Path) -> None:
    """`train_dataset` is a data file, or a YAML that lists some (examples/v1, data/v1_sft_demo.yaml)."""
    named = str(draft.get("train_dataset"))
    listed = find_file(named, file) if named.endswith((".yaml", ".yml")) else None
    entries = read_configuration(listed) if listed is not None else {"train_dataset": {"path": named}}
    paths = [text_of(block_of(entries, name, listed or file), "path", f"{listed or file}: {name}") for name in entries]
    set_datasets(draft, [NamedData(path=path, keys=("train_dataset",)) for path in paths if path is not None])


def _entry(name: str, info: Mapping[str, Any], info_path: Path, key: str) -> NamedData | str:
    """The data set of an entry of dataset_info.json, or why it is not one of ours."""
    if name not in info:
        return "no such entry in dataset_info.json"
    entry, source = block_of(info, name, info_path), f"{info_path}: {name[:80]}"
    columns, tags = block_of(entry, "columns", source), block_of(entry, "tags", source)
    for block, inside in (("columns", columns), ("tags", tags)):
        for each in inside:
            text_of(inside, each, f"{source}: {block}")
    if entry.get("ranking") or {"images", "videos", "audios", "kto_tag"} & set(columns):
        return "preferences, images, video or audio: this script trains on text"
    reason = _unread_fields(text_of(entry, "formatting", source) or "alpaca", columns, tags)
    if reason is not None:
        return reason
    file_name, url = text_of(entry, "file_name", source), text_of(entry, "hf_hub_url", source)
    if file_name is not None:
        return NamedData(path=str(_relative(info_path.parent / file_name)), keys=(key,))
    if url is None:
        return "not on the Hugging Face hub"
    split, subset = text_of(entry, "split", source), text_of(entry, "subset", source)
    return NamedData(
        path=url,
        keys=(key,),
        split=None if split is None else (split, key),
        config=None if subset is None else (subset, key),
    )


def _unread_fields(formatting: str, columns: Mapping[str, str], tags: Mapping[str, str]) -> str | None:
    if formatting == "alpaca":
        named = {columns.get("prompt", "instruction"), columns.get("response", "output")}
        is_read = named == {"instruction", "output"} or columns == {"prompt": "text"}
        return None if is_read and not columns.get("history") else ROW_FIELDS_REASON
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    return row_fields_reason(columns.get("messages", "conversations"), role, content)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ToolkitError(f"interleave_probs has {shown(text)}, expected a number") from None


def _names(value: Any) -> list[str]:
    """`identity, alpaca_en_demo` as a list."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _set_defaults(draft: Draft, *, checkpointing: bool) -> None:
    """Set what LLaMA-Factory does when a setting is absent, where that differs from ours."""
    draft.default("output_dir", "trainer_output")  # transformers' training_args.py
    draft.default("max_seq_length", 2048)  # hparams/data_args.py: cutoff_len
    if checkpointing:
        draft.default("activation_checkpointing", True)  # hparams/model_args.py: disable_gradient_checkpointing
