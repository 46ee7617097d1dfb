"""Compatibility rules of tensor, expert, context, sequence and pipeline parallelism, and of the world size."""

from __future__ import annotations

import math
from collections.abc import Collection

from toolkit.models.attention import AUTO
from toolkit.models.lora import ALL_LINEAR, RENAMED_TARGETS
from toolkit.models.split import types_with_plan
from toolkit.parallel.layout import DEFAULT_REPLICAS, NAMES, SAME_ROWS, ParallelLayout
from toolkit.presets.compatibility import Answer, Case, method_answer, preset_answer
from toolkit.presets.optimizer_rules import preset_that_runs, survives_offload
from toolkit.presets.spec import PresetSpec


def next_world_size(preset: PresetSpec, world_size: int) -> int:
    """Return the smallest supported world size from `world_size` on, or the largest one below."""
    multiple = preset.world_size_multiple
    up = max(preset.min_world_size, world_size + -world_size % multiple)
    return up if preset.max_world_size is None else min(up, preset.max_world_size)


def world_size(case: Case) -> Answer:
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


def _world_size_message(case: Case, why: str, instead: int) -> tuple[str, str]:
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


def degree_given(case: Case) -> Answer:
    """A run of the toolkit asks for it before it asks here, with `check_degrees_given`."""
    preset = case.preset
    if preset is None or case.purpose not in ("plan", "recommend"):
        return None
    name = missing_degree(preset, case.job.degrees)
    if name is None:
        return None
    return preset_answer(preset, needs_degree(name, case.option(name)), f"add `{case.option(name)} 2`")


def needs_degree(name: str, option: str) -> str:
    return f"needs {option}: the number of GPUs for {NAMES[name]}"


def degree_of_preset(case: Case) -> Answer:
    preset = case.preset
    for name, degree in case.job.degrees.items():
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


def degree_world_size(case: Case) -> Answer:
    """The ranks must divide into whole groups, and leave as many for data parallelism as the preset needs."""
    preset, world_size, degrees = case.preset, case.world_size, case.job.degrees
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


def _expert_groups(case: Case, layout: ParallelLayout | None) -> Answer:
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


def sequence_parallel_stage(case: Case) -> Answer:
    preset = case.preset
    if preset is None or "sp" not in preset.parallel or preset.shards_parameters:
        return None
    why = "makes gradients sp times too large: below stage 3 DeepSpeed sums those of a sequence's parts"
    return preset_answer(preset, why, "`--preset ulysses`, or stage 3 in its JSON")


def degree_planned(case: Case) -> Answer:
    split, preset, job = case.model.split, case.preset, case.job
    if split is None or preset is None or case.purpose not in ("plan", "recommend"):
        return None
    for name, degree in job.degrees.items():
        if degree > 1 and name in split.not_planned:
            why = f"{case.option(name)} is not planned for {split.model_type}: {split.not_planned[name]}"
            return why, why, "`--cp` and `--sp` are planned, or `--preset fsdp2`"
    if job.is_lora and preset.sharded_at_load and "lora" in split.not_planned:
        why = f"LoRA on {split.model_type} is not planned under preset {preset.name!r}: {split.not_planned['lora']}"
        return why, why, "`--lora-target-modules q_proj`, or `--preset fsdp2`"
    return None


def lora_of_experts(case: Case) -> Answer:
    """peft gives the fused experts of some architectures adapters, which it cannot divide with them."""
    split, job = case.model.split, case.job
    renamed = {} if split is None else RENAMED_TARGETS.get(split.model_type, {})
    degree = next((name for name in ("ep", "tp") if job.degrees.get(name, 1) > 1), None)
    if not job.is_lora or degree is None or not renamed or not {*ALL_LINEAR, *renamed} & {*job.lora_target_modules}:
        return None
    why = f"LoRA on the experts does not work with {case.option(degree)}: peft's adapters are not divided with them"
    return why, why, f"`{case.option('lora_target_modules')} q_proj k_proj v_proj o_proj`"


