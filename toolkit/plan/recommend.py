"""`toolkit recommend`: the preset to use, with reasons that are numbers, from the plans of all presets.

There is no tree of rules. Of the presets that fit, each with its best micro-batch, the fastest sets the standard;
presets whose plans cannot be told apart from it count as equally fast, and of these the one that shards and offloads
least is chosen. Two presets share what a plan does not know (how fast this GPU and this interconnect really are), so
they are compared at the same end of their ranges and never across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.hardware.gpu_table import GIGA, chosen_gpu
from toolkit.hardware.gpus import visible_world_size
from toolkit.job.argument_values import check_word
from toolkit.models.read_model import check_unquantized, read_model
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
    why_refused,
)
from toolkit.plan.memory import FITS, memory_verdict
from toolkit.plan.methods import check_generations
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import PlannedJob, check_planned_job, check_size, check_world_size, node_memory, scaled
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB, gib

LARGEST_GLOBAL_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chosen preset, and the reasons against the others."""

    choice: Candidate
    others: tuple[Candidate, ...]  # all others that fit, the best first
    reasons: tuple[str, ...]
    why_not: dict[str, str]  # reason against every other preset, by name
    rule_of_thumb: str  # the preset that fits with the least sharding, regardless of speed


def recommend_request(model: str, options: RecommendOptions) -> RecommendRequest:
    """Return the request with model and GPU read. Raises ToolkitError for what cannot be read or trained."""
    check_word("--objective", options.objective, OBJECTIVES)
    check_unquantized(model)
    shape, job = read_model(model), PlannedJob.from_options(options, full_length=options.equal_lengths)
    # the micro-batch is to be found
    check_planned_job(replace(job, per_device_train_batch_size=job.method.smallest_batch), shape)
    world_size = visible_world_size() if options.num_processes is None else options.num_processes
    check_world_size(world_size)
    if options.global_batch_size is not None:
        check_size("--global-batch-size", options.global_batch_size, LARGEST_GLOBAL_BATCH)
    gpu = chosen_gpu(
        options.gpu,
        memory_gib=options.gpu_memory_gib,
        tflops=options.gpu_tflops,
        link_gb_per_second=options.gpu_link_gb_per_second,
    )
    global_batch_size = options.global_batch_size or default_global_batch(job.method, world_size)
    check_generations(job.method, global_batch_size)
    return RecommendRequest(
        shape=shape,
        gpu=gpu,
        world_size=world_size,
        global_batch_size=global_batch_size,
        job=replace(job, method=replace(job.method, gpu_memory_bytes=gpu.memory_bytes)),
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
            too_large = memory_refusal(request, candidate).removeprefix("it ").removeprefix("is ")
            why_not[candidate.preset.name] = _compared(candidate, choice) if candidate.fits else too_large
    why_not |= {name: reason for name, reason in refused.items() if reason is not None and name not in why_not}
    return Recommendation(
        choice=choice,
        others=tuple(others),
        reasons=tuple(_reasons(request, choice, fitting, rule_of_thumb)),
        why_not=why_not,
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
    request: RecommendRequest, choice: Candidate, fitting: list[Candidate], rule_of_thumb: Candidate
) -> list[str]:
    preset, peak, gpu = choice.preset, gib(choice.memory.planned_peak_bytes), gib(request.gpu.memory_bytes)
    reasons = [f"planned peak {peak} of {gpu} per GPU, in the {choice.memory.peak.phase}"]
    fastest = min(fitting, key=lambda candidate: candidate.seconds)
    if fastest is not choice and choice.speed is not None:
        reasons.append(f"{preset.name} takes {ratios_text(choice, fastest)} as long as {fastest.preset.name}")
    if choice.job.activation_checkpointing:
        divided = divided_request(request, preset, choice.job.degrees)
        without = largest_candidate(divided, preset, checkpointing=False)
        against = memory_refusal(request, without)
        if without.fits:
            against = f"({without.settings}) it takes {ratios_text(without, choice)} as long"
        reasons.append(f"without activation checkpointing {against}")
    if rule_of_thumb.preset.name != preset.name:
        compared = f"{rule_of_thumb.preset.name}: {_compared(rule_of_thumb, choice)}"
        reasons.append(f"the rule of thumb, the least sharding that fits, is {compared}")
    return reasons


def _compared(candidate: Candidate, choice: Candidate) -> str:
    """Time at both ends of the range, and memory, compared with the choice."""
    planned = f"{gib(candidate.memory.planned_peak_bytes)} per GPU ({candidate.settings})"
    if candidate.speed is None:
        return f"fits too, and shards or offloads more: {planned}"
    low, high = sorted(candidate.time_ratios(choice))
    text = f"{ratios_text(candidate, choice)} as long"
    if high <= EQUAL_WITHIN and low >= 1 / EQUAL_WITHIN:
        text += ", too close for the plan to separate"
    elif low < 1 < high:
        text += ", so faster or slower depending on the interconnect"
    advantages = _advantages(candidate, choice)
    return f"{text}{'; for it: ' if advantages else ''}{', '.join(advantages)}; {planned}"


def _advantages(candidate: Candidate, choice: Candidate) -> list[str]:
    """What speaks for a candidate that was not chosen: what it needs less of, from 1 GiB and 1 GB on."""
    own, chosen = candidate.memory, choice.memory
    saved = {"per GPU": chosen.planned_peak_bytes - own.planned_peak_bytes}
    saved["of host memory per node"] = chosen.host.peak_bytes - own.host.peak_bytes
    found = [f"{gib(size)} less {where}" for where, size in saved.items() if size >= GIB]
    if candidate.speed is not None and choice.speed is not None:
        unsent = choice.speed.communication_bytes_per_step - candidate.speed.communication_bytes_per_step
        found += [f"{unsent / GIGA:,.1f} GB less sent per step"] if unsent >= GIGA else []
    return found


def ratios_text(one: Candidate, other: Candidate) -> str:
    """Return the ratios of step times at both ends of the range, ascending, as `1.02 to 1.31 times`."""
    low, high = sorted(one.time_ratios(other))
    return f"{low:.2f} times" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f} times"


