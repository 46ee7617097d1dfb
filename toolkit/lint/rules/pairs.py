"""Rules about a YAML and the DeepSpeed JSON that it names: found, not repeated, not contradicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.lint.document import ACCELERATE, TRAINER, Document
from toolkit.lint.finding import ERROR, WARNING, Edit, Hit, rule
from toolkit.lint.naming import candidates, naming_key
from toolkit.lint.rules.deepspeed import BATCH, stage
from toolkit.lint.rules.values import integer, is_deepspeed, shown, truth

# accelerate 1.15, DeepSpeedPlugin._deepspeed_config_checks. `zero3_init_flag` may stay.
OWNED_BY_JSON = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
# Numbers that both state: the Trainer's field and DeepSpeed's key.
BOTH = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_epsilon": "optimizer.params.eps",
    "warmup_steps": "scheduler.params.warmup_num_steps",
}


@rule(
    "deepspeed-file-missing", ERROR, ACCELERATE, TRAINER, library="accelerate", fix="the path of a file that is there"
)
def deepspeed_file_missing(doc: Document) -> Iterator[Hit]:
    """The JSON that the YAML names is not there: accelerate takes the path for base64 text, and raises."""
    key, paths = naming_key(doc), candidates(doc)
    if paths and not any(path.is_file() for path in paths):
        yield Hit(key=key, message=f"{shown(doc.get(key))} is not there", fix="a path that exists")


@rule("deepspeed-file-relative", WARNING, ACCELERATE, TRAINER, library="accelerate", fix="an absolute path")
def deepspeed_file_relative(doc: Document) -> Iterator[Hit]:
    """A relative path is resolved against the working directory, not the YAML's folder: from here it is not found."""
    key, paths = naming_key(doc), candidates(doc)
    found = next((path for path in paths if path.is_file()), None)
    if found is not None and not Path(str(doc.get(key))).is_file():
        yield Hit(key=key, message=f"{shown(doc.get(key))} is not found from {Path.cwd()}",
                  fix=f"`{found.resolve()}`", edit=Edit(key=key, value=str(found.resolve())))  # fmt: skip


@rule("key-owned-by-json", ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON says it")
def key_owned_by_json(doc: Document) -> Iterator[Hit]:
    """With a `deepspeed_config_file`, accelerate refuses a YAML that repeats what the JSON owns, even if equal."""
    if doc.get("deepspeed_config.deepspeed_config_file") is None or not is_deepspeed(doc):
        return
    for name in OWNED_BY_JSON:
        key = f"deepspeed_config.{name}"
        if doc.has(key):
            yield Hit(key=key, message=f"accelerate refuses {name} beside deepspeed_config_file", fix="leave it out",
                      edit=Edit(key=key))  # fmt: skip


@rule("precision-owned-by-json", ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON says it")
def precision_owned_by_json(doc: Document) -> Iterator[Hit]:
    """With a `deepspeed_config_file`, accelerate refuses `mixed_precision` in the YAML, whether it agrees or not."""
    given = doc.get("mixed_precision")
    if given is not None and doc.get("deepspeed_config.deepspeed_config_file") is not None and is_deepspeed(doc):
        says = _json_precision(doc.named.get(naming_key(doc)))
        than = f"; the JSON says {says}" if says and says != given else ""
        yield Hit(key="mixed_precision", message=f"accelerate refuses it beside deepspeed_config_file{than}",
                  fix="leave it out", edit=Edit(key="mixed_precision"))  # fmt: skip


def _json_precision(json: Document | None) -> str | None:
    names = [name for name in ("bf16", "fp16") if json is not None and truth(json.get(f"{name}.enabled"))]
    return names[0] if names else None


@rule("batch-arithmetic-of-pair", ERROR, ACCELERATE, library="deepspeed", fix='"auto" in the JSON')
def batch_arithmetic_of_pair(doc: Document) -> Iterator[Hit]:
    """DeepSpeed asserts train_batch_size = micro-batch x accumulation x processes, and these numbers differ."""
    json, processes = doc.named.get(naming_key(doc)), integer(doc.get("num_processes"))
    if json is None or not processes:
        return
    total, micro, accumulated = (integer(json.get(key)) for key in BATCH)
    if total and micro and accumulated and total != micro * accumulated * processes:
        yield Hit(key="num_processes", message=f"{total} is not {micro} x {accumulated} x {processes}",
                  fix='`"auto"` for all three in the JSON')  # fmt: skip


@rule("differs-from-json", ERROR, TRAINER, library="transformers", fix='"auto" in the JSON')
def differs_from_json(doc: Document) -> Iterator[Hit]:
    """The Trainer compares its arguments with the JSON, and raises in every rank where they differ."""
    json = doc.named.get(naming_key(doc))
    if json is None:
        return
    for field, key in BOTH.items():
        mine, its = doc.get(field), json.get(key)
        if _number(mine) is not None and _number(its) is not None and _number(mine) != _number(its):
            yield Hit(key=field, message=f"{shown(mine)} here, {shown(its)} in {key}", fix='`"auto"` in the JSON')
    for name in ("bf16", "fp16"):
        mine, its = truth(doc.get(name)), truth(json.get(f"{name}.enabled"))
        if mine is not None and its is not None and mine != its:
            yield Hit(key=name, message=f"{mine} here, {its} in {name}.enabled", fix='`"auto"` in the JSON')


def _number(value: object) -> float | None:
    try:
        return None if isinstance(value, bool) else float(str(value))
    except ValueError:
        return None


@rule("auto-batch-at-stage-3", ERROR, TRAINER, library="transformers", fix="auto_find_batch_size: false, or stage 2")
def auto_batch_at_stage_3(doc: Document) -> Iterator[Hit]:
    """The Trainer refuses `auto_find_batch_size` under ZeRO-3."""
    json = doc.named.get(naming_key(doc))
    if json is not None and truth(doc.get("auto_find_batch_size")) and stage(json) == 3:
        yield Hit(key="auto_find_batch_size", message="refused under ZeRO-3", fix="`auto_find_batch_size: false`",
                  edit=Edit(key="auto_find_batch_size"))  # fmt: skip
