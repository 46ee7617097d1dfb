"""`toolkit recommend`: the preset to use, with reasons that are numbers, from the plans of all presets.

There is no tree of rules. Of the presets that fit, each with its best micro-batch, the fastest sets the standard;
presets whose plans cannot be told apart from it count as equally fast, and of these the one that shards and offloads
least is chosen. Two presets share what a plan does not know (how fast this GPU and this interconnect really are), so
they are compared at the same end of their ranges and never across.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.hardware.gpu_table import GIGA, chosen_gpu
from toolkit.hardware.gpus import visible_world_size
from toolkit.job.argument_values import check_word
from toolkit.job.job_checks import check_trained_optimizer
from toolkit.models.optimizers import DEFAULT_OPTIMIZER
from toolkit.models.read_model import model_and_gpu
from toolkit.plan.candidates import (
    EQUAL_WITHIN,
    LARGEST_WORLD_SIZE,
    OBJECTIVES,
    Candidate,
    NothingFits,
    RecommendRequest,
    best_candidates,
    best_first,
    default_global_batch,
    divided_request,
    largest_candidate,
    memory_refusal,
    sharding,
    tolerance_text,
    why_refused,
)
from toolkit.plan.memory import FITS, memory_verdict
from toolkit.plan.methods import check_generations
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import (
    PlannedJob,
    check_planned_job,
    check_size,
    check_world_size,
    node_memory,
    on_gpu,
    scaled,
)
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB, tenths_of_gib

LARGEST_GLOBAL_BATCH = 2**20
EIGHT_BIT = "adamw_8bit"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chosen preset, and the reasons against the others."""

    choice: Candidate
    others: tuple[Candidate, ...]  # all others that fit, the best first
    reasons: tuple[str, ...]
    why_not: dict[str, str]  # reason against every other preset, by name
    too_large: tuple[str, ...]  # those of them that were planned and do not fit
    instead: tuple[str, ...]  # what would fit on the GPUs, where the choice offloads
    rule_of_thumb: str  # the preset that fits with the least sharding, regardless of speed


def recommend_request(model: str, options: RecommendOptions) -> RecommendRequest:
    """Return the request with model and GPU read. Raises ToolkitError for what cannot be read or trained."""
    check_word("--objective", options.objective, OBJECTIVES)
    shape, gpu = model_and_gpu(
        model,
        lambda: chosen_gpu(
            options.gpu,
            memory_gib=options.gpu_memory_gib,
            tflops=options.gpu_tflops,
            link_gb_per_second=options.gpu_link_gb_per_second,
        ),
    )
    job = PlannedJob.from_options(options, full_length=options.equal_lengths)
    check_trained_optimizer(job.optim)
    # the micro-batch is to be found
    check_planned_job(replace(job, per_device_train_batch_size=job.method.smallest_batch), shape)
    world_size = visible_world_size() if options.num_processes is None else options.num_processes
    check_world_size(world_size)
    if options.global_batch_size is not None:
        check_size("--global-batch-size", options.global_batch_size, LARGEST_GLOBAL_BATCH)
    global_batch_size = options.global_batch_size or default_global_batch(job.method, world_size)
    check_generations(job.method, global_batch_size, num_processes=world_size)
    return RecommendRequest(
        shape=shape,
        gpu=gpu,
        world_size=world_size,
        global_batch_size=global_batch_size,
        job=on_gpu(job, gpu, fp16=options.fp16),
        network_bytes_per_second=scaled("--network-gb-per-second", options.network_gb_per_second, GIGA),
        nvme_bytes_per_second=scaled("--nvme-gb-per-second", options.nvme_gb_per_second, GIGA),
        host_memory_bytes=node_memory(options.host_memory_gib, options.gpu),
    )


def recommend(
    request: RecommendRequest, presets: Sequence[PresetSpec], *, objective: str = "fastest"
) -> Recommendation:
    """Return the recommendation for an objective, one of `OBJECTIVES`.

    Raises NothingFits if nothing does, with the smallest number of GPUs on which something does.
    """
    candidates = _candidates(request, presets)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise _nothing_fits(request, presets, candidates)
    choice, *others = best_first(fitting, objective)
    rule_of_thumb = min(fitting, key=sharding)
    refused = {preset.name: why_refused(request, preset) for preset in presets if preset.name != choice.preset.name}
    why_not: dict[str, str] = {}
    for candidate in sorted(candidates, key=lambda each: each.memory.planned_peak_bytes):
        if candidate is not choice:
            too_large = memory_refusal(candidate).removeprefix("it ").removeprefix("is ")
            why_not[candidate.preset.name] = _compared(candidate, choice) if candidate.fits else too_large
    why_not |= {name: reason for name, reason in refused.items() if reason is not None and name not in why_not}
    return Recommendation(
        choice=choice,
        others=tuple(others),
        reasons=tuple(_reasons(request, choice, fitting, rule_of_thumb, objective)),
        why_not=why_not,
        too_large=tuple(name for name in why_not if name in {each.preset.name for each in candidates if not each.fits}),
        instead=tuple(_other_trainings(request, presets, offloads=False)) if choice.preset.offloads else (),
        rule_of_thumb=rule_of_thumb.preset.name,
    )


def _candidates(request: RecommendRequest, presets: Sequence[PresetSpec]) -> list[Candidate]:
    """Candidates of data parallelism; where none fits without offload, also of presets that split layers or sequences.

    Data parallelism is simpler, and split layers and sequences cost communication in every layer.
    """
    simple = best_candidates(request, [preset for preset in presets if not preset.degrees])
    if any(each.fits and not each.preset.offloads for each in simple):
        return simple
    return simple + best_candidates(request, [preset for preset in presets if preset.degrees])


