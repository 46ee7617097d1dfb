"""Rules about a DeepSpeed JSON: settings that conflict with the Trainer, are ignored, or fail later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.hardware.disks import mount_of
from toolkit.lint.document import ACCELERATE, DEEPSPEED, Document
from toolkit.lint.findings import ERROR, WARNING, Match, rule
from toolkit.lint.rules.settings import as_bool, as_int, is_deepspeed, offload_device, shorten, stage3_key, zero_stage

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
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


# -- against the Trainer


@rule(WARNING, DEEPSPEED, library="transformers", fix='"auto"')
def not_auto(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` owns this setting too: under the Trainer, any value but its own raises in every rank."""
    for key, field in OWNED_BY_TRAINER.items():
        value = doc.get(key, "auto")
        if value not in ("auto", None) and not (key.endswith(".enabled") and as_bool(value) is False):
            yield Match(key, f"{shorten(value)} must equal {field}, or the Trainer raises", '`"auto"`', value="auto")


@rule(WARNING, ACCELERATE, library="transformers", fix="nothing: it is `auto` then")
def yaml_not_auto(doc: Document) -> Iterator[Match]:
    """The YAML fixes a setting that `TrainingArguments` owns: under the Trainer, any value but its own raises."""
    if not is_deepspeed(doc) or doc.has("deepspeed_config.deepspeed_config_file"):
        return
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = f"deepspeed_config.{name}"
        if doc.get(key, "auto") not in ("auto", None):
            yield Match(key, f"{shorten(doc.get(key))} must equal {OWNED_BY_TRAINER[name]}", "remove it", remove=True)


@rule(ERROR, DEEPSPEED, library="accelerate", fix='"zero_optimization": {"stage": 0}')
def no_zero_block(doc: Document) -> Iterator[Match]:
    """accelerate refuses a DeepSpeed JSON without `zero_optimization`."""
    if not doc.has("zero_optimization"):
        yield Match("", "no zero_optimization: accelerate refuses", '`"zero_optimization": {"stage": 0}`')


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="one of the two")
def fp16_and_bf16_json(doc: Document) -> Iterator[Match]:
    """DeepSpeed refuses fp16 and bf16 enabled together."""
    if as_bool(doc.get("fp16.enabled")) and as_bool(doc.get("bf16.enabled")):
        yield Match("fp16.enabled", "fp16 and bf16 are both enabled", '`"enabled": "auto"` in bf16 alone')


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


@rule(ERROR, DEEPSPEED, ACCELERATE, library="deepspeed", fix="stage 3, or no offload_param")
def offload_param_below_stage_3(doc: Document) -> Iterator[Match]:
    """Below stage 3 DeepSpeed accepts `offload_param` silently, and the parameters stay on the GPU."""
    if doc.kind == DEEPSPEED:
        key, device, stage = "zero_optimization.offload_param", offload_device(doc, "param"), zero_stage(doc)
    else:
        if not is_deepspeed(doc) or doc.has("deepspeed_config.deepspeed_config_file"):
            return
        key = "deepspeed_config.offload_param_device"
        device, stage = str(doc.get(key, "none")), as_int(doc.get("deepspeed_config.zero_stage", 2)) or 0
    if device in ("cpu", "nvme") and stage < 3:
        yield Match(key, f"stage {stage} does not offload parameters", "`stage` 3, or remove it", remove=True)


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="nvme_path: a folder on a local disk")
def nvme_without_path(doc: Document) -> Iterator[Match]:
    """DeepSpeed accepts `nvme` without a path, and raises when the ranks build the optimizer."""
    for part in ("optimizer", "param"):
        path = doc.get(f"zero_optimization.offload_{part}.nvme_path")
        if offload_device(doc, part) == "nvme" and zero_stage(doc) == 3 and not path:
            key, fix = f"zero_optimization.offload_{part}.device", '`"nvme_path": "/a/local/disk"`'
            yield Match(key, "nvme without nvme_path", fix)


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="stage 3, or the device cpu")
def nvme_below_stage_3(doc: Document) -> Iterator[Match]:
    """Stages 1 and 2 accept `nvme` for the optimizer silently, and keep its states in host memory."""
    key = "zero_optimization.offload_optimizer.device"
    if offload_device(doc, "optimizer") == "nvme" and zero_stage(doc) in (1, 2):
        yield Match(key, f"stage {zero_stage(doc)} offloads to host memory, not to NVMe", '`"cpu"`, or stage 3')


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="a folder on a local disk")
def nvme_in_memory(doc: Document) -> Iterator[Match]:
    """The path is on a file system in host memory: what is offloaded there uses the memory that it should free."""
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


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="stage3_prefetch_bucket_size: 0")
def nvme_prefetch(doc: Document) -> Iterator[Match]:
    """Parameters on NVMe fail in the second step with prefetch (`already assigned swap buffer`), and train without it.
    The default prefetches, and so does `auto`."""
    key = stage3_key(doc, "prefetch_bucket_size")
    if offload_device(doc, "param") == "nvme" and zero_stage(doc) == 3 and doc.get(key) != 0:
        fix = '`"stage3_prefetch_bucket_size": 0`'
        yield Match(key, "parameters on NVMe fail in the second step with prefetch", fix, value="0")


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="no zero_force_ds_cpu_optimizer")
def offload_without_cpu_adam(doc: Document) -> Iterator[Match]:
    """An offloaded optimizer steps on the CPU with torch's own Adam instead of DeepSpeed's, which DeepSpeed calls 5 to
    7 times faster."""
    key = "zero_force_ds_cpu_optimizer"
    if as_bool(doc.get(key)) is False and offload_device(doc, "optimizer") in ("cpu", "nvme"):
        yield Match(key, "the offloaded step uses torch's Adam", "remove it", remove=True)


