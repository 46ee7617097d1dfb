"""Rules about a DeepSpeed JSON, and about the YAML that names it: what conflicts, is ignored, or fails later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from toolkit.convert.job_script import launcher_tables
from toolkit.errors import ToolkitError
from toolkit.files.paths import is_file
from toolkit.hardware.disks import mount_of
from toolkit.lint.document import (
    ACCELERATE,
    AXOLOTL,
    DEEPSPEED,
    SCRIPTS,
    TRAINER,
    Document,
    deepspeed_files,
    load_document,
)
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import find_named, source_of
from toolkit.lint.rules.settings import (
    as_bool,
    as_float,
    as_int,
    is_deepspeed,
    is_without_trainer,
    names_word,
    offload_device,
    shorten,
    stage3_key,
    trainer_of,
    zero_stage,
)
from toolkit.lint.rules.trainer import processes_of, processes_of_call
from toolkit.presets.method_rules import survives_offload

# DeepSpeed's keys for settings that `TrainingArguments` owns, and its field; the Trainer compares the two.
OWNED_BY_TRAINER = {
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the number of steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
STEPS = "scheduler.params.total_num_steps"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What `TrainingArguments` has where nothing is said; the number of steps depends on the data.
DEFAULTS: dict[str, object] = {
    BATCH_KEYS[1]: 8,
    BATCH_KEYS[2]: 1,
    "gradient_clipping": 1.0,
    "bf16.enabled": False,
    "fp16.enabled": False,
}
DEFAULTS |= {"optimizer.params.lr": 5e-5, "optimizer.params.weight_decay": 0.0, "optimizer.params.eps": 1e-8}
DEFAULTS |= {"optimizer.params.betas": [0.9, 0.999], "scheduler.params.warmup_max_lr": 5e-5}
DEFAULTS |= {"scheduler.params.warmup_num_steps": 0, "scheduler.params.total_num_steps": None}
# Optimizers and schedules that DeepSpeed's types are the same as.
SAME_AS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
SAME_AS |= {"Adam": "adamw", "AdamW": "adamw"}
OF_AXOLOTL = {"per_device_train_batch_size": "micro_batch_size"}
# accelerate 1.15, DeepSpeedPlugin._deepspeed_config_checks; `zero3_init_flag` is allowed.
OWNED_BY_JSON = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
# Those that are numbers.
NUMBERS_OF_TRAINER = (
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer.params.lr"),
    *("optimizer.params.weight_decay", "optimizer.params.eps", "scheduler.params.warmup_num_steps"),
)


# -- against the Trainer


@rule(WARNING, DEEPSPEED, library="transformers", fix='"auto"')
def not_auto(doc: Document) -> Iterator[Match]:
    """Under the Trainer any value but that of `TrainingArguments` raises in every rank; it owns this setting."""
    for key, field in () if is_without_trainer(doc) else OWNED_BY_TRAINER.items():
        value = doc.get(key, "auto")
        is_off = key.endswith(".enabled") and as_bool(value) is False
        if value not in ("auto", None) and not is_off and not _is_said_by_reader(doc, key, value):
            message = f"{shorten(value)} must equal {field}, or the Trainer raises"
            level = None if _differs_for_reader(doc, key, value) or (key == STEPS and as_int(value) == 0) else NOTE
            yield Match(key, message, '`"auto"`', level=level)


def _differs_for_reader(doc: Document, key: str, value: object) -> bool:
    """Return True where the file that names a JSON has another value, or leaves the Trainer's default."""
    reader, field = doc.named_by, OWNED_BY_TRAINER[key]
    if reader is not None and reader.kind == AXOLOTL:
        return reader.has(OF_AXOLOTL.get(field, field))
    reader = trainer_of(doc)
    if reader is None:
        return False
    has_defaults = reader.program in ("transformers", "llama-factory") and not reader.has("config")
    return reader.has(field) or (has_defaults and key in DEFAULTS and value != DEFAULTS[key])


def _is_said_by_reader(doc: Document, key: str, value: object) -> bool:
    """Return True where the file that names the JSON has the same value, by the name that its program gives it."""
    reader, field = doc.named_by, OWNED_BY_TRAINER[key]
    if reader is None or reader.kind == ACCELERATE:
        return False
    field = OF_AXOLOTL.get(field, field) if reader.kind == AXOLOTL else field
    here = True if reader.kind == AXOLOTL and reader.get(field) == "auto" else reader.get(field)  # on a GPU with bf16
    as_one = as_bool if key.endswith(".enabled") else as_float
    return as_one(here) is not None and as_one(here) == as_one(value)


