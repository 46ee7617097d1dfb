"""Rules about a YAML and the DeepSpeed JSON that it names: the file exists, and the two do not repeat or contradict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.files.reading import is_file
from toolkit.lint.document import ACCELERATE, TRAINER, Document, deepspeed_file_candidates, deepspeed_file_key
from toolkit.lint.findings import ERROR, WARNING, Match, rule
from toolkit.lint.rules.deepspeed import BATCH_KEYS
from toolkit.lint.rules.settings import as_bool, as_float, as_int, is_deepspeed, offload_device, shorten, zero_stage
from toolkit.presets.method_rules import rejects_auto_find_batch_size, survives_offload

# accelerate 1.15, DeepSpeedPlugin._deepspeed_config_checks; `zero3_init_flag` is allowed.
OWNED_BY_JSON = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
# Numbers that both files have: the Trainer's field and DeepSpeed's key.
NUMBERS_IN_BOTH = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_epsilon": "optimizer.params.eps",
    "warmup_steps": "scheduler.params.warmup_num_steps",
}


@rule(ERROR, ACCELERATE, TRAINER, library="accelerate", fix="the path of an existing file")
def deepspeed_file_missing(doc: Document) -> Iterator[Match]:
    """The JSON that the YAML names does not exist: accelerate takes the path for base64 text, and raises."""
    key, paths = deepspeed_file_key(doc), deepspeed_file_candidates(doc)
    if paths and not any(map(is_file, paths)):
        yield Match(key, f"{shorten(doc.get(key))} does not exist", "a path that exists")


@rule(WARNING, ACCELERATE, TRAINER, library="accelerate", fix="an absolute path")
def deepspeed_file_relative(doc: Document) -> Iterator[Match]:
    """A relative path is resolved against the working directory, not the YAML's folder; from here it is not found."""
    key, paths = deepspeed_file_key(doc), deepspeed_file_candidates(doc)
    found = next(filter(is_file, paths), None)
    if found is not None and not is_file(Path(str(doc.get(key)))):
        fix = f"`{found.resolve()}`"
        yield Match(key, f"{shorten(doc.get(key))} is not found from {Path.cwd()}", fix, value=str(found.resolve()))


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def key_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses a YAML that repeats a setting of the JSON, even if equal."""
    if doc.get("deepspeed_config.deepspeed_config_file") is None or not is_deepspeed(doc):
        return
    for name in OWNED_BY_JSON:
        key = f"deepspeed_config.{name}"
        if doc.has(key):
            yield Match(key, f"accelerate refuses {name} together with deepspeed_config_file", "remove it", remove=True)


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def precision_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses `mixed_precision` in the YAML, even if the two agree."""
    precision = doc.get("mixed_precision")
    if precision is None or doc.get("deepspeed_config.deepspeed_config_file") is None or not is_deepspeed(doc):
        return
    json = doc.deepspeed_json
    in_json = next((name for name in ("bf16", "fp16") if json and as_bool(json.get(f"{name}.enabled"))), None)
    contradiction = f"; the JSON has {in_json}" if in_json and in_json != precision else ""
    message = f"accelerate refuses it together with deepspeed_config_file{contradiction}"
    yield Match("mixed_precision", message, "remove it", remove=True)


@rule(ERROR, ACCELERATE, library="deepspeed", fix='"auto" in the JSON')
def batch_arithmetic_of_pair(doc: Document) -> Iterator[Match]:
    """DeepSpeed asserts train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes,
    and these numbers differ."""
    json, processes = doc.deepspeed_json, as_int(doc.get("num_processes"))
    if json is None or not processes:
        return
    total, per_gpu, accumulation = (as_int(json.get(key)) for key in BATCH_KEYS)
    if total and per_gpu and accumulation and total != per_gpu * accumulation * processes:
        fix = '`"auto"` for all three in the JSON'
        yield Match("num_processes", f"{total} is not {per_gpu} x {accumulation} x {processes}", fix)


@rule(ERROR, TRAINER, library="transformers", fix='"auto" in the JSON')
def differs_from_json(doc: Document) -> Iterator[Match]:
    """The Trainer compares its arguments with the JSON, and raises in every rank where they differ."""
    json = doc.deepspeed_json
    if json is None:
        return
    fix = '`"auto"` in the JSON'
    for field, key in NUMBERS_IN_BOTH.items():
        here, there = doc.get(field), json.get(key)
        if as_float(here) is not None and as_float(there) is not None and as_float(here) != as_float(there):
            yield Match(field, f"{shorten(here)} here, {shorten(there)} in {key}", fix)
    for name in ("bf16", "fp16"):
        flag, json_flag = as_bool(doc.get(name)), as_bool(json.get(f"{name}.enabled"))
        if flag is not None and json_flag is not None and flag != json_flag:
            yield Match(name, f"{flag} here, {json_flag} in {name}.enabled", fix)


@rule(ERROR, TRAINER, library="transformers", fix="auto_find_batch_size: false, or stage 2")
def auto_batch_at_stage_3(doc: Document) -> Iterator[Match]:
    """The Trainer refuses `auto_find_batch_size` under ZeRO-3."""
    json = doc.deepspeed_json
    if json is None or not as_bool(doc.get("auto_find_batch_size")):
        return
    if rejects_auto_find_batch_size(engine="deepspeed", zero_stage=zero_stage(json)):
        yield Match("auto_find_batch_size", "refused under ZeRO-3", "`auto_find_batch_size: false`", remove=True)


@rule(WARNING, TRAINER, library="accelerate", fix="optim: adamw_torch, or no offload")
def offload_replaces_optimizer(doc: Document) -> Iterator[Match]:
    """An offloaded optimizer other than AdamW becomes DeepSpeed's CPU Adam, without decoupled weight decay."""
    json, optim = doc.deepspeed_json, doc.get("optim")
    if json is None or optim is None or survives_offload(str(optim)) or json.has("optimizer"):
        return
    forced = as_bool(json.get("zero_force_ds_cpu_optimizer", True))
    if forced and offload_device(json, "optimizer") in ("cpu", "nvme"):
        yield Match(
            "optim", f"{shorten(optim)} becomes DeepSpeed's CPU Adam where it is offloaded", "`optim: adamw_torch`"
        )
