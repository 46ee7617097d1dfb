"""Rules about a DeepSpeed JSON: what fights the Trainer, what is ignored, and what fails later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.lint.document import ACCELERATE, DEEPSPEED, Document
from toolkit.lint.finding import ERROR, WARNING, Edit, Hit, rule
from toolkit.lint.rules.values import integer, is_deepspeed, shown, truth

# DeepSpeed's name of what `TrainingArguments` owns, and the field; the Trainer compares them.
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
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
IN_MEMORY = {"tmpfs", "ramfs"}


def stage(doc: Document) -> int:
    """DeepSpeed's default is 0."""
    return integer(doc.get("zero_optimization.stage", 0)) or 0


def offload(doc: Document, what: str) -> str:
    """Where `optimizer` or `param` goes: `none`, `cpu` or `nvme`."""
    return str(doc.get(f"zero_optimization.offload_{what}.device", "none"))


def stage_3_key(doc: Document, name: str) -> str:
    """Where `stage3_NAME` stands: DeepSpeed also takes it without its prefix."""
    bare = f"zero_optimization.{name}"
    return bare if doc.has(bare) else f"zero_optimization.stage3_{name}"


@rule("not-auto", WARNING, DEEPSPEED, library="transformers", fix='"auto"')
def not_auto(doc: Document) -> Iterator[Hit]:
    """`TrainingArguments` owns this too: under the Trainer any other value than its own raises, in every rank."""
    for key, field in OWNED_BY_TRAINER.items():
        value = doc.get(key, "auto")
        if value not in ("auto", None) and not (key.endswith(".enabled") and truth(value) is False):
            yield Hit(key=key, message=f"{shown(value)} must equal {field}, or the Trainer raises",
                      fix='`"auto"`', edit=Edit(key=key, value="auto"))  # fmt: skip


@rule("yaml-not-auto", WARNING, ACCELERATE, library="transformers", fix="nothing: it is `auto` then")
def yaml_not_auto(doc: Document) -> Iterator[Hit]:
    """The YAML fixes what `TrainingArguments` owns: under the Trainer any other value than its own raises."""
    if not is_deepspeed(doc) or doc.has("deepspeed_config.deepspeed_config_file"):
        return
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = f"deepspeed_config.{name}"
        if doc.get(key, "auto") not in ("auto", None):
            yield Hit(key=key, message=f"{shown(doc.get(key))} must equal {OWNED_BY_TRAINER[name]}",
                      fix="leave it out", edit=Edit(key=key))  # fmt: skip


@rule("no-zero-block", ERROR, DEEPSPEED, library="accelerate", fix='"zero_optimization": {"stage": 0}')
def no_zero_block(doc: Document) -> Iterator[Hit]:
    """accelerate refuses a DeepSpeed JSON without `zero_optimization`."""
    if not doc.has("zero_optimization"):
        yield Hit(key="", message="no zero_optimization: accelerate refuses", fix='`"zero_optimization": {"stage": 0}`')


@rule("fp16-and-bf16-json", ERROR, DEEPSPEED, library="deepspeed", fix="one of the two")
def fp16_and_bf16_json(doc: Document) -> Iterator[Hit]:
    """DeepSpeed refuses fp16 and bf16 both enabled."""
    if truth(doc.get("fp16.enabled")) and truth(doc.get("bf16.enabled")):
        yield Hit(key="fp16.enabled", message="fp16 and bf16 are both enabled", fix='`"enabled": "auto"` in bf16 alone')


@rule("batch-arithmetic", ERROR, DEEPSPEED, library="deepspeed", fix='"auto" for all three')
def batch_arithmetic(doc: Document) -> Iterator[Hit]:
    """DeepSpeed asserts train_batch_size = micro-batch x accumulation x processes: no number of processes fits."""
    total, micro, accumulated = (integer(doc.get(key)) for key in BATCH)
    negative = [key for key in BATCH if (integer(doc.get(key)) or 1) < 1 or integer(doc.get(key)) == 0]
    if negative:
        yield Hit(key=negative[0], message=f"{shown(doc.get(negative[0]))} is refused: it must be positive",
                  fix='`"auto"`', edit=Edit(key=negative[0], value="auto"))  # fmt: skip
    elif total and micro and total % (micro * (accumulated or 1)):
        product = f"{micro} x {accumulated}" if accumulated else f"{micro}"
        yield Hit(key=BATCH[0], message=f"{total} is no multiple of {product}", fix='`"auto"` for all three',
                  edit=Edit(key=BATCH[0], value="auto"))  # fmt: skip