def _nothing_fits(request: RecommendRequest, presets: Sequence[PresetSpec], candidates: list[Candidate]) -> NothingFits:
    """The smallest candidate, and the next doubling of the GPUs on which something fits, or other ways to save."""
    hardware = f"{request.world_size} × {request.gpu.name}"
    if not candidates:
        reasons = "; ".join(f"{preset.name} {why_refused(request, preset)}" for preset in presets)
        return NothingFits(f"no preset is for {hardware}: {reasons}", hint="see `toolkit presets`")
    smallest = min(candidates, key=lambda each: (each.host_refusal is not None, each.memory.planned_peak_bytes))
    reason = memory_refusal(request, smallest).removeprefix("it ")
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
    """What fits on these GPUs: adapters, and an offload for which a node needs more memory than it has."""
    job, ways = request.job, []
    adapters = [] if job.is_lora else [("LoRA", "--lora-r 16", False)]
    adapters += [] if job.load_in_4bit else [("QLoRA", f"{'' if job.is_lora else '--lora-r 16 '}--load-in-4bit", True)]
    for name, flags, in_4bit in adapters:
        trained = replace(request, job=replace(job, lora_r=job.lora_r or 16, load_in_4bit=in_4bit))
        fitting = [candidate for candidate in _candidates(trained, presets) if candidate.fits]
        if fitting:
            best = best_first(fitting)[0]
            peak = gib(best.memory.planned_peak_bytes)
            ways.append(f"{name} fits here, {peak} per GPU with {best.preset.name}: `{flags}`")
    gpu_bytes = request.gpu.memory_bytes
    short = [each for each in candidates if memory_verdict(each.memory, memory_bytes=gpu_bytes) == FITS]
    if short:
        least = min(short, key=lambda each: each.memory.host.peak_bytes)
        needed = math.ceil(least.memory.host.peak_bytes / GIB)
        ways.append(f"with enough host memory {least.preset.name} fits: `--host-memory-gib {needed}`")
    return ways
