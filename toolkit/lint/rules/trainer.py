"""Rules about Trainer arguments that transformers refuses together, or reads otherwise than they sound."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint.document import TRAINER, Document
from toolkit.lint.finding import ERROR, WARNING, Edit, Hit, rule
from toolkit.lint.rules.values import integer, shown, truth, word


def has_fsdp(doc: Document) -> bool:
    return bool(doc.get("fsdp")) and truth(doc.get("fsdp")) is not False


@rule("fp16-and-bf16", ERROR, TRAINER, library="transformers", fix="one of the two")
def fp16_and_bf16(doc: Document) -> Iterator[Hit]:
    """`TrainingArguments` refuses fp16 and bf16 together."""
    if truth(doc.get("fp16")) and truth(doc.get("bf16")):
        yield Hit(key="fp16", message="fp16 and bf16 are both true", fix="`bf16: true` alone")


@rule("checkpointing-twice", ERROR, TRAINER, library="transformers", fix="fsdp_config's activation_checkpointing alone")
def checkpointing_twice(doc: Document) -> Iterator[Hit]:
    """FSDP's activation checkpointing and the Trainer's together are refused when the Trainer is made."""
    block = doc.block("fsdp_config")
    fsdps = truth(block.get("activation_checkpointing", block.get("fsdp_activation_checkpointing")))
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if truth(doc.get(name))]
    if has_fsdp(doc) and fsdps and names:
        yield Hit(key=names[0], message=f"{names[0]} and fsdp_config's own are both on", fix=f"`{names[0]}: false`",
                  edit=Edit(key=names[0]))  # fmt: skip


@rule(
    "sharded-save-only-model", ERROR, TRAINER, library="transformers", fix="FULL_STATE_DICT, or save_only_model: false"
)
def sharded_save_only_model(doc: Document) -> Iterator[Hit]:
    """The Trainer refuses `save_only_model` with FSDP's sharded state dict."""
    block = doc.block("fsdp_config")
    kind = word(block.get("state_dict_type", block.get("fsdp_state_dict_type")))
    if has_fsdp(doc) and truth(doc.get("save_only_model")) and kind == "SHARDED_STATE_DICT":
        yield Hit(key="save_only_model", message="refused with SHARDED_STATE_DICT", fix="`save_only_model: false`",
                  edit=Edit(key="save_only_model"))  # fmt: skip


@rule("save-only-model-best", ERROR, TRAINER, library="transformers", fix="one of the two")
def save_only_model_best(doc: Document) -> Iterator[Hit]:
    """The Trainer refuses `save_only_model` with `load_best_model_at_end` under DeepSpeed and FSDP."""
    sharded = has_fsdp(doc) or bool(doc.get("deepspeed"))
    if sharded and truth(doc.get("save_only_model")) and truth(doc.get("load_best_model_at_end")):
        yield Hit(key="save_only_model", message="refused with load_best_model_at_end", fix="`save_only_model: false`")


@rule("fsdp-as-words", WARNING, TRAINER, library="transformers", fix="fsdp: true, and the rest in fsdp_config")
def fsdp_as_words(doc: Document) -> Iterator[Hit]:
    """Words in `fsdp` still work, deprecated; they mean FSDP2 unless `fsdp_config` says version 1, and FSDP2 refuses
    the hybrid ones."""
    value = doc.get("fsdp")
    if isinstance(value, list) or (isinstance(value, str) and value and truth(value) is None):
        yield Hit(key="fsdp", message=f"{shown(value)} is the old form", fix=_fsdp_fix(doc, str(value)))


def _fsdp_fix(doc: Document, value: str) -> str:
    block = doc.block("fsdp_config")
    version = integer(block.get("version", block.get("fsdp_version", 2)))
    reshard = "false" if "shard_grad_op" in value else "true"
    return f"`fsdp: true`, `fsdp_config: {{version: {version}, reshard_after_forward: {reshard}}}`"