def _reasons(
    request: RecommendRequest, choice: Candidate, fitting: list[Candidate], rule_of_thumb: Candidate, objective: str
) -> list[str]:
    preset, recomputes = choice.preset, choice.job.activation_checkpointing
    reasons = [tolerance_text(choice, fitting, objective)]
    if recomputes or (len(request.checkpointing) > 1 and choice.job.gradient_accumulation_steps > 1):
        divided = divided_request(request, preset, choice.job.degrees)
        other = largest_candidate(divided, preset, checkpointing=not recomputes)
        against, batch = memory_refusal(other), other.settings.removesuffix(", activation checkpointing")
        if other.fits:
            against = f"({batch}) a step takes {ratios_text(other, choice)} as long"
        if recomputes or (other.fits and other.speed is not None):
            reasons.append(f"{'without' if recomputes else 'with'} activation checkpointing {against}")
    if rule_of_thumb.preset.name != preset.name:
        reasons.append(f"less sharding, `{rule_of_thumb.preset.name}`, takes {_compared(rule_of_thumb, choice)}")
    return reasons


def _compared(candidate: Candidate, choice: Candidate) -> str:
    """Time at both ends of the range, and memory, compared with the choice."""
    planned = f"{tenths_of_gib(candidate.memory.planned_peak_bytes)} GiB per GPU ({candidate.settings})"
    if candidate.speed is None:
        return f"fits too, and shards or offloads more: {planned}"
    low, high = sorted(candidate.time_ratios(choice))
    text = f"{ratios_text(candidate, choice)} the time of a step"
    if high <= EQUAL_WITHIN and low >= 1 / EQUAL_WITHIN:
        text += ", which a plan cannot tell apart"
    elif low < 1 < high:
        text += ", depending on the interconnect"
    return f"{text}; {planned}"


def ratios_text(one: Candidate, other: Candidate) -> str:
    """Return the ratios of step times at both ends of the range, ascending, as `1.02 to 1.31 times`."""
    low, high = sorted(one.time_ratios(other))
    return f"{low:.2f} times" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f} times"


def _nothing_fits(request: RecommendRequest, presets: Sequence[PresetSpec], candidates: list[Candidate]) -> NothingFits:
    """The smallest candidate, and the next doubling of the GPUs on which something fits, or other ways to save."""
    hardware = f"{request.world_size} x {request.gpu.name}"
    if not candidates:
        ((why, _),) = Counter(str(why_refused(request, preset)) for preset in presets).most_common(1)
        return NothingFits(f"no preset is for {hardware}: the usual one {why}", hint="see `toolkit presets`")
    smallest = min(candidates, key=lambda each: (each.host_refusal is not None, each.memory.planned_peak_bytes))
    reason = memory_refusal(smallest).removeprefix("it ")
    ways, size = _ways_here(request, presets, candidates), 2 * request.world_size
    while size <= LARGEST_WORLD_SIZE:
        larger = replace(request, world_size=size, global_batch_size=-(-request.global_batch_size // size) * size)
        if any(candidate.fits for candidate in _candidates(larger, presets)):
            ways.append(f"with more GPUs: `--num-processes {size}`")
            break
        size *= 2
    hint = "; ".join(ways) or "a shorter `--max-seq-length`, or a larger GPU"
    return NothingFits(f"nothing fits on {hardware}: {smallest.preset.name}, the smallest, {reason}", hint=hint)


def _ways_here(request: RecommendRequest, presets: Sequence[PresetSpec], candidates: list[Candidate]) -> list[str]:
    """What fits on these GPUs: other ways to train, and an offload for which a node needs more memory than it has."""
    ways = list(_other_trainings(request, presets))
    gpu_bytes = request.gpu.memory_bytes
    short = [each for each in candidates if memory_verdict(each.memory, memory_bytes=gpu_bytes) == FITS]
    if short:
        least = min(short, key=lambda each: each.memory.host.peak_bytes)
        needed = math.ceil(least.memory.host.peak_bytes / GIB)
        ways.append(f"with enough host memory {least.preset.name} fits: `--host-memory-gib {needed}`")
    return ways


def _other_trainings(
    request: RecommendRequest, presets: Sequence[PresetSpec], *, offloads: bool = True
) -> Iterator[str]:
    """Adapters and other optimizer states that fit on these GPUs; without `offloads` in the memory of the GPUs."""
    job = request.job
    others: list[tuple[str, str, dict[str, Any]]] = []
    if job.optim != DEFAULT_OPTIMIZER:
        others.append(("AdamW", f"--optim {DEFAULT_OPTIMIZER}", {"optim": DEFAULT_OPTIMIZER}))
    elif not job.is_lora:
        others.append(("AdamW with 8-bit states", f"--optim {EIGHT_BIT}", {"optim": EIGHT_BIT}))
    if not job.is_lora:
        others.append(("LoRA", "--lora-r 16", {"lora_r": 16}))
    if not job.load_in_4bit:
        flags = "--load-in-4bit" if job.is_lora else "--lora-r 16 --load-in-4bit"
        others.append(("QLoRA", flags, {"lora_r": job.lora_r or 16, "load_in_4bit": True}))
    for name, flags, changes in others:
        planned = _candidates(replace(request, job=replace(job, **changes)), presets)
        fitting = [each for each in planned if each.fits and (offloads or not each.preset.offloads)]
        if fitting:
            best = best_first(fitting)[0]
            where = f"{tenths_of_gib(best.memory.planned_peak_bytes)} GiB per GPU with `{best.preset.name}`"
            where += f", which {job.optim} excludes" if best.preset.offloads and "optim" in changes else ""
            yield f"{name} fits here, {where}: `{flags}`"