@rule(
    "offload-param-below-stage-3", ERROR, DEEPSPEED, ACCELERATE, library="deepspeed", fix="stage 3, or no offload_param"
)
def offload_param_below_stage_3(doc: Document) -> Iterator[Hit]:
    """Below stage 3 DeepSpeed takes `offload_param` without a word, and the parameters stay on the GPU."""
    if doc.kind == DEEPSPEED:
        key, device, at = "zero_optimization.offload_param", offload(doc, "param"), stage(doc)
        edit = Edit(key=key)
    else:
        if not is_deepspeed(doc) or doc.has("deepspeed_config.deepspeed_config_file"):
            return
        key = "deepspeed_config.offload_param_device"
        device, at = str(doc.get(key, "none")), integer(doc.get("deepspeed_config.zero_stage", 2)) or 0
        edit = Edit(key=key)
    if device in ("cpu", "nvme") and at < 3:
        yield Hit(key=key, message=f"stage {at} offloads no parameters", fix="`stage` 3, or leave it out", edit=edit)


@rule("nvme-without-path", ERROR, DEEPSPEED, library="deepspeed", fix="nvme_path: a folder on a local disk")
def nvme_without_path(doc: Document) -> Iterator[Hit]:
    """DeepSpeed takes `nvme` without a path, and raises when the ranks build the optimizer."""
    for what in ("optimizer", "param"):
        path = doc.get(f"zero_optimization.offload_{what}.nvme_path")
        if offload(doc, what) == "nvme" and stage(doc) == 3 and not path:
            yield Hit(key=f"zero_optimization.offload_{what}.device", message="nvme has no nvme_path",
                      fix='`"nvme_path": "/a/local/disk"`')  # fmt: skip


@rule("nvme-below-stage-3", ERROR, DEEPSPEED, library="deepspeed", fix="stage 3, or the device cpu")
def nvme_below_stage_3(doc: Document) -> Iterator[Hit]:
    """Stages 1 and 2 take `nvme` for the optimizer without a word, and keep its states in host memory."""
    key = "zero_optimization.offload_optimizer.device"
    if offload(doc, "optimizer") == "nvme" and stage(doc) in (1, 2):
        yield Hit(
            key=key, message=f"stage {stage(doc)} offloads to host memory, not to NVMe", fix='`"cpu"`, or stage 3'
        )


@rule("nvme-in-memory", WARNING, DEEPSPEED, library="deepspeed", fix="a folder on a local disk")
def nvme_in_memory(doc: Document) -> Iterator[Hit]:
    """The path is on a file system in host memory: what is offloaded there takes the memory that it should free."""
    for what in ("optimizer", "param"):
        key = f"zero_optimization.offload_{what}.nvme_path"
        path = doc.get(key)
        if offload(doc, what) == "nvme" and isinstance(path, str) and file_system(path) in IN_MEMORY:
            yield Hit(key=key, message=f"{shown(path)} is {file_system(path)}, in host memory", fix="a local disk")


