"""axolotl's YAML (tables/axolotl.yaml). axolotl's source is named where a rule comes from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.convert.draft import Conversion, Draft, block_of, load_dialect
from toolkit.convert.sources import NamedData, named_data, row_fields_reason, set_datasets, take_launch
from toolkit.data.formats import SHAREGPT_ROLES
from toolkit.errors import ToolkitError, shown
from toolkit.installation import documentation_address
from toolkit.models.optimizers import MUON

DATA_KEYS = {"datasets": "dataset", "test_datasets": "eval_dataset", "pretraining_dataset": "dataset"}
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
NO_EVALUATION = "there is no evaluation data"


def convert(values: Mapping[str, Any], file: Path) -> Conversion:
    """Convert the content of an axolotl YAML. Raises ToolkitError for training that is not supervised fine-tuning."""
    dialect = load_dialect("axolotl")
    dialect.check_training(values, file)
    if not values.get("base_model"):
        raise ToolkitError(f"{file} names no base_model", hint="is it an axolotl configuration for training?")
    # A data key may hold one entry without a list around it.
    listed = {key: [value] if key in DATA_KEYS and isinstance(value, dict) else value for key, value in values.items()}
    draft = Draft(dialect, listed)
    _take_method(draft, file)
    _take_optimization(draft)
    draft.translate()
    _take_data(draft)
    _take_evaluation_and_saving(draft)
    trackers = {key: name for key, name in dialect.trackers.items() if draft.get(key)}
    if trackers:  # the project's name is listed: it has no argument
        keys = (key for key in trackers if key != "wandb_project")
        draft.assign("report_to", sorted(set(trackers.values())), *keys)
    draft.set_defaults()
    return draft.finish(preset=take_launch(draft, file))


def _take_method(draft: Draft, file: Path) -> None:
    adapter, unfrozen, targets = (draft.get(key) for key in ("adapter", "unfrozen_parameters", "lora_target_modules"))
    if adapter is None:
        lora = [key for key in draft.left if key.startswith(("lora_", "peft_")) and not key.endswith("_kernel")]
        draft.leave_out(*lora, reason="no adapter is trained: `adapter` is not set", has_effect=False)
        if draft.is_on("load_in_4bit"):
            draft.leave_out("load_in_4bit", reason="4-bit weights are not trained: it needs `adapter: qlora`")
        patterns = [_shell_pattern(str(each)) for each in unfrozen] if isinstance(unfrozen, list) else []
        if patterns and None not in patterns:
            draft.assign("train_only", patterns, "unfrozen_parameters")
        return
    if adapter not in ("lora", "qlora"):
        raise ToolkitError(f"{file}: adapter {shown(adapter)} has no counterpart", hint="`adapter: lora`, or `qlora`")
    if draft.get("lora_r") is None:
        raise ToolkitError(f"{file}: adapter {adapter!r} without lora_r", hint="add `lora_r: 16`")
    draft.assign("lora_r", draft.get("lora_r"), "lora_r", "adapter")
    if adapter == "lora" and draft.is_on("load_in_4bit"):  # loaders/model.py
        draft.leave_out("load_in_4bit", reason="nothing is quantized: axolotl does so under `adapter: qlora` alone")
    if draft.is_on("lora_target_linear"):
        draft.assign("lora_target_modules", ["all-linear"], "lora_target_linear")
        reason = "lora_target_linear names all linear layers already"
        draft.leave_out("lora_target_modules", reason=reason, has_effect=False)
    elif isinstance(targets, list):
        draft.move("lora_target_modules")
    draft.leave_out("unfrozen_parameters", reason="only the adapters are trained", has_effect=False)
    draft.take_lora_config()


def _shell_pattern(regex: str) -> str | None:
    """The shell pattern for a regular expression that `re.match` tries (utils/freeze.py); None if there is none.

    >>> _shell_pattern("^lm_head.weight$"), _shell_pattern("model.layers.[0-7]."), _shell_pattern("layers.4[4-9]+")
    ('lm_head.weight', 'model.layers.[0-7].*', None)
    """
    text = regex.removeprefix("^").replace("\\.", ".")
    end = "" if text.endswith("$") else "*"
    text = text.removesuffix("$").removesuffix(".*")
    return None if set(text) & set("\\+?{}()|^$*") else text + end


def _take_optimization(draft: Draft) -> None:
    if draft.get("attn_implementation") in ("xformers", "sage", "fp8"):  # utils/schemas/enums.py
        draft.leave_out("attn_implementation", reason="transformers has no such attention: the model's default is used")
    plugins = [key for key, name in draft.left.items() if key.startswith("plugins[") and name == LIGER_PLUGIN]
    if plugins:
        liger = draft.dialect.liger
        config = {name: False for names in liger.values() for name in names}
        config |= {name: True for key, names in liger.items() if draft.is_on(key) for name in names}
        draft.assign("use_liger_kernel", True, *plugins)
        draft.assign("liger_kernel_config", config, *liger)
    if draft.get("batch_size") is not None and draft.get("gradient_accumulation_steps") is None:
        # utils/config/__init__.py
        steps = draft.number("batch_size", 1) // max(draft.number("micro_batch_size", 1), 1)
        draft.assign("gradient_accumulation_steps", max(int(steps), 1), "batch_size")
    mode = draft.get("gradient_checkpointing")
    if mode not in (None, False):
        draft.assign("activation_checkpointing", True, "gradient_checkpointing")
        if mode in ("offload", "offload_disk") or draft.get("activation_offloading"):
            draft.assign("activation_checkpointing_offload", True, "activation_offloading")
    if draft.get("optimizer") == MUON:
        note = "torch's, with updates of AdamW's size; axolotl's is in a package of its own, with a scale of its own"
        draft.move("optimizer", "optim", note=note)
    if options := draft.get("optim_args"):
        text = ",".join(f"{name}={given}" for name, given in options.items()) if isinstance(options, dict) else options
        draft.assign("optim_args", text, "optim_args")


def _take_data(draft: Draft) -> None:
    if draft.get("excess_length_strategy") == "truncate":
        draft.notes.pop("max_seq_length", None)
    if draft.get("excess_length_strategy") in ("truncate", "drop"):
        draft.drop("excess_length_strategy")
    jinja = str(draft.get("chat_template_jinja", ""))
    if jinja.endswith((".jinja", ".jinja2")) and draft.get("chat_template", "jinja") == "jinja":
        draft.assign("chat_template", jinja, "chat_template_jinja", "chat_template")
    for key, argument in DATA_KEYS.items():
        entries = [_entry(draft, prefix) for prefix in draft.entries(key)]
        set_datasets(draft, entries, argument)
    # `entries` are those of pretraining_dataset, which axolotl streams.
    if (entries or draft.is_on("streaming")) and draft.arguments.get("max_steps"):
        draft.assign("streaming", True, "streaming")
        draft.move("streaming_multipack_buffer_size", "streaming_buffer_size")
    if draft.get("val_set_size"):
        draft.move("val_set_size", "val_size")


def _entry(draft: Draft, prefix: str) -> NamedData:
    settings = draft.nested(prefix)
    kind = str(settings.get("type", ""))
    mapping = block_of(settings, "message_property_mappings", prefix.rstrip("."))
    if kind.startswith("chat_template"):
        role = settings.get("message_field_role", mapping.get("role", "role"))
        content = settings.get("message_field_content", mapping.get("content", "content"))
        reason = row_fields_reason(settings.get("field_messages", "messages"), role, content)
        names = ("field_messages", "message_property_mappings", "message_field_role", "message_field_content")
        keys = [f"{prefix}{name}" for name in names]
        if reason is not None:
            draft.leave_out(*keys, reason=reason)
        draft.drop(*keys, f"{prefix}type")
        roles = settings.get("roles")
        named = roles.items() if isinstance(roles, dict) else ()
        pairs = [(name, role) for role, names in named for name in (names if isinstance(names, list) else [names])]
        if isinstance(roles, dict) and all(SHAREGPT_ROLES.get(str(name)) == str(role) for name, role in pairs):
            draft.drop(f"{prefix}roles")  # says what the formats say anyway
    elif kind.startswith("alpaca"):
        what = "instruction, input and output"
        draft.leave_out(f"{prefix}type", reason=f"{what} go through the model's chat template here")
    elif kind in ("completion", "pretrain") and settings.get("field", "text") == "text":
        draft.notes["max_seq_length"] = "axolotl splits a longer text into several rows; here it is truncated"
        draft.drop(f"{prefix}field", f"{prefix}type")
    page = documentation_address("how-to/data.md")
    draft.leave_out(f"{prefix}type", reason=f"rows are recognised by their fields ({page})")
    return named_data(settings, prefix)


def _take_evaluation_and_saving(draft: Draft) -> None:
    epochs = float(draft.arguments.get("num_train_epochs", 1))
    _take_interval(draft, "save", "saves_per_epoch", epochs)
    if any(name in draft.arguments for name in ("val_size", "eval_dataset")):
        _take_interval(draft, "eval", "evals_per_epoch", epochs)
        if draft.arguments.get("eval_strategy", "no") != "no":
            draft.default("eval_on_start", True)  # core/builders/base.py
        draft.move("eval_batch_size", "per_device_eval_batch_size")
        micro = draft.arguments.get("per_device_train_batch_size", 1)
        draft.default("per_device_eval_batch_size", micro)  # utils/config/__init__.py
        return
    keys = (key for key in ("eval_steps", "evals_per_epoch", "eval_batch_size") if draft.get(key))
    draft.leave_out(*keys, reason=NO_EVALUATION)
    draft.take_back("eval_strategy", NO_EVALUATION)
    draft.take_back("load_best_model_at_end", NO_EVALUATION)


def _take_interval(draft: Draft, what: str, per_epoch: str, epochs: float) -> None:
    """`saves_per_epoch: 4` as the fraction of all steps that it is (utils/config/__init__.py); 1.0 or more is none."""
    steps, times = draft.get(f"{what}_steps"), draft.number(per_epoch, 0)
    fraction = 1 / (times * epochs) if times * epochs > 0 else 1.0
    if fraction < 1 or steps:
        draft.arguments[f"{what}_strategy"] = "steps"
    if fraction < 1:
        draft.assign(f"{what}_steps", round(fraction, 6), per_epoch)
        draft.leave_out(f"{what}_steps", reason=f"{per_epoch} is set")
    elif steps:
        draft.move(f"{what}_steps")
        draft.leave_out(per_epoch, reason="axolotl reads it as no interval")
    elif times:
        draft.default(f"{what}_strategy", "epoch")
        draft.use(per_epoch, by=f"{what}_strategy")
