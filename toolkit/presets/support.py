"""Compatibility rules: which preset works with which method, world size and device, and why not.

Each rule is written once, here, with the upstream issue that explains it. The launcher, the training script, the
planner, the recommendation, the rehearsal, the checkpoint conversion, `toolkit presets` and the docs all ask this
module:

    reason = unsupported(preset, Method(lora=True, load_in_4bit=True), world_size=8, purpose="plan")
    check_supported(preset, method, world_size=8, device=CPU)       # raises ToolkitError with the reason and a hint
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.models.attention import AUTO, FLASH_ATTENTION, VARLEN, ModelAttention, needs_no_mask
from toolkit.models.lora import ALL_LINEAR, RENAMED_TARGETS
from toolkit.models.split import ModelSplit, types_with_plan
from toolkit.parallel.layout import DEFAULT_REPLICAS, DEGREES, NAMES, SAME_ROWS, ParallelLayout
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.presets.accumulation import default_accumulate
from toolkit.presets.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from toolkit.presets.spec import PresetSpec

Purpose = Literal["train", "launched", "script", "convert", "plan", "recommend", "rehearse", "trace", "cluster"]
"""What the answer is for: a run of the toolkit, one on several nodes (`cluster`), a rank that is running already
(`launched`), a user's own script under torchrun (`script`), a checkpoint conversion, a plan, a recommendation, a
rehearsal, or a rehearsal on fake tensors (`trace`)."""

QLORA_PRESETS_HINT = (
    "`--preset ddp`; `fsdp2` or `zero3` shard the 4-bit weights, `zero3_cpu_offload` keeps them in host memory"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a model is fine-tuned, as far as it decides which presets work. Names are those of the arguments."""

    lora: bool = False
    lora_targets: tuple[str, ...] = ()
    """Modules that have adapters, as they were named; empty where it is not known."""
    lora_config: bool = False
    """Further fields of peft's `LoraConfig` are set."""
    load_in_4bit: bool = False
    optim: str = DEFAULT_OPTIMIZER
    freeze: bool = False
    train_only: bool = False
    packing: bool = False
    attn_implementation: str | None = None
    model_attention: ModelAttention | None = None
    """What the model's attention works with; None where the model is not known."""
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    loss: str = "auto"
    use_liger_kernel: bool = False
    torch_compile: bool = False
    ddp_comm_hook: str | None = None
    accumulate: str | None = None
    """`sharded` or `whole`; None where the preset decides."""
    memory_snapshot: bool = False
    auto_find_batch_size: bool = False
    save_only_model: bool = False
    async_save: bool = False
    streaming: bool = False
    fp16: bool = False
    neftune: bool = False
    label_smoothing: bool = False
    pipeline_schedule: str | None = None
    pipeline_chunks: int | None = None
    micro_batches: int | None = None
    """Accumulation steps of an optimizer step; None where they are not known."""
    pp: int | None = None
    tp: int | None = None
    cp: int | None = None
    sp: int | None = None
    ep: int | None = None
    dp_replicate: int | None = None
    model_split: ModelSplit | None = None
    """How far the model can be split; None where the model is not known."""

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism that were given."""
        return {name: getattr(self, name) for name in DEGREES if getattr(self, name) is not None}

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages of a pipeline and their schedule; None without `--pp`."""
        if self.pp is None:
            return None
        return PipelineSettings.of(ranks=self.pp, schedule=self.pipeline_schedule, chunks=self.pipeline_chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the ranks run on."""

    type: Literal["gpu", "cpu"] = "gpu"
    count: int | None = None
    """GPUs that are visible; None where it does not matter or is not known."""
    name: str = "the GPU"
    has_bf16: bool = True
    has_nvme: bool = True
    """A local NVMe disk can be named."""


CPU = Device(type="cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a combination does not work."""

    rule: str
    """Name of the rule."""
    why: str
    """A clause with the preset or the option as its subject: `needs at least 2 processes`."""
    message: str
    """A sentence that stands alone."""
    hint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    preset: PresetSpec | None
    method: Method
    world_size: int | None
    device: Device | None
    purpose: Purpose

    def option(self, name: str) -> str:
        """The flag as it is typed: the planner's options are spelled with dashes."""
        return "--" + (name.replace("_", "-") if self.purpose in ("plan", "recommend") else name)

    def degree(self, name: str, degree: int) -> str:
        """A degree of parallelism as it is typed."""
        return f"{name}={degree}" if self.purpose == "script" else f"{self.option(name)} {degree}"


_Answer = tuple[str, str, str | None] | None
"""Clause, sentence, hint; None where the rule does not object."""
_Rule = Callable[[_Case], _Answer]
_RULES: dict[str, _Rule] = {}


def _rule(name: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES[name] = function
        return function

    return register


def reasons(
    preset: PresetSpec | None,
    method: Method | None = None,
    *,
    world_size: int | None = None,
    device: Device | None = None,
    purpose: Purpose = "train",
) -> Iterator[Reason]:
    """Yield every reason why the combination does not work, the most basic one first.

    `preset`, `world_size` and `device` are None where they are not known; their rules then do not object.
    """
    case = _Case(preset=preset, method=method or Method(), world_size=world_size, device=device, purpose=purpose)
    for name, rule in _RULES.items():
        answer = rule(case)
        if answer is not None:
            why, message, hint = answer
            yield Reason(rule=name, why=why, message=message, hint=hint)


def unsupported(
    preset: PresetSpec | None,
    method: Method | None = None,
    *,
    world_size: int | None = None,
    device: Device | None = None,
    purpose: Purpose = "train",
) -> Reason | None:
    """Return the first reason why the combination does not work, or None where it works."""
    return next(reasons(preset, method, world_size=world_size, device=device, purpose=purpose), None)


def check_supported(
    preset: PresetSpec | None,
    method: Method | None = None,
    *,
    world_size: int | None = None,
    device: Device | None = None,
    purpose: Purpose = "train",
) -> None:
    """Raise ToolkitError with the first reason why the combination does not work."""
    reason = unsupported(preset, method, world_size=world_size, device=device, purpose=purpose)
    if reason is not None:
        raise ToolkitError(reason.message, hint=reason.hint)


def check_degrees_given(preset: PresetSpec, names: Collection[str], *, purpose: Purpose = "train") -> None:
    """Raise ToolkitError unless `names` has every dimension whose degree the preset leaves to the run."""
    name = missing_degree(preset, names)
    if name is not None:
        option, typed = (name, f"{name}=2") if purpose == "script" else (f"--{name}", f"--{name} 2")
        raise ToolkitError(f"preset {preset.name!r} {_needs_degree(name, option)}", hint=f"add `{typed}`")


def supports_world_size(preset: PresetSpec, world_size: int) -> bool:
    """Return True if the preset can train in this number of processes."""
    return unsupported(preset, world_size=world_size) is None


def next_world_size(preset: PresetSpec, world_size: int) -> int:
    """Return the smallest supported world size from `world_size` on, or the largest one below."""
    multiple = preset.world_size_multiple
    up = max(preset.min_world_size, world_size + -world_size % multiple)
    return up if preset.max_world_size is None else min(up, preset.max_world_size)


def limitations(preset: PresetSpec) -> tuple[str, ...]:
    """Return what the preset does not work with, for `toolkit presets --json` and the docs.

    The rules answer for the methods that the toolkit knows; the rest are upstream bugs outside the toolkit's reach.
    """
    lines = []
    for label, method in _DOCUMENTED_METHODS.items():
        reason = unsupported(preset, method)
        if reason is not None:
            lines.append(f"{label}: {reason.why}")
    return (*lines, *_upstream_limitations(preset))


_DOCUMENTED_METHODS = {
    "QLoRA": Method(lora=True, load_in_4bit=True),
    "`save_only_model`": Method(save_only_model=True),
    "`async_save`": Method(async_save=True),
    "`auto_find_batch_size`": Method(auto_find_batch_size=True),
    "`packing`": Method(packing=True),
    "`streaming`": Method(streaming=True),
    "`torch_compile`": Method(torch_compile=True),
    "`use_liger_kernel`": Method(use_liger_kernel=True),
    "`freeze`": Method(freeze=True),
}


def _upstream_limitations(preset: PresetSpec) -> tuple[str, ...]:
    if preset.uses_fsdp_plugin:
        return ("the Trainer's activation checkpointing together with FSDP's own",)
    if preset.engine == "deepspeed" and preset.shards_parameters:
        return ("the Trainer's own save of LoRA adapters, which can be empty (trl#4416, peft#2892, DeepSpeed#7900)",)
    if preset.engine == "deepspeed" and preset.sharding == "shard_grad_op":
        return ("`overlap_comm`, which can give wrong gradients (DeepSpeed#7188, #5294, #8061)",)
    return ()


# -- the rules, in the order in which they are reported


def _preset_answer(preset: PresetSpec, why: str, hint: str | None) -> _Answer:
    return why, f"preset {preset.name!r} {why}", hint


def _method_answer(case: _Case, option: str, why: str, hint: str | None) -> _Answer:
    assert case.preset is not None
    return why, f"{case.option(option)} does not work under preset {case.preset.name!r}: {why}", hint


@_rule("needs-gpu")
def _needs_gpu(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or preset.needs_gpu is None or case.device is None or case.device.type != "cpu":
        return None
    return _preset_answer(preset, f"does not run on a CPU: {preset.needs_gpu}", "`--preset zero3`")


@_rule("world-size")
def _world_size(case: _Case) -> _Answer:
    preset, world_size = case.preset, case.world_size
    if preset is None or world_size is None:
        return None
    if case.purpose == "launched":  # a plain launch may choose another, for example FSDP2 in one process
        return None
    above = preset.max_world_size is not None and world_size > preset.max_world_size
    if world_size < preset.min_world_size:
        why = f"needs at least {preset.min_world_size} processes"
    elif above:
        why = "trains in one process" if preset.max_world_size == 1 else f"takes {preset.max_world_size} at most"
    elif world_size % preset.world_size_multiple:
        why = f"needs a multiple of {preset.world_size_multiple} processes"
    else:
        return None
    instead = next_world_size(preset, world_size)
    message, hint = _world_size_message(case, why, instead)
    if case.purpose == "script":
        return why, message, hint
    if above:
        hint += ", or `--preset ddp` for several"
    elif world_size < preset.min_world_size:
        hint += ", or `--preset ddp` for fewer"
    return why, message, hint


def _world_size_message(case: _Case, why: str, instead: int) -> tuple[str, str]:
    """The sentence and the hint of a world size that is refused."""
    assert case.preset is not None
    given, hint = f"--num-processes is {case.world_size}", f"`--num-processes {instead}`"
    if case.purpose == "script":
        given, hint = (
            f"this script was started in {case.world_size}",
            f"`torchrun --nproc_per_node {instead} script.py`",
        )
    elif case.purpose in ("train", "convert"):
        given = f"got {case.world_size}"
    elif case.purpose == "cluster":
        given = f"--nodes x --gpus-per-node is {case.world_size}"
        hint = f"choose them so that their product is {instead}"
    return f"preset {case.preset.name!r} {why}, {given}", hint


def missing_degree(preset: PresetSpec, given: Collection[str]) -> str | None:
    """Return the first dimension of the preset whose degree a run must name, and which is not among the given ones."""
    return next((name for name in preset.degrees if name not in given), None)


@_rule("degree-given")
def _degree_given(case: _Case) -> _Answer:
    """A run of the toolkit asks for it before it asks here, with `check_degrees_given`."""
    preset = case.preset
    if preset is None or case.purpose not in ("plan", "recommend"):
        return None
    name = missing_degree(preset, case.method.degrees)
    if name is None:
        return None
    return _preset_answer(preset, _needs_degree(name, case.option(name)), f"add `{case.option(name)} 2`")


def _needs_degree(name: str, option: str) -> str:
    return f"needs {option}: the number of GPUs for {NAMES[name]}"


@_rule("degree-of-preset")
def _degree_of_preset(case: _Case) -> _Answer:
    preset = case.preset
    for name, degree in case.method.degrees.items():
        if degree < 1:
            why = f"{name if case.purpose == 'script' else case.option(name)} is {degree}, expected 1 or more"
            return why, why, None
        if preset is not None and degree > 1 and name not in preset.parallel:
            why = f"it has no {NAMES[name]}"
            message = f"{case.degree(name, degree)} does not work under preset {preset.name!r}: {why}"
            return why, message, PRESETS_OF_DEGREE[name]
        if preset is not None and degree == 1 and name in WHOLE_SEQUENCES and name in preset.parallel:
            why = f"{case.degree(name, degree)} under preset {preset.name!r} divides nothing"
            return why, why, WHOLE_SEQUENCES[name]
    return None


# What trains the same with whole sequences, or with all layers on each GPU.
WHOLE_SEQUENCES = {"cp": "`--preset fsdp2`", "sp": "`--preset zero3`", "pp": "`--preset ddp`"}
PRESETS_OF_DEGREE = {
    "pp": "`--preset pipeline_1f1b`",
    "tp": "`--preset fsdp2_tp`, or `tp` without sharding",
    "cp": "`--preset cp`",
    "sp": "`--preset ulysses`",
    "ep": "`--preset ep`, or `ep_tp` with tensor parallelism",
    "dp_replicate": "`--preset hsdp_tp`",
}


@_rule("degree-world-size")
def _degree_world_size(case: _Case) -> _Answer:
    """The ranks must divide into whole groups, and leave as many for data parallelism as the preset needs."""
    preset, world_size, degrees = case.preset, case.world_size, case.method.degrees
    if preset is None or world_size is None or not preset.parallel or not degrees:
        return None
    inner = math.prod(degrees.get(name, 1) for name in preset.parallel if name in SAME_ROWS)
    outer = 2 if {"dp_shard", "tp"} <= set(preset.parallel) else 1
    if {"dp_shard", "dp_replicate"} <= set(preset.parallel):
        outer = 2 * degrees.get("dp_replicate", DEFAULT_REPLICAS)
    multiple = inner * max(1, outer // 2)
    if world_size < inner * outer or world_size % multiple:
        groups = " x ".join(f"{name} {degrees[name]}" for name in preset.parallel if name in degrees)
        instead = max(inner * outer, world_size - world_size % multiple)
        why = f"with {groups} needs a multiple of {multiple} processes, {inner * outer} or more"
        return why, *_world_size_message(case, why, instead)
    return _expert_groups(case, preset.layout(world_size, degrees))


def _expert_groups(case: _Case, layout: ParallelLayout | None) -> _Answer:
    if layout is None or layout.ep == 1:
        return None
    ranks = layout.dp_shard * layout.tp
    if layout.ep % layout.tp:
        why = f"{case.degree('ep', layout.ep)} is no multiple of {case.degree('tp', layout.tp)}"
    elif ranks % layout.ep:
        why = f"{case.degree('ep', layout.ep)} does not divide the {ranks} processes"
    else:
        return None
    fitting = [ep for ep in range(2, ranks + 1) if ep % layout.tp == 0 and ranks % ep == 0]
    closest = min(fitting, key=lambda ep: abs(ep - layout.ep))
    return why, why, f"`{case.degree('ep', closest)}`"


@_rule("sequence-parallel-stage")
def _sequence_parallel_stage(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or "sp" not in preset.parallel or preset.shards_parameters:
        return None
    why = "makes gradients sp times too large: below stage 3 DeepSpeed sums those of a sequence's parts"
    return _preset_answer(preset, why, "`--preset ulysses`, or stage 3 in its JSON")


@_rule("degree-planned")
def _degree_planned(case: _Case) -> _Answer:
    split, preset, method = case.method.model_split, case.preset, case.method
    if split is None or preset is None or case.purpose not in ("plan", "recommend"):
        return None
    for name, degree in method.degrees.items():
        if degree > 1 and name in split.not_planned:
            why = f"{case.option(name)} is not planned for {split.model_type}: {split.not_planned[name]}"
            return why, why, "`--cp` and `--sp` are planned, or `--preset fsdp2`"
    if method.lora and preset.sharded_at_load and "lora" in split.not_planned:
        why = f"LoRA on {split.model_type} is not planned under preset {preset.name!r}: {split.not_planned['lora']}"
        return why, why, "`--lora-target-modules q_proj`, or `--preset fsdp2`"
    return None


@_rule("lora-of-experts")
def _lora_of_experts(case: _Case) -> _Answer:
    """peft gives the fused experts of some architectures adapters, which it cannot divide with them."""
    split, method = case.method.model_split, case.method
    renamed = {} if split is None else RENAMED_TARGETS.get(split.model_type, {})
    degree = next((name for name in ("ep", "tp") if method.degrees.get(name, 1) > 1), None)
    if not method.lora or degree is None or not renamed or not {*ALL_LINEAR, *renamed} & {*method.lora_targets}:
        return None
    why = f"LoRA on the experts does not work with {case.option(degree)}: peft's adapters are not divided with them"
    return why, why, f"`{case.option('lora_target_modules')} q_proj k_proj v_proj o_proj`"


@_rule("parallel-method")
def _parallel_method(case: _Case) -> _Answer:
    """Methods that are wrong, or that were never run, where layers or sequences are split."""
    preset, method = case.preset, case.method
    if preset is None or not preset.parallel:
        return None
    if "pp" in preset.parallel:
        rules = {**_NOT_SPLIT, **_NOT_IN_STAGES}
    else:
        rules = {**_NOT_SPLIT, **(_NOT_AT_LOAD if preset.sharded_at_load else _NOT_WITH_SEQUENCES)}
    for name, (because, hint) in rules.items():
        if getattr(method, name):
            return _method_answer(case, name, because, hint)
    if method.loss == "chunked" and set(preset.degrees) - {"ep"}:
        why = "the head is split over ranks, or sees a part of each sequence"
        why = "the chunked loss was never run on a stage" if "pp" in preset.parallel else why
        return _method_answer(case, "loss chunked", why, "leave `--loss` out: it is `full` here")
    if (preset.sharded_at_load or "pp" in preset.parallel) and not survives_offload(method.optim):
        why = f"only AdamW was run on {'the stages of a pipeline' if preset.degrees == ('pp',) else _AT_LOAD}"
        return _method_answer(case, f"optim {method.optim}", why, f"`--optim adamw_torch`, or {_runs(method.optim)}")
    if "sp" in preset.parallel and method.attn_implementation in ("eager", "flex_attention"):
        why = "DeepSpeed exchanges heads in front of SDPA and flash attention only"
        return _method_answer(case, f"attn_implementation {method.attn_implementation}", why, _USE_SDPA)
    if "cp" in preset.parallel and method.attn_implementation not in (None, AUTO, "sdpa"):
        why = "ring attention replaces SDPA"
        return _method_answer(case, f"attn_implementation {method.attn_implementation}", why, _USE_SDPA)
    return None


_AT_LOAD = "a model that is sharded at load"
_USE_SDPA = "`--attn_implementation sdpa`"
_LEAVE_OUT = "leave it out, or `--preset fsdp2`"
_NOT_SPLIT = {
    "load_in_4bit": ("packed 4-bit weights are no matrix that could be split", "`--preset fsdp2`"),
    "torch_compile": ("compiled layers were never run beside its collectives", _LEAVE_OUT),
    "use_liger_kernel": ("Liger's kernels read whole weights and whole sequences", _LEAVE_OUT),
    "auto_find_batch_size": ("the Trainer cannot make the split model anew", "leave it out"),
    "streaming": ("a stream deals rows to single ranks, and here several train on the same rows", _LEAVE_OUT),
    "fp16": ("fp16's loss scale was never run with it", "`--bf16 true`"),
}
_NOT_AT_LOAD = {
    "freeze": ("its parts are sharded in one dtype before any is frozen", _LEAVE_OUT),
    "train_only": ("its parts are sharded in one dtype before any is frozen", _LEAVE_OUT),
    "activation_checkpointing_offload": ("the offload was never run with it", "leave it out"),
    "save_only_model": ("a checkpoint could not be resumed", "leave it out"),
    "lora_config": ("only plain LoRA was run on a model that is sharded at load", _LEAVE_OUT),
}
_USE_DDP = "leave it out, or `--preset ddp`"
_NOT_IN_STAGES = {
    "lora": ("stages hold no adapters yet", "`--preset fsdp2` or `ddp`"),
    "freeze": ("a stage without trained weights was never run", _USE_DDP),
    "train_only": ("a stage without trained weights was never run", _USE_DDP),
    "activation_checkpointing_offload": ("the offload was never run with it", "leave it out"),
    "save_only_model": ("a checkpoint could not be resumed", "leave it out"),
    "neftune": ("the noise was never run on a stage's embedding", _USE_DDP),
    "label_smoothing": ("the stage with the head computes the model's own loss", _USE_DDP),
}
_NOT_WITH_SEQUENCES = {
    "packing": ("a packed row's documents would attend to each other across ranks", _LEAVE_OUT),
}


@_rule("pipeline-schedule")
def _pipeline_schedule(case: _Case) -> _Answer:
    """The order of the stages must suit their number, the accumulation steps and the model's layers."""
    preset, method = case.preset, case.method
    if preset is not None and "pp" not in preset.parallel:
        name = next((n for n in ("pipeline_schedule", "pipeline_chunks") if getattr(method, n) is not None), None)
        return None if name is None else _method_answer(case, name, "it has no pipeline", PRESETS_OF_DEGREE["pp"])
    settings = method.pipeline
    if settings is None or method.micro_batches is None:
        return None
    if method.pipeline_chunks is not None and method.pipeline_chunks < 1:
        why = f"{case.option('pipeline_chunks')} is {method.pipeline_chunks}, expected 1 or more"
        return why, why, None
    layers = None if method.model_split is None else method.model_split.sizes.get("num_hidden_layers")
    problem = settings.problem(micro_batches=method.micro_batches, layers=layers)
    return None if problem is None else (problem[0], problem[0], problem[1])


@_rule("pipeline-purpose")
def _pipeline_purpose(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or "pp" not in preset.parallel:
        return None
    if case.purpose == "script":
        why = "runs in the toolkit's own loop: the Trainer computes whole models"
        return _preset_answer(preset, why, "`toolkit train --preset pipeline_1f1b`, or another preset here")
    if case.purpose == "convert":
        why = "reads checkpoints of the same stages only"
        return _preset_answer(preset, why, "start from the checkpoint's weights: it is a model folder")
    return None


@_rule("degree-of-model")
def _degree_of_model(case: _Case) -> _Answer:
    split = case.method.model_split
    for name, degree in case.method.degrees.items():
        because = None if split is None or name == "dp_replicate" or degree == 1 else split.why_not(name, degree)
        if split is None or because is None:
            continue
        why = f"{case.option(name)} {degree} does not work for this model: {because}"
        nearest_degree = split.nearest(name, degree)
        if nearest_degree is not None:
            return why, why, f"`{case.option(name)} {nearest_degree}`"
        if name == "pp":
            return why, why, "`--preset fsdp2` shards every architecture"
        unknown = name in ("tp", "ep") and name not in split.plans and case.purpose != "recommend"  # it shows no hints
        others = ", ".join(types_with_plan(name)[:200]) if unknown else ""  # reads every architecture's source
        return why, why, f"transformers has plans for {others}" if others else "`--preset fsdp2`"
    return None


@_rule("gpu-count")
def _gpu_count(case: _Case) -> _Answer:
    count = None if case.device is None else case.device.count
    if count is None or case.world_size is None or case.world_size <= count:
        return None
    why = f"{case.world_size} processes, but {count} GPUs are visible here"
    return why, why, f"`--num-processes {count}`" if count else "`--cpu` trains on the CPU"


@_rule("nvme-disk")
def _nvme_disk(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not preset.uses_nvme:
        return None
    if case.purpose == "convert":
        why = "swaps to NVMe: DeepSpeed resumes it only from its own swap files"
        return _preset_answer(preset, why, "`--preset zero3_cpu_offload`")
    if case.purpose == "recommend" and case.device is not None and not case.device.has_nvme:
        return _preset_answer(preset, "needs a local NVMe disk (`--nvme-gb-per-second`)", None)
    return None


@_rule("rehearsal")
def _rehearsal(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or case.purpose not in ("rehearse", "trace"):
        return None
    if preset.uses_nvme:
        why = "its swap files belong to a real run on a real disk"
    elif preset.needs_gpu is not None:
        why = f"{preset.needs_gpu}, and its quantised collectives need other ranks"
    elif "pp" in preset.parallel:
        why = "a stage computes on the activations of the stage before it"
    else:
        return None
    return why, f"preset {preset.name!r} cannot be rehearsed: {why}", "`toolkit plan` calculates its memory"


@_rule("fake-tensors")
def _fake_tensors(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or case.purpose != "trace":
        return None
    if preset.engine == "deepspeed":
        why = "DeepSpeed reads the values and addresses of its tensors"
    elif preset.parallel:
        why = "fake tensors were never run where layers or sequences are split"
    elif preset.offload_optimizer or preset.offload_param:
        why = "offloaded and resident tensors would share one memory"
    else:
        return None
    hint = "leave --fake-tensors out, for exact bytes of the model states; or `--preset fsdp2`"
    return why, f"--fake-tensors does not work with preset {preset.name!r}: {why}", hint


@_rule("fake-tensor-method")
def _fake_tensor_method(case: _Case) -> _Answer:
    if case.purpose != "trace":
        return None
    for name in ("load_in_4bit", "torch_compile", "packing", "activation_checkpointing_offload"):
        if getattr(case.method, name):
            why = f"--{name} is not traced: fake tensors have shapes and no values"
            return why, why, f"leave --{name} out, or leave --fake-tensors out"
    if _library(case.method.optim) != "torch":
        why = f"--optim {case.method.optim} is not traced: its kernels read values, and fake tensors have none"
        return why, why, "leave --fake-tensors out, for exact bytes of the model states"
    return None


@_rule("compute-dtype")
def _compute_dtype(case: _Case) -> _Answer:
    preset, device = case.preset, case.device
    if preset is None or case.purpose != "recommend" or device is None or device.has_bf16:
        return None
    why = f"computes in {preset.mixed_precision}, for which {device.name} has no hardware"
    return _preset_answer(preset, why, None)


@_rule("planned-optimizer")
def _planned_optimizer(case: _Case) -> _Answer:
    if case.purpose not in ("plan", "recommend") or case.method.optim in OPTIMIZERS:
        return None
    why = f"--optim {case.method.optim} is not planned"
    return why, why, did_you_mean(case.method.optim, OPTIMIZERS, otherwise=f"planned: {', '.join(OPTIMIZERS)}")


def survives_offload(optim: str) -> bool:
    """Return True if DeepSpeed's offload keeps the optimizer: torch's AdamW, as its own CPU kernel."""
    return optim in ("adamw_torch_fused", "adamw_torch")


@_rule("optim")
def _optim(case: _Case) -> _Answer:
    preset, optim = case.preset, case.method.optim
    if preset is None or survives_offload(optim):  # which works under every preset
        return None
    if preset.engine == "deepspeed" and preset.offload_optimizer:
        # accelerate 1.15, `map_pytorch_optim_to_deepspeed`: all others but Adagrad and Lion become a CPU Adam with L2
        # regularisation in place of decoupled weight decay; 8-bit and paged states become plain fp32 ones.
        why = "accelerate replaces an offloaded optimizer by DeepSpeed's CPU Adam"
        hint = f"`--optim adamw_torch`, or {_runs(optim)}"
    else:
        found = _no_optimizer(preset.engine, optim)
        if found is None:
            return None
        why, hint = found
    return why, f"--optim {optim} does not work under preset {preset.name!r}: {why}", hint


def _no_optimizer(engine: str, optim: str) -> tuple[str, str] | None:
    answers = _NO_OPTIMIZER.get(engine, {})
    return answers.get(optim) or answers.get(_library(optim))


def _runs(optim: str) -> str:
    """Name a preset that can run an optimizer."""
    running = [name for name, engine in _WITHOUT_OFFLOAD.items() if _no_optimizer(engine, optim) is None]
    return f"`--preset {running[0]}`"


def _library(optim: str) -> str:
    spec = OPTIMIZERS.get(optim)
    return "" if spec is None else spec.class_name.partition(".")[0]


# Presets to name where a preset that offloads, or splits layers, cannot run an optimizer, and their engines.
_WITHOUT_OFFLOAD = {"zero3": "deepspeed", "fsdp2": "fsdp2", "ddp": "ddp"}
_USE_BNB = "`--optim adamw_bnb_8bit`"
# engine -> name or library of an optimizer -> why it does not work there, and what does.
# benchmarks/optimizers.py reproduces those of FSDP2.
_NO_OPTIMIZER = {
    "deepspeed": {
        "adafactor": (
            "DeepSpeed flattens parameters, and only matrices have rows and columns to factor",
            f"`--preset ddp`, or {_USE_BNB}",
        ),
        "adagrad": ("DeepSpeed 0.19.8 cannot make its states in advance", "`--optim rmsprop`, or `--preset ddp`"),
        "muon": (
            "DeepSpeed flattens parameters, and Muon orthogonalises matrices",
            "`--preset ddp` or `fsdp2`",
        ),
        "torchao": (
            "torchao quantizes whole blocks of 256, and DeepSpeed's flat partitions seldom are",
            _USE_BNB,
        ),
    },
    "fsdp2": {
        "bitsandbytes": (
            "bitsandbytes' kernels take no DTensors",
            "`--optim adamw_torch_8bit`, or `--preset zero2` or `zero3`",
        ),
        "adafactor": (
            "transformers' Adafactor makes plain tensors beside DTensors",
            "`--optim adamw_torch_8bit`, or `--preset ddp`",
        ),
        "adagrad": (
            "torch makes its sums before FSDP2 shards the parameters, so every rank keeps them whole",
            "`--optim rmsprop`, or `--preset ddp`",
        ),
        "adamw_torch_4bit": ("torchao's flat 4-bit states are no shards of a matrix", "`--optim adamw_torch_8bit`"),
    },
}


@_rule("freeze-and-train-only")
def _freeze_and_train_only(case: _Case) -> _Answer:
    if not (case.method.freeze and case.method.train_only):
        return None
    why = "--freeze and --train_only together"
    return why, why, "use one of them"


@_rule("checkpointing-offload")
def _checkpointing_offload(case: _Case) -> _Answer:
    if not case.method.activation_checkpointing_offload or case.method.activation_checkpointing:
        return None
    why = "--activation_checkpointing_offload without --activation_checkpointing: there are no checkpoints to offload"
    return why, why, "add `--activation_checkpointing true`"


@_rule("4bit-needs-lora")
def _4bit_needs_lora(case: _Case) -> _Answer:
    if not case.method.load_in_4bit or case.method.lora:
        return None
    option = case.option("lora_r")
    why = f"{case.option('load_in_4bit')} needs {option}: 4-bit weights are not trained"
    return why, why, f"add `{option} 16`"


@_rule("freeze-with-lora")
def _freeze_with_lora(case: _Case) -> _Answer:
    name = "freeze" if case.method.freeze else "train_only" if case.method.train_only else None
    if name is None or not case.method.lora:
        return None
    why = f"--{name} with --lora_r: only the adapters are trained already"
    return why, why, "`--lora_config layers_to_transform=[0,1]`, or `--lora_target_modules q_proj v_proj`"


@_rule("qlora")
def _qlora(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not case.method.load_in_4bit:
        return None
    if preset.needs_gpu is not None:
        why = "it quantizes what it gathers, and packed 4-bit weights are no numbers"
    elif preset.offload_optimizer and not preset.shards_parameters:
        why = "the adapters' optimizer states are too small to offload"
    elif preset.uses_nvme:
        why = "4-bit weights on a disk have not been run; in host memory they have"
    else:
        return None
    return _method_answer(case, "load_in_4bit", why, QLORA_PRESETS_HINT)


@_rule("chunked-with-liger")
def _chunked_with_liger(case: _Case) -> _Answer:
    if case.method.loss != "chunked" or not case.method.use_liger_kernel:
        return None
    why = "--loss chunked with --use_liger_kernel: Liger computes the loss without the full logits itself"
    return why, why, "leave `--loss` out"


@_rule("gpu-only-method")
def _gpu_only_method(case: _Case) -> _Answer:
    if case.device is None or case.device.type != "cpu":
        return None
    for name, (because, hint) in _GPU_ONLY_METHODS.items():
        if getattr(case.method, name):
            why = f"--{name} needs a GPU: {because}"
            return why, why, hint
    return None


_GPU_ONLY_METHODS = {
    "use_liger_kernel": ("its kernels are written in Triton", "leave it out on a CPU"),
    "activation_checkpointing_offload": ("on a CPU activations are in host memory already", "leave it out on a CPU"),
    "memory_snapshot": ("it records CUDA's allocator", "`--profile_steps 3:5` works on a CPU"),
}


@_rule("attention-device")
def _attention_device(case: _Case) -> _Answer:
    name = case.method.attn_implementation
    if name is None or case.device is None or case.device.type != "cpu":
        return None
    if name in FLASH_ATTENTION or (name.startswith("kernels-community/") and needs_no_mask(name)):
        because = "its kernels are built for GPUs"
    elif name == "flex_attention":
        because = "FlexAttention has no backward on a CPU (torch 2.13)"
    else:
        return None
    why = f"{case.option('attn_implementation')} {name} needs a GPU: {because}"
    return why, why, _working_attention(case)


@_rule("attention-rows")
def _attention_rows(case: _Case) -> _Answer:
    if case.method.attn_implementation != VARLEN or case.method.packing:
        return None
    option = case.option("attn_implementation")
    why = f"{option} {VARLEN} without --packing: padded rows need a mask"
    packing = "--packing" if case.purpose in ("plan", "recommend") else "--packing true"
    return why, why, f"add `{packing}`, or `{option} sdpa`"


@_rule("attention-model")
def _attention_model(case: _Case) -> _Answer:
    name, model = case.method.attn_implementation, case.method.model_attention
    because = None if model is None or name in (None, AUTO) else model.why_not(str(name))
    if because is None:
        return None
    why = f"{case.option('attn_implementation')} {name} does not run this model: {because}"
    return why, why, _working_attention(case)


def _working_attention(case: _Case) -> str:
    """Name the functions that run on every device."""
    model = case.method.model_attention
    names = (VARLEN, "sdpa") if model is None else model.working
    shown = [name for name in names if case.method.packing or name != VARLEN]
    return " or ".join(f"`{case.option('attn_implementation')} {name}`" for name in shown[:2])


@_rule("compiled-zero3")
def _compiled_zero3(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not case.method.torch_compile:
        return None
    if preset.engine != "deepspeed" or not preset.shards_parameters:
        return None
    # docs/evidence/compilation.md: 15 graph breaks in a model of two layers, and nothing is fused
    why = "ZeRO-3 gathers weights in hooks, so that the compiler's graph ends at each linear layer"
    return _method_answer(case, "torch_compile", why, "`--preset fsdp2` shards the same")


@_rule("comm-hook")
def _comm_hook(case: _Case) -> _Answer:
    if case.method.ddp_comm_hook is None:
        return None
    if case.purpose in ("rehearse", "trace"):
        why = "--ddp_comm_hook cannot be rehearsed: a hook reads what the other ranks send"
        return why, why, "leave it out"
    if case.preset is not None and case.preset.engine in _NO_COMM_HOOK:
        return _method_answer(case, "ddp_comm_hook", _NO_COMM_HOOK[case.preset.engine], "`--preset ddp`")
    if case.world_size == 1:
        why = f"--ddp_comm_hook with one process: {_NO_COMM_HOOK['none']}"
        return why, why, "`--num-processes 2`"
    return None


_NO_COMM_HOOK = {
    "deepspeed": "DeepSpeed reduces gradients itself",
    "fsdp2": "FSDP2 reduce-scatters gradients itself, without DDP's buckets",
    "none": "there is nothing to communicate",
    "pipeline": "gradients between pipelines are reduced without DDP's buckets",
}


@_rule("accumulate")
def _accumulate(case: _Case) -> _Answer:
    preset, chosen = case.preset, case.method.accumulate
    if preset is None or chosen is None or preset.engine == "fsdp2" or chosen == default_accumulate(preset):
        return None
    why = _FIXED_ACCUMULATION["deepspeed" if preset.engine == "deepspeed" else "ddp", chosen]
    return _method_answer(case, f"accumulate {chosen}", why, "leave it out, or `--preset fsdp2`")


_FIXED_ACCUMULATION = {
    ("ddp", "sharded"): "every GPU holds all gradients, so a reduction in each accumulation step would save nothing",
    ("deepspeed", "sharded"): "below ZeRO-2, gradients are reduced in the last accumulation step only",
    ("deepspeed", "whole"): "ZeRO-2 and ZeRO-3 reduce and shard gradients in every accumulation step",
}


def rejects_save_only_model(fsdp_state_dict_type: str) -> bool:
    """Return True if the Trainer raises for `save_only_model` (transformers 5.23, `Trainer.__init__`)."""
    return fsdp_state_dict_type == "SHARDED_STATE_DICT"


def rejects_auto_find_batch_size(*, engine: str, zero_stage: int) -> bool:
    """Return True if the Trainer raises for `auto_find_batch_size` (transformers 5.23, `Trainer.__init__`)."""
    return engine == "deepspeed" and zero_stage == 3


@_rule("save-only-model")
def _save_only_model(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not preset.uses_fsdp_plugin or not case.method.save_only_model:
        return None
    if not rejects_save_only_model(_fsdp_state_dict_type(preset)):
        return None
    why = "the Trainer rejects it with FSDP2's sharded state dict"
    return _method_answer(case, "save_only_model", why, "leave it out")


def _fsdp_state_dict_type(preset: PresetSpec) -> str:
    """The preset's choice, or accelerate's default with FSDP2."""
    config = preset.accelerate_config()["fsdp_config"]
    return str(config.get("fsdp_state_dict_type", "SHARDED_STATE_DICT"))


@_rule("async-save")
def _async_save(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not case.method.async_save or preset.sharded_at_load:
        return None
    hint = "leave it out, or `--preset fsdp2`"
    if preset.engine == "deepspeed":
        return _method_answer(case, "async_save", "DeepSpeed writes its checkpoints itself", hint)
    if preset.engine == "pipeline":
        return _method_answer(case, "async_save", "its stages write their checkpoints themselves", hint)
    if not preset.uses_fsdp_plugin:
        return _method_answer(case, "async_save", "rank 0 writes its checkpoints alone, and no rank has a shard", hint)
    state_dict_type = _fsdp_state_dict_type(preset)
    if state_dict_type == "SHARDED_STATE_DICT":
        return None
    why = f"its fsdp_state_dict_type is {state_dict_type}, which rank 0 writes alone"
    return _method_answer(case, "async_save", why, "`fsdp_state_dict_type: SHARDED_STATE_DICT`")


@_rule("auto-find-batch-size")
def _auto_find_batch_size(case: _Case) -> _Answer:
    preset = case.preset
    if preset is None or not case.method.auto_find_batch_size:
        return None
    if not rejects_auto_find_batch_size(zero_stage=3 if preset.shards_parameters else 2, engine=preset.engine):
        return None
    why = "the Trainer rejects it with ZeRO-3"
    return _method_answer(case, "auto_find_batch_size", why, "leave it out, or `--preset zero2`")


@_rule("recommendation")
def _recommendation(case: _Case) -> _Answer:
    """Presets that work, but that are never recommended."""
    preset = case.preset
    if preset is None or case.purpose != "recommend":
        return None
    if preset.needs_gpu is not None:
        why = (
            "quantises its communication, which changes the training problem (docs/concepts/numerics.md): "
            "choose it manually"
        )
        return _preset_answer(preset, why, None)
    if "pp" in preset.parallel:
        return _preset_answer(preset, "has no step time measured on GPUs yet: choose it manually", None)
    if preset.engine == "ddp" and case.world_size == 1:
        return _preset_answer(preset, "is `single` where there is one process", None)
    return None
