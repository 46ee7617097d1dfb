"""Rules about keys: unknown, removed, renamed, duplicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.convert.programs import program_of
from toolkit.errors import nearest
from toolkit.job.trainer_schema import trainer_argument_names, trainer_schema
from toolkit.lint import removed_keys as removed
from toolkit.lint.document import ACCELERATE, DEEPSPEED, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.rules.programs import schema_of
from toolkit.lint.rules.settings import as_bool, as_float, as_int, shorten
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS, NOTHING, RESHARD, Types, ValueType

# accelerate's `process_config` still converts these.
OLD_ACCELERATE_KEYS = {"fp16", "dynamo_backend"}
# Read outside DeepSpeedConfig, or an old spelling that it accepts.
MORE_DEEPSPEED_KEYS = {"bfloat16", "sequence_parallel_size", "inference", "msamp"}
# Keys of the Trainer's `fsdp_config`, without the prefix that it strips.
TRAINER_FSDP_KEYS = {
    *("version", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading"),
    *("state_dict_type", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2"),
    *("xla_fsdp_grad_ckpt", "xla_fsdp_settings", "forward_prefetch", "backward_prefetch", "use_orig_params"),
    *("sync_module_states", "limit_all_gathers"),
}
# Similarity above which a key counts as a misspelling. It is higher for Trainer arguments, because scripts have
# arguments of their own in the same file.
TRAINER_SIMILARITY = 0.88
SIMILARITY = 0.75
COMMENT_PREFIXES = ("_", "//", "#", "$")
# How `ValueType.expected` begins where no other word is accepted; other types list the words of presets only.
READABLE_TYPES = ("true or false", "a whole number", "a number", "keys and values", "0, 1, 2")
FIELD_TYPES: dict[str, tuple[Callable[[Any], object], str]] = {
    "int": (as_int, "a whole number"),
    "float": (as_float, "a number"),
    "bool": (as_bool, "true or false"),
}


def _unknown(doc: Document, block: str, name: str, known: Any, what: str) -> Match:
    """Suggest the nearest known key; the edit renames to it, unless that key is already present."""
    prefix = f"{block}." if block else ""
    key = f"{prefix}{name}"
    close = nearest(name, known, cutoff=SIMILARITY) if len(name) <= 100 else None
    return Match(
        key,
        f"`{shorten(name)}` {what}",
        f"`{close}`" if close else "remove it",
        rename=close if close and not doc.has(f"{prefix}{close}") else None,
    )


@rule(ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_key(doc: Document) -> Iterator[Match]:
    """`accelerate launch` refuses to start: a top-level key of the YAML is unknown to it."""
    if doc.get("compute_environment") == "AMAZON_SAGEMAKER":
        return
    what = "is not a key of an accelerate configuration; it refuses to start"
    for name in doc.data:
        if name not in ACCELERATE_BLOCKS[""] and name not in OLD_ACCELERATE_KEYS:
            yield _unknown(doc, "", name, ACCELERATE_BLOCKS[""], what)


@rule(ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_nested_key(doc: Document) -> Iterator[Match]:
    """accelerate silently accepts an unknown key inside a block, and nothing reads it: the default applies."""
    for block, known in ACCELERATE_BLOCKS.items():
        for name in doc.block(block):
            prefixed = name if block != "fsdp_config" or name.startswith("fsdp") else f"fsdp_{name}"
            if name not in known and prefixed not in known:
                yield _unknown(doc, block, name, known, f"in {block} has no effect: accelerate ignores it silently")


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="the nearest known key, or nothing")
def unknown_deepspeed_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed silently accepts an unknown top-level key, and nothing reads it."""
    known = DEEPSPEED_BLOCKS[""].keys() | MORE_DEEPSPEED_KEYS | set(removed.DEEPSPEED_REMOVED)
    for name in doc.data:
        is_dotted = name.partition(".")[0] in DEEPSPEED_BLOCKS and "." in name
        if name not in known and not is_dotted and not name.startswith(COMMENT_PREFIXES):
            yield _unknown(doc, "", name, DEEPSPEED_BLOCKS[""], "has no effect: DeepSpeed ignores it silently")


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="the key inside its block")
def dotted_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed reads nested blocks only: a key like `zero_optimization.reduce_bucket_size` at the top level has no
    effect, and the block's default applies (500,000,000 here). TRL 1.16 writes three of them for its reference model
    (`prepare_deepspeed` in trl/models/utils.py)."""
    for name in doc.data:
        block, _, key = name.partition(".")
        if key and block in DEEPSPEED_BLOCKS and block:
            message = f"`{shorten(name)}` at the top level has no effect: DeepSpeed reads {block}'s own keys"
            yield Match(name, message, f'`"{block}": {{"{shorten(key)}": ...}}`', line=doc.dotted_lines.get(name))


@rule(ERROR, ACCELERATE, library="accelerate", fix="a value of the type that the message names")
def wrong_type(doc: Document) -> Iterator[Match]:
    """The value is none that the key takes: accelerate raises, at the latest in the ranks."""
    return _wrong_types(doc, ACCELERATE_BLOCKS)


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="a value of the type that the message names")
def wrong_deepspeed_type(doc: Document) -> Iterator[Match]:
    """The value is none that the key takes: DeepSpeed raises in every rank, or where the value is first used."""
    return _wrong_types(doc, DEEPSPEED_BLOCKS)


@rule(ERROR, TRAINER, library="transformers", fix="a value of the type that the message names")
def wrong_argument_type(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` does not check most types: it keeps the value, and what first computes with it raises."""
    for name, field in trainer_schema().fields.items():
        reads, expected = FIELD_TYPES.get(field.type.removesuffix(" | None"), (shorten, ""))
        if doc.get(name) is not None and reads(doc.get(name)) is None:
            yield Match(name, f"{shorten(doc.get(name))}, expected {expected}", expected)


