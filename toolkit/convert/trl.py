"""`trl sft`: its flags and its YAML (tables/trl.yaml). TRL's source is named where a rule comes from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.convert import sources
from toolkit.convert.draft import Conversion, Draft, load_dialect
from toolkit.errors import ToolkitError


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