def file_system(path: str) -> str | None:
    """The type of the file system that a path is on here; None where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    holding = [(mount, kind) for mount, kind in mounts if path == mount or path.startswith(f"{mount.rstrip('/')}/")]
    return max(holding, key=lambda found: len(found[0]))[1] if holding else None


@rule("nvme-prefetch", ERROR, DEEPSPEED, library="deepspeed", fix="stage3_prefetch_bucket_size: 0")
def nvme_prefetch(doc: Document) -> Iterator[Hit]:
    """Parameters on NVMe with prefetch fail in the second step (`already assigned swap buffer`); without it they
    train. The default prefetches, and so does `auto`."""
    key = stage_3_key(doc, "prefetch_bucket_size")
    if offload(doc, "param") == "nvme" and stage(doc) == 3 and doc.get(key) != 0:
        yield Hit(key=key, message="parameters on NVMe fail in the second step with prefetch",
                  fix='`"stage3_prefetch_bucket_size": 0`',
                  edit=Edit(key=key, value="0") if doc.has(key) else None)  # fmt: skip


@rule("sub-group-size-zero", WARNING, DEEPSPEED, library="deepspeed", fix="1000000000, the default, or no key")
def sub_group_size_zero(doc: Document) -> Iterator[Hit]:
    """0 makes one sub-group of each parameter: the optimizer steps parameter by parameter."""
    key = "zero_optimization.sub_group_size"
    if integer(doc.get(key)) == 0 and stage(doc) == 3:
        yield Hit(key=key, message="one sub-group a parameter", fix="leave it out", edit=Edit(key=key))


@rule("max-live-parameters-zero", WARNING, DEEPSPEED, library="deepspeed", fix="1000000000, the default, or no key")
def max_live_parameters_zero(doc: Document) -> Iterator[Hit]:
    """0 means that nothing is prefetched: each layer waits for its own gathering."""
    key = stage_3_key(doc, "max_live_parameters")
    if integer(doc.get(key)) == 0 and stage(doc) == 3:
        yield Hit(key=key, message="nothing is prefetched", fix="leave it out", edit=Edit(key=key))


@rule("overlap-below-stage-3", WARNING, DEEPSPEED, library="deepspeed", fix="false, its default below stage 3")
def overlap_below_stage_3(doc: Document) -> Iterator[Hit]:
    """`overlap_comm` at stages 1 and 2 has given NaN and wrong gradients (DeepSpeed#7188, #5294, #8061): compare
    the gradient norm with stage 3's before trusting it."""
    key = "zero_optimization.overlap_comm"
    if truth(doc.get(key)) and stage(doc) in (1, 2):
        yield Hit(key=key, message=f"overlap_comm at stage {stage(doc)} has given wrong gradients", fix="`false`",
                  edit=Edit(key=key, value=False))  # fmt: skip


@rule(
    "optimizer-of-json", WARNING, DEEPSPEED, library="transformers", fix="no block: the Trainer's `optim` and scheduler"
)
def optimizer_of_json(doc: Document) -> Iterator[Hit]:
    """The block wins over the Trainer's `optim` or `lr_scheduler_type`, which are ignored without a word."""
    for block, field in {"optimizer": "optim", "scheduler": "lr_scheduler_type"}.items():
        if doc.block(block):
            yield Hit(key=block, message=f"{shown(doc.get(f'{block}.type'))} replaces the Trainer's {field}",
                      fix=f"leave it out, and give `{field}`")  # fmt: skip


@rule("offload-without-cpu-adam", WARNING, DEEPSPEED, library="deepspeed", fix="no zero_force_ds_cpu_optimizer")
def offload_without_cpu_adam(doc: Document) -> Iterator[Hit]:
    """An offloaded optimizer steps on the CPU with torch's own Adam instead of DeepSpeed's, which DeepSpeed calls 5
    to 7 times faster."""
    key = "zero_force_ds_cpu_optimizer"
    if truth(doc.get(key)) is False and offload(doc, "optimizer") in ("cpu", "nvme"):
        yield Hit(key=key, message="the offloaded step runs in torch's Adam", fix="leave it out", edit=Edit(key=key))


@rule(
    "stage-3-without-gather", WARNING, DEEPSPEED, library="transformers",
    fix="stage3_gather_16bit_weights_on_model_save: true",
)  # fmt: skip
def stage_3_without_gather(doc: Document) -> Iterator[Hit]:
    """The Trainer cannot save the weights of stage 3: it writes DeepSpeed's shards instead, to be merged with
    zero_to_fp32.py."""
    key, old = stage_3_key(doc, "gather_16bit_weights_on_model_save"), "stage3_gather_fp16_weights_on_model_save"
    if stage(doc) == 3 and not truth(doc.get(key)) and not truth(doc.get(f"zero_optimization.{old}")):
        yield Hit(key=key, message="a saved model has no weights of its own", fix="`true`",
                  edit=Edit(key=key, value=True) if doc.has(key) else None)  # fmt: skip
