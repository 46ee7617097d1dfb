"""Compatibility rules: which preset works with which method, world size and device, and why not.

Each rule is written once, in the module of its topic; `RULES` lists them. The launcher, the training script, the
planner, the recommendation, the rehearsal, the checkpoint conversion, `toolkit presets` and the docs all ask here:

    reason = unsupported(preset, Job(lora_r=16, load_in_4bit=True), world_size=8, purpose="plan")
    check_supported(preset, job, world_size=8, device=CPU)       # raises ToolkitError with the reason and a hint
    warnings = check_arguments(job, preset, num_processes=2, on_cpu=True)  # and what the preset sets or does not read
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypedDict, Unpack

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import DDP_ARGUMENTS, check_trackers, check_values, ineffective_arguments, missing_packages
from toolkit.models.attention import read_model_attention
from toolkit.models.split import read_split
from toolkit.presets import layout_rules, method_rules
from toolkit.presets.compatibility import (
    CPU,
    Answers,
    Case,
    Device,
    ModelLimits,
    Purpose,
    Reason,
    Rule,
    job_answer,
    of_preset,
    preset_answer,
)
from toolkit.presets.spec import STRATEGY_ARGUMENTS, PresetSpec


class Known(TypedDict, total=False):
    """What is known of a launch beside the preset and the job; see `Case`."""

    world_size: int | None
    device: Device | None
    model: ModelLimits
    purpose: Purpose


def reasons(preset: PresetSpec | None, job: Job | None = None, **known: Unpack[Known]) -> Iterator[Reason]:
    """Yield every reason why the combination does not work, the most basic one first; one for each rule."""
    case = Case(preset=preset, job=job or Job(), **known)
    for name, rule in RULES.items():
        for why, message, hint in rule(case):
            yield Reason(rule=name, why=why, message=message, hint=hint)
            break


def unsupported(preset: PresetSpec | None, job: Job | None = None, **known: Unpack[Known]) -> Reason | None:
    """Return the first reason why the combination does not work, or None where it works."""
    return next(reasons(preset, job, **known), None)


def check_supported(preset: PresetSpec | None, job: Job | None = None, **known: Unpack[Known]) -> None:
    """Raise ToolkitError with the first reason why the combination does not work."""
    for reason in reasons(preset, job, **known):
        raise ToolkitError(reason.message, hint=reason.hint)


def check_degrees_given(preset: PresetSpec, names: Collection[str], *, purpose: Purpose = "train") -> None:
    """Raise ToolkitError unless `names` has every dimension whose degree the preset leaves to the run."""
    name = layout_rules.missing_degree(preset, names)
    if name is not None:
        option, typed = (name, f"{name}=2") if purpose == "script" else (f"--{name}", f"--{name} 2")
        why = layout_rules.needs_degree(name, option)
        raise ToolkitError(f"preset {preset.name!r} {why}", hint=f"add `{typed}`")


_SWITCHES = ("save_only_model", "async_save", "auto_find_batch_size", "packing", "streaming", "torch_compile")
_DOCUMENTED_METHODS = {
    "QLoRA": Job(lora_r=16, load_in_4bit=True),
    **{f"`{name}`": Job().with_values(**{name: True}) for name in (*_SWITCHES, "use_liger_kernel")},
    "`freeze`": Job(freeze=("*",)),
}


def limitations(preset: PresetSpec) -> tuple[str, ...]:
    """Return what the preset does not work with, for `toolkit presets --json` and the docs.

    The rules answer for the methods that the toolkit knows; the rest are upstream bugs outside the toolkit's reach.
    """
    found = ((label, unsupported(preset, job)) for label, job in _DOCUMENTED_METHODS.items())
    lines = [f"{label}: {reason.why}" for label, reason in found if reason is not None]
    if preset.traits.uses_fsdp_plugin:
        lines.append("the Trainer's activation checkpointing together with FSDP's own")
    bug = preset.traits.upstream_bugs.get(preset.sharding)
    return tuple(lines if bug is None else [*lines, bug])


# -- a job's arguments under a preset


def check_arguments(
    job: Job,
    preset: PresetSpec | None,
    *,
    num_processes: int | None,
    on_cpu: bool,
    purpose: Purpose = "train",
    here: bool = True,
) -> list[str]:
    """Check a job, and return one warning for each argument that has no effect.

    `preset` and `num_processes` are None where a plain launch does not give them. With `here` false, the job runs on
    another node, and a package that is missing on this one is a warning. Raises ToolkitError for what does not work.
    """
    check_values(job, on_cpu=on_cpu)
    if preset is not None:
        for name in STRATEGY_ARGUMENTS:
            if str(job.value(name) or "none").lower() not in ("none", "false"):
                what = f"--{name} would override the sharding of preset {preset.name!r}"
                raise ToolkitError(what, hint="put it into an accelerate YAML of your own: `--preset FILE`")
        check_degrees_given(preset, job.degrees)
    device = CPU if on_cpu else Device()
    check_supported(preset, job, world_size=num_processes, device=device, purpose=purpose)
    # The Trainer cannot load the best model where a sharded checkpoint holds only the model.
    only_model = job.save_only_model and job.load_best_model_at_end
    if only_model and preset is not None and preset.traits.rejects_best_of_weights:
        what = f"--load_best_model_at_end does not work with --save_only_model under preset {preset.name!r}"
        raise ToolkitError(what, hint="leave `--save_only_model` out")
    missing = missing_packages(job, on_cpu=on_cpu)
    if missing and here:
        raise missing[0]
    check_trackers(job)
    needed = [f"{error.message}, which is not installed here ({error.hint})" for error in missing]
    return [*needed, *_ineffective_under(preset, job), *ineffective_arguments(job)]


def _ineffective_under(preset: PresetSpec | None, job: Job) -> list[str]:
    if preset is None:
        return []
    lines = [
        f"--{name} has no effect: preset {preset.name!r} does not train with DDP"
        for name in DDP_ARGUMENTS
        if name in job.given and not preset.traits.uses_ddp
    ]
    if preset.traits.uses_fsdp_plugin and job.uses_activation_checkpointing and job.activation_checkpointing_kwargs:
        lines.append("--activation_checkpointing_kwargs has no effect: FSDP2 checkpoints each layer itself")
    return lines


def check_parts(job: Job, config: Mapping[str, Any]) -> None:
    """Check attention and degrees of parallelism against a model's configuration."""
    limits = ModelLimits(attention=read_model_attention(config), split=read_split(config))
    check_supported(None, job, model=limits)


