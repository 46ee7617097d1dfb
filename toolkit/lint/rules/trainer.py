"""Rules about Trainer arguments that transformers refuses together, or that mean something else than they say."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.convert.programs import program_of
from toolkit.lint.document import SCRIPTS, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.rules.settings import as_bool, as_enum, as_int, fsdp_setting, shorten
from toolkit.presets.method_rules import rejects_save_only_model

# Keys of TRL's DPOConfig that its SFTConfig does not have.
DPO_KEYS = ("beta", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model", "f_divergence_type")


def uses_fsdp(doc: Document) -> bool:
    """Return True for Trainer arguments that turn FSDP on."""
    return bool(doc.get("fsdp")) and as_bool(doc.get("fsdp")) is not False


@rule(ERROR, TRAINER, library="transformers", fix="one of the two")
def fp16_and_bf16(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` refuses fp16 and bf16 together."""
    if as_bool(doc.get("fp16")) and as_bool(doc.get("bf16")):
        yield Match("fp16", "fp16 and bf16 are both true", "`bf16: true` alone")


@rule(ERROR, TRAINER, library="transformers", fix="fsdp_config's activation_checkpointing alone")
def checkpointing_twice(doc: Document) -> Iterator[Match]:
    """FSDP's activation checkpointing and the Trainer's are refused together when the Trainer is built."""
    in_fsdp = as_bool(fsdp_setting(doc, "activation_checkpointing"))
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if as_bool(doc.get(name))]
    if uses_fsdp(doc) and in_fsdp and names:
        yield Match(names[0], f"{names[0]} and that of fsdp_config are both on", f"`{names[0]}: false`", remove=True)


@rule(ERROR, TRAINER, library="transformers", fix="FULL_STATE_DICT, or save_only_model: false")
def sharded_save_only_model(doc: Document) -> Iterator[Match]:
    """The Trainer refuses `save_only_model` with FSDP's sharded state dict."""
    state_dict_type = as_enum(fsdp_setting(doc, "state_dict_type"))
    if uses_fsdp(doc) and as_bool(doc.get("save_only_model")) and rejects_save_only_model(state_dict_type):
        yield Match("save_only_model", "refused with SHARDED_STATE_DICT", "`save_only_model: false`", remove=True)


@rule(WARNING, TRAINER, name="4bit-not-sharded", library="accelerate", fix="bnb_4bit_quant_storage: bfloat16")
def four_bit_not_sharded(doc: Document) -> Iterator[Match]:
    """bitsandbytes stores 4-bit weights as uint8 unless told otherwise, and accelerate leaves those out of FSDP2's
    sharding: every GPU holds the whole 4-bit model."""
    storage = as_enum(doc.get("bnb_4bit_quant_storage"))
    if uses_fsdp(doc) and as_bool(doc.get("load_in_4bit")) and "FLOAT" not in storage:
        fix = "`bnb_4bit_quant_storage: bfloat16`, the dtype of the computation"
        yield Match("load_in_4bit", "4-bit weights stored as uint8 are not sharded: every GPU holds all of them", fix)


@rule(ERROR, TRAINER, library="transformers", fix="one of the two")
def save_only_model_best(doc: Document) -> Iterator[Match]:
    """The Trainer refuses `save_only_model` with `load_best_model_at_end` under DeepSpeed and FSDP."""
    sharded = uses_fsdp(doc) or bool(doc.get("deepspeed"))
    if sharded and as_bool(doc.get("save_only_model")) and as_bool(doc.get("load_best_model_at_end")):
        yield Match("save_only_model", "refused with load_best_model_at_end", "`save_only_model: false`")


@rule(WARNING, TRAINER, library="transformers", fix="fsdp: true, and the rest in fsdp_config")
def fsdp_as_words(doc: Document) -> Iterator[Match]:
    """Words in `fsdp` still work but are deprecated; they mean FSDP2 unless `fsdp_config` asks for version 1, and FSDP2
    refuses the hybrid ones."""
    value = doc.get("fsdp")
    if isinstance(value, list) or (isinstance(value, str) and value and as_bool(value) is None):
        version = as_int(fsdp_setting(doc, "version", 2))
        reshard = "false" if "shard_grad_op" in str(value) else "true"
        fix = f"`fsdp: true`, `fsdp_config: {{version: {version}, reshard_after_forward: {reshard}}}`"
        yield Match("fsdp", f"{shorten(value)} is the deprecated form", fix)


