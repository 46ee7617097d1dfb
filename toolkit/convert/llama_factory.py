"""LLaMA-Factory's YAML (tables/llama-factory.yaml). Its source is named where a rule comes from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.convert import sources
from toolkit.convert.draft import Conversion, Draft, block_of, load_dialect, names_in
from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import read_configuration, unexpected
from toolkit.files.paths import find_file
from toolkit.job.argument_aliases import HINTS
from toolkit.job.argument_values import check_type

# LLaMA-Factory's columns, and the fields of our formats; without a response the prompt is text to go on from.
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the content of a LLaMA-Factory YAML. Raises ToolkitError for what is not supervised fine-tuning."""
    stage = values.get("stage", "sft")
    if stage not in ("sft", "pt"):
        raise ToolkitError(f"{file} is for stage {shown(stage)}, not supervised fine-tuning", hint=HINTS["stage"])
    if not values.get("dataset") and not values.get("train_dataset"):
        has_model = values.keys() & {"model", "model_name_or_path"}
        why = "it is for inference, export or prediction" if has_model else "nor a model"
        raise ToolkitError(f"{file} names no dataset to train on: {why}", hint="convert the file of `train`")
    dialect = load_dialect("llama-factory")
    dialect.check_training(values, file)
    draft = Draft(dialect, values)
    is_v1 = "model" in values and "model_name_or_path" not in values
    chosen = _take_v1(draft, file) if is_v1 else None
    method = str(draft.get("peft_config.name", "full") if is_v1 else draft.get("finetuning_type", "lora"))
    if method == "freeze":
        raise ToolkitError(
            f"{file}: finetuning_type 'freeze' counts layers from the end, and `train_only` names them",
            hint="write `finetuning_type: full`, convert, and add `train_only: ['model.layers.30.*', ...]`",
        )
    if method not in ("lora", "full"):
        message = f"{file}: finetuning_type {shown(method)} has no counterpart"
        raise ToolkitError(message, hint="`lora` and `full` have one")
    if method == "lora":
        _take_lora(draft)
    reason = "no adapter is trained: finetuning_type is full"
    draft.leave_out("lora_rank", "lora_target", "additional_target", reason=reason, has_effect=False)
    bits, kind = draft.get("quantization_bit"), str(draft.get("quantization_method", "bnb")).lower()
    if bits == 4 and kind == "bnb" and draft.get("quantization_type", "nf4") == "nf4":
        draft.assign("load_in_4bit", True, "quantization_bit")
        draft.drop("quantization_method", "quantization_type")
    if kind == "bitsandbytes":  # model/model_utils/quantization.py: a file's word is compared as it is
        reason = "nothing is quantized: LLaMA-Factory 0.9.3 and newer want `quantization_method: bnb`"
        draft.leave_out("quantization_bit", "quantization_method", "quantization_type", reason=reason)
    draft.leave_out("quantization_bit", reason=dialect.reason("quantization_bit"))
    _take_packing(draft)
    for key in ("dataset", "eval_dataset"):
        _take_named_data(draft, file, key)
    if "train_dataset" in draft.left:
        # A data file, or a YAML that lists some (examples/v1, data/v1_sft_demo.yaml).
        named = str(draft.get("train_dataset"))
        listed = find_file(named, file) if named.endswith((".yaml", ".yml")) else None
        entries = {"train_dataset": {"path": named}} if listed is None else read_configuration(listed)
        source = listed or file
        paths = [_text(block_of(entries, name, source), "path", f"{source}: {name}") for name in entries]
        sources.set_datasets(draft, [sources.NamedData(path, ("train_dataset",)) for path in paths if path is not None])
    draft.translate()
    draft.set_defaults()
    if values.get("enable_activation_checkpointing", True):  # v1's; disable_gradient_checkpointing is assigned
        draft.default("activation_checkpointing", True)  # hparams/model_args.py, v1/config/training_args.py
    return draft.finish(preset=sources.take_launch(draft, file, chosen=chosen))


def _take_v1(draft: Draft, file: Path) -> sources.Choice:
    """Use what only the format under `examples/v1` has (src/llamafactory/v1), and return the preset that it names."""
    draft.move_known(["micro_batch_size"])
    if draft.get("quant_config.quantization_bit") == 4:
        draft.assign("load_in_4bit", True, "quant_config.quantization_bit", "quant_config.name")
    name, config = draft.get("dist_config.name"), draft.get("dist_config.config_file")
    if name == "deepspeed" and config:
        return sources.preset_of_deepspeed(config, file)._replace(keys=["dist_config.name", "dist_config.config_file"])
    note = None if name in (None, "ddp", "fsdp2") else f"for {shown(name)}"
    preset = "fsdp2" if str(name).startswith("fsdp") else "ddp"
    return sources.Choice(preset, note, keys=["dist_config.name"])


