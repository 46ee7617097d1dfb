"""Compatibility rules of tensor, expert, context, sequence and pipeline parallelism, and of the world size."""

import math
from collections.abc import Collection
from typing import Any

from toolkit.files.documents import read_table
from toolkit.models.attention import AUTO
from toolkit.models.lora import ALL_LINEAR, RENAMED_TARGETS
from toolkit.models.split import types_with_plan
from toolkit.parallel.layout import DEFAULT_REPLICAS, NAMES, SAME_ROWS
from toolkit.presets.compatibility import Answers, Case, job_answer, method_answer, preset_answer
from toolkit.presets.spec import PresetSpec

RULES: dict[str, dict[str, Any]] = read_table(__file__, "rules")


def next_world_size(preset: PresetSpec, world_size: int) -> int:
    """Return the smallest supported world size from `world_size` on, or the largest one below."""
    up = max(preset.min_world_size, world_size + -world_size % preset.world_size_multiple)
    return up if preset.max_world_size is None else min(up, preset.max_world_size)


def world_size(case: Case, preset: PresetSpec) -> Answers:
    world_size = case.world_size
    # A plain launch may choose another, for example FSDP2 in one process.
    if world_size is None or case.purpose == "launched":
        return
    otherwise = ""
    if world_size < preset.min_world_size:
        why, otherwise = f"needs at least {preset.min_world_size} processes", ", or `--preset ddp` for fewer"
    elif preset.max_world_size is not None and world_size > preset.max_world_size:
        why, otherwise = "trains in one process", ", or `--preset ddp` for several"
    elif world_size % preset.world_size_multiple:
        why = f"needs a multiple of {preset.world_size_multiple} processes"
    else:
        return
    message, hint = _world_size_message(case, why, next_world_size(preset, world_size))
    yield why, message, hint if case.purpose == "script" else hint + otherwise


def _world_size_message(case: Case, why: str, instead: int) -> tuple[str, str]:
    assert case.preset is not None
    given, hint = f"--num-processes is {case.world_size}", f"`--num-processes {instead}`"
    if case.purpose == "script":
        given = f"this script was started in {case.world_size}"
        hint = f"`torchrun --nproc_per_node {instead} script.py`"
    elif case.purpose in ("train", "convert"):
        given = f"got {case.world_size}"
    elif case.purpose == "cluster":
        given = f"--nodes x --gpus-per-node is {case.world_size}"
        hint = f"choose them so that their product is {instead}"
    return f"preset {case.preset.name!r} {why}, {given}", hint


def missing_degree(preset: PresetSpec, given: Collection[str]) -> str | None:
    """Return the first dimension of the preset whose degree a run must name, and which is not among the given ones."""
    return next((name for name in preset.degrees if name not in given), None)


def needs_degree(name: str, option: str) -> str:
    return f"needs {option}: the number of GPUs for {NAMES[name]}"


def degree_given(case: Case) -> Answers:
    """A run of the toolkit asks for it before it asks here, with `check_degrees_given`."""
    name = None if case.preset is None else missing_degree(case.preset, case.job.degrees)
    if case.preset is not None and name is not None and case.purpose in ("plan", "recommend"):
        option = case.option(name)
        yield preset_answer(case.preset, needs_degree(name, option), f"add `{option} 2`")


def degree_of_preset(case: Case) -> Answers:
    preset = case.preset
    for name, degree in case.job.degrees.items():
        typed = case.degree(name, degree)
        if degree < 1:
            option = name if case.purpose == "script" else case.option(name)
            yield job_answer(f"{option} is {degree}, expected 1 or more", None)
        elif preset is not None and degree > 1 and name not in preset.parallel:
            why = f"it has no {NAMES[name]}"
            yield why, f"{typed} does not work under preset {preset.name!r}: {why}", RULES["presets_of_degree"][name]
        elif preset is not None and degree == 1 and name in RULES["whole_sequences"] and name in preset.parallel:
            yield job_answer(f"{typed} under preset {preset.name!r} divides nothing", RULES["whole_sequences"][name])