def _wrong_types(doc: Document, blocks: Mapping[str, Types]) -> Iterator[Match]:
    for block, types in blocks.items():
        for name, value in doc.block(block).items() if block else doc.data.items():
            is_fsdp = block == "fsdp_config"
            kind = types.get(name) or types.get(f"fsdp_{name}" if is_fsdp else name)
            if kind is not None and _has_wrong_type(kind, value, fsdp=is_fsdp):
                key = f"{block}.{name}" if block else name
                yield Match(key, f"{shorten(value)}, expected {kind.expected}", kind.expected)


def _has_wrong_type(kind: ValueType, value: Any, *, fsdp: bool) -> bool:
    """The libraries read `"8"` as 8 and `yes` as true; other rules are about words that mean something else."""
    readings = (value, as_bool(value), as_int(value), as_float(value))
    if value is None or kind is RESHARD or any(kind.accepts(each) for each in readings if each is not None):
        return False
    if isinstance(value, list | dict) or kind.expected.startswith(READABLE_TYPES):
        return kind.expected != NOTHING.expected
    # FSDP1 numbers its strategies, and an unquoted `no` is false.
    return kind.expected.startswith("text") and type(value) in (int, float) and not fsdp


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="the nearest known key, or nothing")
def refused_nested_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed refuses an unknown key inside `zero_optimization`, its offload blocks, `bf16` and `fp16`, once the
    ranks have started."""
    for block, known in DEEPSPEED_BLOCKS.items():
        accepted = {*known, *removed.ZERO_DEPRECATED, *removed.ZERO_REMOVED} if block == "zero_optimization" else known
        for name in doc.block(block):
            # DeepSpeed also accepts the name of its own field, without `stage3_`.
            if name not in accepted and f"stage3_{name}" not in known:
                yield _unknown(doc, block, name, known, f"in {block.rpartition('.')[2]} is refused by DeepSpeed")


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.19.8", fix="nothing")
def removed_deepspeed_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed 0.19.8 removed the feature and refuses its key, even where it is disabled."""
    for name, instead in removed.DEEPSPEED_REMOVED.items():
        if doc.has(name):
            fix = f"`{instead}`" if instead else "remove it"
            yield Match(name, f"DeepSpeed removed `{name}` and refuses it", fix, remove=True)
    for name in removed.ZERO_REMOVED:
        key = f"zero_optimization.{name}"
        if doc.has(key):
            yield Match(key, f"DeepSpeed removed `{name}` and refuses it", "remove it", remove=True)


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="the new key")
def deprecated_zero_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed still accepts the old spelling, and warns in the log that it will be removed."""
    for name, instead in removed.ZERO_DEPRECATED.items():
        key = f"zero_optimization.{name}"
        if doc.has(key):
            rename = instead if instead in DEEPSPEED_BLOCKS["zero_optimization"] else None
            yield Match(key, f"`{name}` is an old spelling", f"`{instead}`", rename=rename)


@rule(ERROR, TRAINER, library="transformers", fix="the new field, or nothing")
def removed_training_argument(doc: Document) -> Iterator[Match]:
    """transformers 5 has removed the field: `HfArgumentParser` and `TrainingArguments(...)` raise."""
    if program_of(doc.data) not in (None, "trl"):  # which pin other versions; rules/programs.py
        return
    for name, instead in removed.TRAINING_ARGUMENTS_REMOVED.items():
        if doc.has(name) and name not in trainer_argument_names():
            renamed = removed.TRAINING_ARGUMENTS_RENAMED.get(name)
            yield Match(
                name,
                f"`TrainingArguments` no longer has `{name}`, and raises",
                f"`{instead}`" if instead else "remove it",
                rename=None if renamed is None or doc.has(renamed) else renamed,
                remove=instead is None,
            )


@rule(NOTE, TRAINER, library="transformers", fix="the new field")
def deprecated_training_argument(doc: Document) -> Iterator[Match]:
    """transformers 5 still accepts the old name, with a FutureWarning; version 6 will not."""
    schema = schema_of(doc)
    names = trainer_argument_names() if schema is None else schema.fields
    for name, instead in removed.TRAINING_ARGUMENTS_DEPRECATED.items():
        if doc.has(name) and instead in names:
            rename = None if doc.has(instead) else instead
            yield Match(name, f"`{name}` is removed in transformers 6", f"`{instead}`", rename=rename)


@rule(WARNING, TRAINER, library="transformers", fix="the nearest field")
def misspelt_training_argument(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` has no such field but a very similar one: the parser raises, unless the script has an
    argument of that name itself."""
    fields = trainer_argument_names()
    for name in () if schema_of(doc) is not None else doc.data:
        if name in fields or name in removed.TRAINING_ARGUMENTS_REMOVED or len(name) > 100:
            continue
        close = nearest(name, fields, cutoff=TRAINER_SIMILARITY)
        if close and not doc.has(close):
            yield Match(name, f"`{name}` is not a field of TrainingArguments; `{close}` is", f"`{close}`", rename=close)


@rule(ERROR, TRAINER, library="transformers", fix="the nearest known key, or nothing")
def unknown_fsdp_config_key(doc: Document) -> Iterator[Match]:
    """The Trainer silently drops an unknown key of `fsdp_config`: the default applies."""
    for name in doc.block("fsdp_config"):
        if name.removeprefix("fsdp_") not in TRAINER_FSDP_KEYS:
            yield _unknown(doc, "fsdp_config", name, TRAINER_FSDP_KEYS, "in fsdp_config has no effect")


@rule(WARNING, ACCELERATE, DEEPSPEED, TRAINER, library="pyyaml", fix="one of the two")
def duplicate_key(doc: Document) -> Iterator[Match]:
    """A key appears twice in one block: the last one silently wins."""
    for duplicate in doc.repeated[:20]:
        yield Match(duplicate.key, f"`{shorten(duplicate.key)}` appears twice; the last wins", "remove one")