# -- rules that depend on the device and on the purpose


def _needs_gpu(case: Case, preset: PresetSpec) -> Answers:
    if preset.needs_gpu is not None and case.on_cpu:
        yield preset_answer(preset, f"does not run on a CPU: {preset.needs_gpu}", "`--preset zero3`")


def _gpu_count(case: Case) -> Answers:
    device, size = case.device, case.world_size
    if device is None or device.count is None or size is None or size <= device.count * device.ranks_per_gpu:
        return
    count, shared, hint = device.count, device.ranks_per_gpu, "`--cpu` trains on the CPU"
    if count:
        hint = f"`--ranks-per-gpu {-(-size // count)}` for memory, losses and parity of real ranks, without speeds"
        hint = f"`--num-processes {count * shared}`, or {hint}"
    gpus = "1 GPU is" if count == 1 else f"{count} GPUs are"
    yield job_answer(
        f"{size} processes, but {gpus} visible here" + f", with {shared} ranks on each" * (shared > 1), hint
    )


def _shared_gpu(case: Case, preset: PresetSpec) -> Answers:
    """All collectives and point-to-point messages of the presets work through sockets; this one counts GPUs."""
    if case.device is not None and case.device.ranks_per_gpu > 1 and preset.needs_gpu is not None:
        why = "divides its quantised gradients by the GPUs of a node, and with --ranks-per-gpu each rank sees one"
        yield preset_answer(preset, why, "`--preset zero3`")


def _nvme_disk(case: Case, preset: PresetSpec) -> Answers:
    if not preset.uses_nvme:
        return
    if case.purpose == "convert":
        why = "swaps to NVMe, and resumes from its own swap files only"
        yield preset_answer(preset, why, "`--preset zero3_cpu_offload`")
    if case.purpose == "recommend" and case.device is not None and not case.device.has_nvme:
        yield preset_answer(preset, "needs a local NVMe disk (`--nvme-gb-per-second`)", None)


def _rehearsal(case: Case, preset: PresetSpec) -> Answers:
    if case.purpose not in ("rehearse", "trace"):
        return
    if preset.uses_nvme:
        why = "its swap files belong to a real run on a real disk"
    elif preset.needs_gpu is not None:
        why = f"{preset.needs_gpu}, and its quantised collectives need other ranks"
    elif "pp" in preset.parallel:
        why = "a stage computes on the activations of the stage before it"
    else:
        return
    yield why, f"preset {preset.name!r} cannot be rehearsed: {why}", "`toolkit plan` calculates its memory"