def degree_world_size(case: Case, preset: PresetSpec) -> Answers:
    """The ranks must divide into whole groups, and leave as many for data parallelism as the preset needs."""
    world_size, degrees = case.world_size, case.job.degrees
    if world_size is None or not preset.parallel or not degrees:
        return
    inner = math.prod(degrees.get(name, 1) for name in preset.parallel if name in SAME_ROWS)
    outer = 2 if {"dp_shard", "tp"} <= set(preset.parallel) else 1
    if {"dp_shard", "dp_replicate"} <= set(preset.parallel):
        outer = 2 * degrees.get("dp_replicate", DEFAULT_REPLICAS)
    multiple = inner * max(1, outer // 2)
    if world_size < inner * outer or world_size % multiple:
        groups = " x ".join(f"{name} {degrees[name]}" for name in preset.parallel if name in degrees)
        instead = max(inner * outer, world_size - world_size % multiple)
        why = f"with {groups} needs a multiple of {multiple} processes, {inner * outer} or more"
        yield why, *_world_size_message(case, why, instead)
        return
    layout = preset.layout(world_size, degrees)
    if layout is None or layout.ep == 1:
        return
    ranks = layout.dp_shard * layout.tp
    fitting = [ep for ep in range(2, ranks + 1) if ep % layout.tp == 0 and ranks % ep == 0]
    if layout.ep not in fitting:
        ep = case.degree("ep", layout.ep)
        why = f"{ep} does not divide the {ranks} processes"
        if layout.ep % layout.tp:
            why = f"{ep} is no multiple of {case.degree('tp', layout.tp)}"
        closest = min(fitting, key=lambda ep: abs(ep - layout.ep))
        yield job_answer(why, f"`{case.degree('ep', closest)}`")


def sequence_parallel_stage(case: Case) -> Answers:
    preset = case.preset
    if preset is not None and "sp" in preset.parallel and not preset.shards_parameters:
        why = "makes gradients sp times too large: below stage 3 ZeRO sums those of a sequence's parts"
        yield preset_answer(preset, why, "`--preset ulysses`, or stage 3 in its JSON")


def degree_planned(case: Case) -> Answers:
    split, preset, job = case.model.split, case.preset, case.job
    if split is None or preset is None or case.purpose not in ("plan", "recommend"):
        return
    for name, degree in job.degrees.items():
        if degree > 1 and name in split.not_planned:
            why = f"{case.option(name)} is not planned for {split.model_type}: {split.not_planned[name]}"
            yield job_answer(why, "`--cp` and `--sp` are planned, or `--preset fsdp2`")
    if job.is_lora and preset.sharded_at_load and "lora" in split.not_planned:
        why = f"LoRA on {split.model_type} is not planned under preset {preset.name!r}: {split.not_planned['lora']}"
        yield job_answer(why, "`--lora-target-modules q_proj`, or `--preset fsdp2`")


def lora_of_experts(case: Case) -> Answers:
    """peft gives the fused experts of some architectures adapters, which it cannot divide with them."""
    split, job = case.model.split, case.job
    renamed = {} if split is None else RENAMED_TARGETS.get(split.model_type, {})
    degree = next((name for name in ("ep", "tp") if job.degrees.get(name, 1) > 1), None)
    if job.is_lora and degree and renamed and {*ALL_LINEAR, *renamed} & {*job.lora_target_modules}:
        why = f"LoRA on the experts does not work with {case.option(degree)}: peft's adapters are not divided with them"
        yield job_answer(why, f"`{case.option('lora_target_modules')} q_proj k_proj v_proj o_proj`")


def parallel_method(case: Case, preset: PresetSpec) -> Answers:
    job = case.job
    if not preset.parallel:
        return
    in_stages, at_load = "pp" in preset.parallel, preset.sharded_at_load
    also = "not_in_stages" if in_stages else "not_at_load" if at_load else "not_with_sequences"
    for name, (because, hint) in (RULES["not_split"] | RULES[also]).items():
        if case.uses(name):
            yield method_answer(case, name, because, hint)
    if job.loss == "chunked" and {"tp", "pp"} & set(preset.degrees):
        why = "the chunked loss was never run on a stage" if in_stages else "the head is split over ranks"
        yield method_answer(case, "loss chunked", why, "leave `--loss` out: it is `full` here")
    attention, hint = f"attn_implementation {job.attn_implementation}", f"`{case.option('attn_implementation sdpa')}`"
    if "sp" in preset.parallel and job.attn_implementation in ("eager", "flex_attention"):
        why = "heads are exchanged in front of SDPA and flash attention only"
        yield method_answer(case, attention, why, hint)
    if "cp" in preset.parallel and job.attn_implementation not in (None, AUTO, "sdpa"):
        yield method_answer(case, attention, "ring attention replaces SDPA", hint)


def pipeline_schedule(case: Case) -> Answers:
    """The order of the stages must suit their number, the accumulation steps and the model's layers."""
    preset, job = case.preset, case.job
    if preset is not None and "pp" not in preset.parallel:
        for name in ("pipeline_schedule", "pipeline_chunks"):
            if getattr(job, name) is not None:
                yield method_answer(case, name, "it has no pipeline", RULES["presets_of_degree"]["pp"])
        return
    settings = job.pipeline
    if settings is None or case.purpose in ("script", "convert", "recommend"):  # accumulation steps are not known
        return
    if job.pipeline_chunks is not None and job.pipeline_chunks < 1:
        yield job_answer(f"{case.option('pipeline_chunks')} is {job.pipeline_chunks}, expected 1 or more", None)
        return
    layers = None if case.model.split is None else case.model.split.sizes.get("num_hidden_layers")
    problem = settings.problem(micro_batches=job.gradient_accumulation_steps, layers=layers)
    if problem is not None:
        yield job_answer(*problem)


def pipeline_purpose(case: Case, preset: PresetSpec) -> Answers:
    if "pp" not in preset.parallel:
        return
    if case.purpose == "script":
        why = "runs in the toolkit's own loop: the Trainer computes whole models"
        yield preset_answer(preset, why, "`toolkit train --preset pipeline_1f1b`, or another preset here")
    if case.purpose == "convert":
        why = "reads checkpoints of the same stages only"
        yield preset_answer(preset, why, "start from the checkpoint's weights: it is a model folder")


def degree_of_model(case: Case) -> Answers:
    split = case.model.split
    for name, degree in case.job.degrees.items():
        because = None if split is None or name == "dp_replicate" or degree == 1 else split.why_not(name, degree)
        if split is None or because is None:
            continue
        nearest_degree, hint = split.nearest(name, degree), "`--preset fsdp2`"
        if nearest_degree is not None:
            hint = f"`{case.option(name)} {nearest_degree}`"
        elif name == "pp":
            hint = "`--preset fsdp2` shards every architecture"
        elif name in ("tp", "ep") and name not in split.plans and case.purpose != "recommend":  # it shows no hints
            others = ", ".join(types_with_plan(name)[:200])  # reads every architecture's source
            hint = f"transformers has plans for {others}" if others else hint
        yield job_answer(f"{case.option(name)} {degree} does not work for this model: {because}", hint)