def parallel_method(case: Case) -> Answer:
    """Methods that are wrong, or that were never run, where layers or sequences are split."""
    preset, job = case.preset, case.job
    if preset is None or not preset.parallel:
        return None
    if "pp" in preset.parallel:
        rules = {**_NOT_SPLIT, **_NOT_IN_STAGES}
    else:
        rules = {**_NOT_SPLIT, **(_NOT_AT_LOAD if preset.sharded_at_load else _NOT_WITH_SEQUENCES)}
    for name, (because, hint) in rules.items():
        if case.uses(name):
            return method_answer(case, name, because, hint)
    if job.loss == "chunked" and set(preset.degrees) - {"ep"}:
        why = "the head is split over ranks, or sees a part of each sequence"
        why = "the chunked loss was never run on a stage" if "pp" in preset.parallel else why
        return method_answer(case, "loss chunked", why, "leave `--loss` out: it is `full` here")
    if (preset.sharded_at_load or "pp" in preset.parallel) and not survives_offload(job.optim):
        why = f"only AdamW was run on {'the stages of a pipeline' if preset.degrees == ('pp',) else _AT_LOAD}"
        hint = f"`--optim adamw_torch`, or {preset_that_runs(job.optim)}"
        return method_answer(case, f"optim {job.optim}", why, hint)
    if "sp" in preset.parallel and job.attn_implementation in ("eager", "flex_attention"):
        why = "DeepSpeed exchanges heads in front of SDPA and flash attention only"
        return method_answer(case, f"attn_implementation {job.attn_implementation}", why, _USE_SDPA)
    if "cp" in preset.parallel and job.attn_implementation not in (None, AUTO, "sdpa"):
        why = "ring attention replaces SDPA"
        return method_answer(case, f"attn_implementation {job.attn_implementation}", why, _USE_SDPA)
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
    "lora_r": ("stages hold no adapters yet", "`--preset fsdp2` or `ddp`"),
    "freeze": ("a stage without trained weights was never run", _USE_DDP),
    "train_only": ("a stage without trained weights was never run", _USE_DDP),
    "activation_checkpointing_offload": ("the offload was never run with it", "leave it out"),
    "save_only_model": ("a checkpoint could not be resumed", "leave it out"),
    "neftune_noise_alpha": ("the noise was never run on a stage's embedding", _USE_DDP),
    "label_smoothing_factor": ("the stage with the head computes the model's own loss", _USE_DDP),
}


_NOT_WITH_SEQUENCES = {
    "packing": ("a packed row's documents would attend to each other across ranks", _LEAVE_OUT),
}


def pipeline_schedule(case: Case) -> Answer:
    """The order of the stages must suit their number, the accumulation steps and the model's layers."""
    preset, job = case.preset, case.job
    if preset is not None and "pp" not in preset.parallel:
        name = next((n for n in ("pipeline_schedule", "pipeline_chunks") if getattr(case.job, n) is not None), None)
        return None if name is None else method_answer(case, name, "it has no pipeline", PRESETS_OF_DEGREE["pp"])
    settings = job.pipeline
    if settings is None or case.purpose in ("script", "convert", "recommend"):  # accumulation steps are not known
        return None
    if job.pipeline_chunks is not None and job.pipeline_chunks < 1:
        why = f"{case.option('pipeline_chunks')} is {job.pipeline_chunks}, expected 1 or more"
        return why, why, None
    layers = None if case.model.split is None else case.model.split.sizes.get("num_hidden_layers")
    problem = settings.problem(micro_batches=job.gradient_accumulation_steps, layers=layers)
    return None if problem is None else (problem[0], problem[0], problem[1])


def pipeline_purpose(case: Case) -> Answer:
    preset = case.preset
    if preset is None or "pp" not in preset.parallel:
        return None
    if case.purpose == "script":
        why = "runs in the toolkit's own loop: the Trainer computes whole models"
        return preset_answer(preset, why, "`toolkit train --preset pipeline_1f1b`, or another preset here")
    if case.purpose == "convert":
        why = "reads checkpoints of the same stages only"
        return preset_answer(preset, why, "start from the checkpoint's weights: it is a model folder")
    return None


def degree_of_model(case: Case) -> Answer:
    split = case.model.split
    for name, degree in case.job.degrees.items():
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
