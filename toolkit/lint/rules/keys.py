"""Rules about keys: unknown, removed, renamed, written twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.errors import nearest
from toolkit.installed import training_argument_types
from toolkit.keys import (
    ACCELERATE_KEYS,
    DEEPSPEED_BLOCK_KEYS,
    DEEPSPEED_KEYS,
    FSDP_KEYS,
    OFFLOAD_KEYS,
    PARALLELISM_KEYS,
    PRECISION_KEYS,
    ZERO_KEYS,
)
from toolkit.lint.document import ACCELERATE, DEEPSPEED, TRAINER, Document
from toolkit.lint.finding import ERROR, NOTE, WARNING, Edit, Hit, rule
from toolkit.lint.removed import (
    DEEPSPEED_REMOVED,
    OWN_ARGUMENTS,
    TRAINING_ARGUMENTS_DEPRECATED,
    TRAINING_ARGUMENTS_REMOVED,
    TRAINING_ARGUMENTS_RENAMED,
    ZERO_DEPRECATED,
    ZERO_REMOVED,
)

# accelerate's `process_config` still converts these.
OLD_ACCELERATE_KEYS = {"fp16", "dynamo_backend"}
# Read elsewhere than in DeepSpeedConfig, or an old spelling that it takes.
MORE_DEEPSPEED_KEYS = {"bfloat16", "sequence_parallel_size", "inference", "msamp"}
# Trainer's `fsdp_config`, without the prefix that it strips.
TRAINER_FSDP_KEYS = {
    *("version", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading"),
    *("state_dict_type", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2"),
    *("xla_fsdp_grad_ckpt", "xla_fsdp_settings", "forward_prefetch", "backward_prefetch", "use_orig_params"),
    *("sync_module_states", "limit_all_gathers"),
}
# As near as a slip of the fingers: other scripts have arguments of their own in the same file.
SLIP = 0.88
NEAR = 0.75
COMMENT = ("_", "//", "#", "$")


def shown(name: str) -> str:
    """A key as a sentence carries it, whatever a file holds."""
    return name if len(name) <= 60 else f"{name[:57]}..."


def _unknown(doc: Document, block: str, name: str, known: Any, what: str) -> Hit:
    """The nearest known key is named; it is written only where it is near enough and not there yet."""
    prefix = f"{block}." if block else ""
    key = f"{prefix}{name}"
    close = nearest(name, known, cutoff=NEAR) if len(name) <= 100 else None
    return Hit(
        key=key,
        message=f"`{shown(name)}` {what}",
        fix=f"`{close}`" if close else "leave it out",
        edit=Edit(key=key, rename=close) if close and not doc.has(f"{prefix}{close}") else None,
    )


@rule("unknown-key", ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_key(doc: Document) -> Iterator[Hit]:
    """`accelerate launch` refuses to start: a top-level key of the YAML is unknown to it."""
    if doc.get("compute_environment") == "AMAZON_SAGEMAKER":
        return
    for name in doc.data:
        if name not in ACCELERATE_KEYS | OLD_ACCELERATE_KEYS:
            yield _unknown(
                doc, "", name, ACCELERATE_KEYS, "is no key of an accelerate configuration; it refuses to start"
            )


@rule("unknown-nested-key", ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_nested_key(doc: Document) -> Iterator[Hit]:
    """accelerate takes an unknown key inside a block without a word, and nothing reads it: the default stays."""
    blocks = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": DEEPSPEED_BLOCK_KEYS,
        "parallelism_config": PARALLELISM_KEYS,
    }
    for block, known in blocks.items():
        for name in doc.block(block):
            prefixed = name if block != "fsdp_config" or name.startswith("fsdp") else f"fsdp_{name}"
            if prefixed not in known:
                yield _unknown(doc, block, name, known, f"in {block} is read by nothing: accelerate says no word")


@rule("unknown-deepspeed-key", ERROR, DEEPSPEED, library="deepspeed", fix="the nearest known key, or nothing")
def unknown_deepspeed_key(doc: Document) -> Iterator[Hit]:
    """DeepSpeed takes an unknown top-level key without a word, and nothing reads it."""
    known = DEEPSPEED_KEYS | MORE_DEEPSPEED_KEYS | set(DEEPSPEED_REMOVED)
    for name in doc.data:
        if name not in known and not name.startswith(COMMENT):
            yield _unknown(doc, "", name, DEEPSPEED_KEYS, "is read by nothing: DeepSpeed says no word")


@rule("refused-nested-key", ERROR, DEEPSPEED, library="deepspeed", fix="the nearest known key, or nothing")
def refused_nested_key(doc: Document) -> Iterator[Hit]:
    """DeepSpeed refuses an unknown key inside `zero_optimization`, its offload blocks, `bf16` and `fp16`, after the
    ranks started."""
    for name in doc.block("zero_optimization"):
        own_name = f"stage3_{name}" in ZERO_KEYS  # the model's field name, which it also takes
        if name not in ZERO_KEYS | set(ZERO_DEPRECATED) | set(ZERO_REMOVED) and not own_name:
            yield _unknown(doc, "zero_optimization", name, ZERO_KEYS, "in zero_optimization is refused by DeepSpeed")
    strict = {f"zero_optimization.{block}": known for block, known in OFFLOAD_KEYS.items()} | PRECISION_KEYS
    for block, known in strict.items():
        for name in doc.block(block):
            if name not in known:
                yield _unknown(doc, block, name, known, f"in {block.rpartition('.')[2]} is refused by DeepSpeed")


@rule("removed-deepspeed-key", ERROR, DEEPSPEED, library="deepspeed", removed_in="0.19.8", fix="nothing")
def removed_deepspeed_key(doc: Document) -> Iterator[Hit]:
    """DeepSpeed 0.19.8 removed the feature and refuses its key, even where it is disabled."""
    for name, instead in DEEPSPEED_REMOVED.items():
        if doc.has(name):
            fix = f"`{instead}`" if instead else "leave it out"
            yield Hit(key=name, message=f"DeepSpeed removed `{name}` and refuses it", fix=fix, edit=Edit(key=name))
    for name in ZERO_REMOVED:
        key = f"zero_optimization.{name}"
        if doc.has(key):
            yield Hit(key=key, message=f"DeepSpeed removed `{name}` and refuses it", fix="leave it out",
                      edit=Edit(key=key))  # fmt: skip


@rule("deprecated-zero-key", WARNING, DEEPSPEED, library="deepspeed", fix="the key of today")
def deprecated_zero_key(doc: Document) -> Iterator[Hit]:
    """DeepSpeed still takes the old spelling, and says in the log that it will go."""
    for name, instead in ZERO_DEPRECATED.items():
        key = f"zero_optimization.{name}"
        if doc.has(key):
            edit = Edit(key=key, rename=instead) if instead in ZERO_KEYS else None
            yield Hit(key=key, message=f"`{name}` is an old spelling", fix=f"`{instead}`", edit=edit)


@rule("removed-training-argument", ERROR, TRAINER, library="transformers", fix="the field of today, or nothing")
def removed_training_argument(doc: Document) -> Iterator[Hit]:
    """transformers 5 has no such field any more: `HfArgumentParser` and `TrainingArguments(...)` raise."""
    own = {name for mark, names in OWN_ARGUMENTS.items() if doc.has(mark) for name in names}
    for name, instead in TRAINING_ARGUMENTS_REMOVED.items():
        if doc.has(name) and name not in training_argument_types() and name not in own:
            renamed = TRAINING_ARGUMENTS_RENAMED.get(name)
            taken = renamed is not None and doc.has(renamed)
            yield Hit(
                key=name,
                message=f"`TrainingArguments` has no `{name}` any more, and raises",
                fix=f"`{instead}`" if instead else "leave it out",
                edit=_removal(name, renamed, instead) if not taken else None,
            )


def _removal(name: str, renamed: str | None, instead: str | None) -> Edit | None:
    if renamed:
        return Edit(key=name, rename=renamed)
    return Edit(key=name) if instead is None else None


@rule("deprecated-training-argument", NOTE, TRAINER, library="transformers", fix="the field of today")
def deprecated_training_argument(doc: Document) -> Iterator[Hit]:
    """transformers 5 still takes the old name, with a FutureWarning; version 6 will not."""
    for name, instead in TRAINING_ARGUMENTS_DEPRECATED.items():
        if doc.has(name) and instead in training_argument_types():
            edit = None if doc.has(instead) else Edit(key=name, rename=instead)
            yield Hit(key=name, message=f"`{name}` goes in transformers 6", fix=f"`{instead}`", edit=edit)


@rule("misspelt-training-argument", WARNING, TRAINER, library="transformers", fix="the nearest field")
def misspelt_training_argument(doc: Document) -> Iterator[Hit]:
    """No `TrainingArguments` field has this name, and one has nearly the same: the parser raises, unless the
    script has an argument of that name itself."""
    fields = training_argument_types()
    for name in doc.data:
        if name in fields or name in TRAINING_ARGUMENTS_REMOVED or len(name) > 100:
            continue
        close = nearest(name, fields, cutoff=SLIP)
        if close and not doc.has(close):
            yield Hit(key=name, message=f"`{name}` is no field of TrainingArguments, `{close}` is", fix=f"`{close}`",
                      edit=Edit(key=name, rename=close))  # fmt: skip


@rule("unknown-fsdp-config-key", ERROR, TRAINER, library="transformers", fix="the nearest known key, or nothing")
def unknown_fsdp_config_key(doc: Document) -> Iterator[Hit]:
    """The Trainer drops an unknown key of `fsdp_config` without a word: the default stays."""
    for name in doc.block("fsdp_config"):
        if name.removeprefix("fsdp_") not in TRAINER_FSDP_KEYS:
            yield _unknown(doc, "fsdp_config", name, TRAINER_FSDP_KEYS, "in fsdp_config is read by nothing")


@rule("duplicate-key", WARNING, ACCELERATE, DEEPSPEED, TRAINER, library="pyyaml", fix="one of the two")
def duplicate_key(doc: Document) -> Iterator[Hit]:
    """A key stands twice in one block: the last one wins, without a word."""
    for entry in doc.duplicates[:20]:
        yield Hit(key=entry.key, message=f"`{shown(entry.key)}` stands twice; the last one wins", fix="remove one")