# -- sizes and communication


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="1000000000, the default, or no key")
def sub_group_size_zero(doc: Document) -> Iterator[Match]:
    """0 makes each parameter a sub-group of its own: the optimizer steps parameter by parameter."""
    key = "zero_optimization.sub_group_size"
    if as_int(doc.get(key)) == 0 and zero_stage(doc) == 3:
        yield Match(key, "one sub-group per parameter", "remove it", remove=True)


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="1000000000, the default, or no key")
def max_live_parameters_zero(doc: Document) -> Iterator[Match]:
    """0 turns prefetch off: each layer waits for its own all-gather."""
    key = stage3_key(doc, "max_live_parameters")
    if as_int(doc.get(key)) == 0 and zero_stage(doc) == 3:
        yield Match(key, "nothing is prefetched", "remove it", remove=True)


@rule(WARNING, DEEPSPEED, library="deepspeed", fix="false, its default below stage 3")
def overlap_below_stage_3(doc: Document) -> Iterator[Match]:
    """`overlap_comm` at stages 1 and 2 has produced NaN and wrong gradients (DeepSpeed#7188, #5294, #8061): compare
    the gradient norm with stage 3's before trusting it."""
    key = "zero_optimization.overlap_comm"
    if as_bool(doc.get(key)) and zero_stage(doc) in (1, 2):
        message = f"overlap_comm at stage {zero_stage(doc)} has produced wrong gradients"
        yield Match(key, message, "`false`", value=False)


@rule(WARNING, DEEPSPEED, library="transformers", fix="no block: the Trainer's `optim` and scheduler")
def optimizer_of_json(doc: Document) -> Iterator[Match]:
    """The block takes precedence over the Trainer's `optim` or `lr_scheduler_type`, which are silently ignored."""
    for block, field in {"optimizer": "optim", "scheduler": "lr_scheduler_type"}.items():
        if doc.block(block):
            fix = f"remove it, and set `{field}`"
            yield Match(block, f"{shorten(doc.get(f'{block}.type'))} replaces the Trainer's {field}", fix)


@rule(WARNING, DEEPSPEED, library="transformers", fix="stage3_gather_16bit_weights_on_model_save: true")
def stage_3_without_gather(doc: Document) -> Iterator[Match]:
    """The Trainer cannot save the weights of stage 3: it writes DeepSpeed's shards instead, to be merged with
    zero_to_fp32.py."""
    key = stage3_key(doc, "gather_16bit_weights_on_model_save")
    old_key = "zero_optimization.stage3_gather_fp16_weights_on_model_save"
    if zero_stage(doc) == 3 and not as_bool(doc.get(key)) and not as_bool(doc.get(old_key)):
        yield Match(key, "a saved model has no weights files, only DeepSpeed's shards", "`true`", value=True)