@rule(WARNING, ACCELERATE, library="transformers", fix="nothing: it is `auto` then")
def yaml_not_auto(doc: Document) -> Iterator[Match]:
    """The YAML fixes a setting that `TrainingArguments` owns: under the Trainer, any value but its own raises."""
    if not is_deepspeed(doc) or doc.has("deepspeed_config.deepspeed_config_file") or is_without_trainer(doc):
        return
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = f"deepspeed_config.{name}"
        reader, value = trainer_of(doc), doc.get(key, "auto")
        here = reader.get(OWNED_BY_TRAINER[name], 1) if reader is not None else None  # the default of both
        if value not in ("auto", None) and (here is None or as_float(here) != as_float(value)):
            message = f"{shorten(value)} must equal {OWNED_BY_TRAINER[name]}, or a Trainer raises"
            yield Match(key, message, "remove it, under a Trainer", level=None if as_float(here) is not None else NOTE)


@rule(ERROR, DEEPSPEED, library="accelerate", fix="a value, or no key")
def auto_is_kept(doc: Document) -> Iterator[Match]:
    """accelerate fills `auto` in some keys, and raises for it in any other ("not found in kwargs")."""
    for key in () if is_without_trainer(doc) else doc.positions:
        if doc.get(key) == "auto" and key not in launcher_tables()["filled"]:
            level = None if doc.named_by is not None else WARNING
            level = NOTE if names_word(doc, key.rpartition(".")[2]) else level  # the project may fill it in
            yield Match(key, "nothing fills auto in here: accelerate and the Trainer raise", "remove it", level=level)


@rule(ERROR, DEEPSPEED, library="deepspeed", fix='"auto" for all three')
def batch_arithmetic(doc: Document) -> Iterator[Match]:
    """DeepSpeed asserts train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes;
    no number of processes makes these equal."""
    total, per_gpu, accumulation = (as_int(doc.get(key)) for key in BATCH_KEYS)
    not_positive = [key for key in BATCH_KEYS if (as_int(doc.get(key)) or 1) < 1 or as_int(doc.get(key)) == 0]
    if not_positive:
        key = not_positive[0]
        yield Match(key, f"{shorten(doc.get(key))} is refused: it must be positive", '`"auto"`', value="auto")
    elif total and per_gpu and total % (per_gpu * (accumulation or 1)):
        product = f"{per_gpu} x {accumulation}" if accumulation else f"{per_gpu}"
        yield Match(BATCH_KEYS[0], f"{total} is not a multiple of {product}", '`"auto"` for all three', value="auto")


# -- offload


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="a folder on a local disk")
def nvme_in_memory(doc: Document) -> Iterator[Match]:
    """The path is on a file system in host memory: offloading there frees nothing."""
    for part in ("optimizer", "param"):
        key = f"zero_optimization.offload_{part}.nvme_path"
        path = doc.get(key)
        if offload_device(doc, part) != "nvme" or not isinstance(path, str):
            continue
        try:
            mount = mount_of(Path(path))
        except (OSError, ValueError):  # no /proc/mounts, or a path that no file system takes
            continue
        if mount is not None and mount.kind == "memory":
            yield Match(key, f"{shorten(path)} is on {mount.filesystem}, in host memory", "a local disk")


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.19.8", fix="stage3_prefetch_bucket_size: 0")
def nvme_prefetch(doc: Document) -> Iterator[Match]:
    """Parameters on NVMe fail in the second step with prefetch (`already assigned swap buffer`), the default, also of
    `auto`.
    """
    key = stage3_key(doc, "prefetch_bucket_size")
    if offload_device(doc, "param") == "nvme" and zero_stage(doc) == 3 and doc.get(key) != 0:
        fix = '`"stage3_prefetch_bucket_size": 0`'
        yield Match(key, "parameters on NVMe fail in the second step with prefetch", fix, value="0")


# -- sizes and communication


@rule(WARNING, DEEPSPEED, library="transformers", fix="no block: the Trainer's `optim` and scheduler")
def optimizer_of_json(doc: Document) -> Iterator[Match]:
    """The block takes precedence over the Trainer's `optim` or `lr_scheduler_type`, which are silently ignored."""
    for block, field in {"optimizer": "optim", "scheduler": "lr_scheduler_type"}.items():
        if doc.block(block) and not is_without_trainer(doc):
            named, reader = shorten(doc.get(f"{block}.type")), trainer_of(doc)
            here = str(reader.get(field, "")) if reader is not None else ""
            is_same = here.startswith(SAME_AS.get(named, "\0"))
            message = f"{named} replaces the Trainer's {field}" + (f", {shorten(here)}" if here else "")
            yield Match(block, message, f"remove it, and set `{field}`", level=None if here and not is_same else NOTE)


# -- a YAML and its JSON: the file exists, and the two do not repeat or contradict each other