def _take_lora(draft: Draft) -> None:
    draft.move("peft_config.r", "lora_r")
    draft.move_known(["lora_rank", "lora_target"])
    draft.default("lora_r", 8)  # finetuning_args.py: lora_rank; alpha is twice the rank, as here
    draft.use("finetuning_type", "peft_config.name", by="lora_r")
    if draft.is_on("pissa_init"):
        iterations = int(draft.number("pissa_iter", 16))
        draft.left["pissa_init"] = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        draft.use("pissa_iter", by="lora_config")
    draft.take_lora_config()


def _take_packing(draft: Draft) -> None:
    if draft.get("stage") == "pt":  # hparams/parser.py: rows are packed by default
        draft.assign("packing", draft.get("packing", True), "stage", "packing")
        draft.notes["max_seq_length"] = "LLaMA-Factory splits a longer text into several rows; here it is truncated"
        draft.notes["packing"] = "rows do not attend to each other here; LLaMA-Factory joins them in pre-training"
    if draft.is_on("neat_packing"):
        draft.assign("packing", True, "neat_packing", "packing")
    elif draft.is_on("packing"):
        draft.move("packing", note="rows do not attend to each other here (neat_packing); in LLaMA-Factory they do")
    if draft.get("val_size"):
        draft.move("val_size")
    if draft.is_on("streaming"):
        draft.move("buffer_size", "streaming_buffer_size")


def _take_named_data(draft: Draft, file: Path, key: str) -> None:
    """Look the names up in dataset_info.json, as LLaMA-Factory does (data/parser.py)."""
    names = names_in(draft.get(key, ""))
    if not names:
        return
    folder = str(draft.get("dataset_dir", "data"))
    info_path = find_file(f"{folder}/dataset_info.json", file)
    info = {} if info_path is None else read_configuration(info_path)
    shares = names_in(draft.get("interleave_probs", "")) if key == "dataset" else []
    found: list[sources.NamedData] = []
    for number, name in enumerate(names):
        missing = f"a name in {folder}/dataset_info.json, which is not here: write its file or hub id"
        data: sources.NamedData | str = missing
        if folder == "ONLINE":
            data = sources.NamedData(name, (key,))
        elif info_path is not None:
            data = _entry(name, info, info_path, key)
        if isinstance(data, str):
            draft.report(key, name, data)
        else:
            share = shares[number] if len(shares) == len(names) else None
            check_type("interleave_probs", share, "float | None")
            found.append(data._replace(weight=(float(share) if share else None, "interleave_probs")))
    sources.set_datasets(draft, found, key, weights_note=draft.dialect.notes["interleave_probs"])
    draft.left.pop(key, None)
    if info_path is not None and key == "dataset":
        draft.use("dataset_dir", by="dataset")


def _entry(name: str, info: Mapping[str, Any], info_path: Path, key: str) -> sources.NamedData | str:
    """The data set of an entry of dataset_info.json, or why it is not one of ours."""
    if name not in info:
        return "no such entry in dataset_info.json"
    source = f"{info_path}: {name[:80]}"
    entry = block_of(info, name, info_path)
    blocks = ((block_of(entry, each, source), f"{source}: {each}") for each in ("columns", "tags"))
    columns, tags = ({key: _text(block, key, where) for key in block} for block, where in blocks)
    texts = ("formatting", "file_name", "hf_hub_url", "split", "subset")
    formatting, file_name, url, split, subset = (_text(entry, each, source) for each in texts)
    if entry.get("ranking") or {"images", "videos", "audios", "kto_tag"} & set(columns):
        return "preferences, images, video or audio: this script trains on text"
    if formatting in (None, "alpaca"):
        if columns.get("history"):
            return "turns of `history` are not read: write them as `messages`"
        names = {"prompt": "text"} if columns and "response" not in columns else ALPACA
        fields = {field: str(columns.get(key, field)) for key, field in names.items()}
    else:
        role, content = str(tags.get("role_tag", "from")), str(tags.get("content_tag", "value"))
        field = "messages" if (role, content) == ("role", "content") else "conversations"
        reason = sources.row_fields_reason(field, role, content)
        if reason is not None:
            return reason
        fields = {field: str(columns.get("messages", "conversations"))}
    fields = {field: column for field, column in fields.items() if column != field}
    if file_name is not None:
        path = info_path.parent / file_name
        named = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
        return sources.NamedData(named, (key,), columns=fields)
    if url is None:
        return "not on the Hugging Face hub"
    return sources.NamedData(url, (key,), split=(split, key), config=(subset, key), columns=fields)


def _text(values: Mapping[str, Any], key: str, source: object) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise unexpected(source, key, value, "text")
    return value