@rule(
    NOTE,
    TRAINER,
    library="transformers",
    fix="sync_each_batch: true in accelerator_config's gradient_accumulation_kwargs",
)
def whole_gradients_between_steps(doc: Document) -> Iterator[Match]:
    """With FSDP, the Trainer reduces gradients in the last accumulation step only: until then every GPU holds them
    unsharded, 2 bytes per trained parameter in bf16 (16 GB for 8 billion). `sync_each_batch` reduces them in every
    accumulation step: shards, and one reduce-scatter more for each."""
    steps, config = as_int(doc.get("gradient_accumulation_steps")) or 1, doc.get("accelerator_config")
    chosen = doc.has("accelerator_config.gradient_accumulation_kwargs.sync_each_batch") or isinstance(config, str)
    if uses_fsdp(doc) and steps > 1 and not chosen:
        message = f"in {steps} accumulation steps each GPU holds all gradients, 2 bytes per trained parameter"
        fix = "`accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}`; `false` to keep them"
        yield Match("gradient_accumulation_steps", message, fix)


@rule(
    WARNING,
    TRAINER,
    *SCRIPTS,
    library="transformers",
    fix="nothing: the toolkit's ranks agree on the step after which they save; or save regularly",
)
def jit_checkpoint(doc: Document) -> Iterator[Match]:
    """`enable_jit_checkpoint` saves when SIGTERM arrives, and each rank decides by its own signal: ranks that get it in
    different steps wait for each other forever. Nothing reads the mark of an incomplete checkpoint when a run
    resumes."""
    key, message = "enable_jit_checkpoint", "each rank saves after the step in which its own signal came"
    if as_bool(doc.get(key)):
        yield Match(key, message, f"remove {key}")
    for call in doc.script.launches:
        if key.replace("_", "-") in call.options and as_bool(call.options[key.replace("_", "-")]) is not False:
            yield Match(f"--{key}", message, f"remove --{key}", line=call.line)


# -- TRL's trainers


def is_trl(doc: Document) -> bool:
    """Return True for arguments that TRL may read: LLaMA-Factory and ms-swift have some of the same names."""
    return doc.has("model_name_or_path") and program_of(doc.data) in (None, "trl")


@rule(WARNING, TRAINER, library="trl", fix="nothing: it is off in DPO, and on where rows are packed with bfd")
def padding_free_ignored(doc: Document) -> Iterator[Match]:
    """TRL's DPOTrainer warns in the log, and turns `padding_free` off: rows are padded. Its SFTTrainer turns it on
    for rows that are packed with the default strategy, whatever the file says."""
    chosen = as_bool(doc.get("padding_free")) if is_trl(doc) else None
    strategy = doc.get("packing_strategy", "bfd")
    if chosen and any(doc.has(key) for key in DPO_KEYS):
        yield Match("padding_free", "DPOTrainer turns it off: rows are padded", "remove it", remove=True)
    elif chosen is False and as_bool(doc.get("packing")) and strategy != "wrapped":
        message = f"packing with {shorten(strategy)} turns it on all the same"
        yield Match("padding_free", message, "remove it, or `packing: false`", remove=True)


@rule(ERROR, TRAINER, library="trl", fix="packing: true, or max_length: null")
def padding_free_refused(doc: Document) -> Iterator[Match]:
    """TRL's SFTTrainer refuses `padding_free` with a `max_length` (1,024 by default) unless rows are packed."""
    chosen = is_trl(doc) and as_bool(doc.get("padding_free")) and not any(doc.has(key) for key in DPO_KEYS)
    length = doc.get("max_length", 1024)
    if chosen and not as_bool(doc.get("packing")) and length is not None:
        message = f"refused with max_length {shorten(length)} and without packing"
        yield Match("padding_free", message, "`packing: true`, or `max_length: null` for rows that are short enough")


@rule(NOTE, TRAINER, library="trl", fix="precompute_ref_log_probs: false")
def precompute_with_adapters(doc: Document) -> Iterator[Match]:
    """With adapters, TRL's DPO and KTO have no reference model: they turn the adapters off for its log-probabilities.
    Computing these first frees no memory; from the second epoch on it saves a forward pass per step."""
    key = "precompute_ref_log_probs"
    if is_trl(doc) and as_bool(doc.get(key)) and as_bool(doc.get("use_peft")):
        message = "frees no memory: with use_peft there is no reference model"
        yield Match(key, message, f"`{key}: false`, unless rows are trained on more than once", remove=True)