@rule(NOTE, ACCELERATE, TRAINER, library="accelerate", fix="a path that exists where the run starts")
def deepspeed_file_missing(doc: Document) -> Iterator[Match]:
    """A relative path counts from the working directory of the run. Where no file is there, accelerate takes the path
    for base64 text, and raises.
    """
    key, named = deepspeed_files(doc)
    if not named.endswith(".json") or is_file(Path(named)) or (doc.call is not None and doc.deepspeed_json is not None):
        return
    file = find_named(named, doc.path)
    start = file and next((each for each in file.parents if is_file(each / named)), None)
    message = f"{shorten(named)} is not found from here" + (f", but from {start}" if start else "")
    yield Match(key, message, "start the run where the path is right" if start else "a path that exists")


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def key_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses a YAML that repeats the JSON's setting, even if equal."""
    if doc.get("deepspeed_config.deepspeed_config_file") is None or not is_deepspeed(doc):
        return
    for name in OWNED_BY_JSON:
        key = f"deepspeed_config.{name}"
        if doc.has(key) and not doc.is_flag(key):  # it looks at its file alone
            message = f"accelerate refuses {name} together with deepspeed_config_file"
            yield Match(key, message, "remove it", remove=doc.deepspeed_json is not None)


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def precision_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses `mixed_precision` in the YAML, even if the two agree."""
    precision = doc.get("mixed_precision")
    is_named = doc.has("deepspeed_config.deepspeed_config_file") and is_deepspeed(doc)
    if precision is None or not is_named or doc.is_flag("mixed_precision"):
        return
    json = doc.deepspeed_json
    in_json = next((name for name in ("bf16", "fp16") if json and as_bool(json.get(f"{name}.enabled"))), None)
    contradiction = f"; the JSON has {in_json}" if in_json and in_json != precision else ""
    message = f"accelerate refuses it together with deepspeed_config_file{contradiction}"
    fix = "remove it" if in_json == precision or as_bool(precision) is False else "remove it, and set it in the JSON"
    fix = "remove it, and start with `--mixed_precision fp8`" if precision == "fp8" else fix  # no JSON has it
    yield Match("mixed_precision", message, fix, remove=in_json == precision)


@rule(ERROR, ACCELERATE, TRAINER, *SCRIPTS, library="deepspeed", fix='"auto" in the JSON')
def batch_arithmetic_of_pair(doc: Document) -> Iterator[Match]:
    """DeepSpeed asserts train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes,
    and no value of what the JSON leaves open makes these equal."""
    if doc.kind not in SCRIPTS:
        processes = as_int(doc.get("num_processes")) or processes_of(doc)
        key, fix = "num_processes" if doc.kind == ACCELERATE else "deepspeed", '`"auto"` for all three in the JSON'
        if doc.deepspeed_json and not doc.has("parallelism_config"):
            yield from (Match(key, message, fix) for message in _unequal(doc.deepspeed_json, processes))
    for call in doc.script.launches:  # of a loop of its own, which deepspeed.initialize(args) reads it for
        named, line = call.arguments.get("deepspeed_config", ("", 0))
        file = find_named(str(named), doc.path)
        words = " ".join((call.script or "", *call.arguments, *source_of(call.script or "", doc.path)))
        if file and not any(each in words.lower() for each in ("parallel", "pipe", "mpu")):
            with contextlib.suppress(ToolkitError):  # it may be no configuration
                for message in _unequal(load_document(file), processes_of_call(call)):
                    yield Match("--deepspeed_config", message, "a multiple, or another number of processes", line=line)


def _unequal(json: Document, processes: int | None) -> Iterator[str]:
    total, per_gpu, accumulation = (as_int(json.get(key)) for key in BATCH_KEYS)
    if not (total and processes) or json.has("sequence_parallel_size") or json.has("tensor_parallel"):
        return  # the last two make fewer batches than processes
    product = (per_gpu or 1) * (accumulation or 1) * processes
    if total != product if per_gpu and accumulation else total % product:
        factors = " x ".join(str(each) for each in (per_gpu, accumulation, processes) if each)
        yield f"{total} is not {factors}" + ("" if per_gpu and accumulation else ", nor a multiple of it")


@rule(ERROR, TRAINER, library="transformers", fix='"auto" in the JSON', for_every_program=True)
def differs_from_json(doc: Document) -> Iterator[Match]:
    """The Trainer compares its arguments with the JSON, and raises in every rank where they differ."""
    json = doc.deepspeed_json
    if json is None:
        return
    fix = '`"auto"` in the JSON'
    for key in NUMBERS_OF_TRAINER:
        field = OWNED_BY_TRAINER[key]
        here, there = doc.get(field), json.get(key)
        if as_float(here) is not None and as_float(there) is not None and as_float(here) != as_float(there):
            yield Match(field, f"{shorten(here)} here, {shorten(there)} in {key}", fix)
    for name in ("bf16", "fp16"):
        is_known = doc.program == "transformers" and doc.is_complete and not doc.has(f"{name}_full_eval")
        flag, json_flag = as_bool(doc.get(name, False if is_known else None)), as_bool(json.get(f"{name}.enabled"))
        if flag is not None and json_flag is not None and flag != json_flag:
            yield Match(name, f"{flag} here, {json_flag} in {name}.enabled", fix)


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