def _fake_tensors(case: Case, preset: PresetSpec) -> Answers:
    if case.purpose != "trace":
        return
    if preset.traits.no_trace is not None:
        why = preset.traits.no_trace
    elif preset.parallel:
        why = "fake tensors were never run where layers or sequences are split"
    elif preset.offloads:
        why = "offloaded and resident tensors would share one memory"
    else:
        return
    hint = "leave --fake-tensors out, for exact bytes of the model states; or `--preset fsdp2`"
    yield why, f"--fake-tensors does not work with preset {preset.name!r}: {why}", hint


def _fake_tensor_method(case: Case) -> Answers:
    if case.purpose != "trace":
        return
    for name in ("load_in_4bit", "torch_compile", "packing", "activation_checkpointing_offload"):
        if case.uses(name):
            why = f"--{name} is not traced: fake tensors have shapes and no values"
            yield job_answer(why, f"leave --{name} out, or leave --fake-tensors out")
    if method_rules.optimizer_library(case.job.optim) != "torch":
        why = f"--optim {case.job.optim} is not traced: its kernels read values, and fake tensors have none"
        yield job_answer(why, "leave --fake-tensors out, for exact bytes of the model states")


def _compute_dtype(case: Case, preset: PresetSpec) -> Answers:
    device = case.device
    if case.purpose == "recommend" and device is not None and not device.has_bf16:
        why = f"computes in {preset.mixed_precision}, for which {device.name} has no hardware"
        yield preset_answer(preset, why, None)


def _recommendation(case: Case, preset: PresetSpec) -> Answers:
    """Presets that work, but that are never recommended."""
    if case.purpose != "recommend":
        return
    if preset.needs_gpu is not None:
        problem = "which changes the training problem: choose it manually"
        yield preset_answer(preset, f"quantises its communication, {problem}", None)
    elif "pp" in preset.parallel:
        yield preset_answer(preset, "has no step time measured on GPUs yet: choose it manually", None)
    elif preset.traits.uses_ddp and case.world_size == 1:
        yield preset_answer(preset, "is `single` where there is one process", None)


# Every rule, the most basic one first: the first that objects is reported.
RULES: dict[str, Rule] = {
    "needs-gpu": of_preset(_needs_gpu),
    "world-size": of_preset(layout_rules.world_size),
    "degree-given": layout_rules.degree_given,
    "degree-of-preset": layout_rules.degree_of_preset,
    "pipeline-schedule": layout_rules.pipeline_schedule,
    "degree-of-model": layout_rules.degree_of_model,
    "degree-world-size": of_preset(layout_rules.degree_world_size),
    "sequence-parallel-stage": layout_rules.sequence_parallel_stage,
    "degree-planned": layout_rules.degree_planned,
    "lora-of-experts": layout_rules.lora_of_experts,
    "parallel-method": of_preset(layout_rules.parallel_method),
    "split-model-optimizer": of_preset(method_rules.split_model_optimizer),
    "pipeline-purpose": of_preset(layout_rules.pipeline_purpose),
    "gpu-count": _gpu_count,
    "shared-gpu": of_preset(_shared_gpu),
    "nvme-disk": of_preset(_nvme_disk),
    "rehearsal": of_preset(_rehearsal),
    "fake-tensors": of_preset(_fake_tensors),
    "fake-tensor-method": _fake_tensor_method,
    "compute-dtype": of_preset(_compute_dtype),
    "planned-optimizer": method_rules.planned_optimizer,
    "optim": of_preset(method_rules.optimizer_runs),
    "freeze-and-train-only": method_rules.freeze_and_train_only,
    "checkpointing-kind": method_rules.checkpointing_kind,
    "selective-checkpointing": of_preset(method_rules.selective_checkpointing),
    "4bit-needs-lora": method_rules.four_bit_needs_lora,
    "freeze-with-lora": method_rules.freeze_with_lora,
    "qlora": of_preset(method_rules.qlora),
    "bf16-states": of_preset(method_rules.bf16_states),
    "chunked-with-liger": method_rules.chunked_with_liger,
    "gpu-only-method": method_rules.gpu_only_method,
    "attention-device": method_rules.attention_device,
    "attention-rows": method_rules.attention_rows,
    "attention-model": method_rules.attention_model,
    "compiled-zero3": of_preset(method_rules.compiled_zero3),
    "comm-hook": method_rules.comm_hook,
    "accumulate": of_preset(method_rules.accumulation),
    "save-only-model": of_preset(method_rules.save_only_model),
    "async-save": of_preset(method_rules.async_save),
    "auto-find-batch-size": of_preset(method_rules.auto_find_batch_size),
    "recommendation": of_preset(_recommendation),
}
