"""`toolkit recommend`: the preset to use, with reasons that are numbers, from the plans of all presets.

There is no tree of rules. Of the presets that fit, each with its best micro-batch, the fastest sets the standard;
presets whose plans cannot be told apart from it count as equally fast, and of these the one that shards and offloads
least is chosen. Two presets share what a plan does not know (how fast this GPU and this interconnect really are), so
they are compared at the same end of their ranges and never across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.hardware.gpu_table import GIGA, custom_gpu, named_or_visible_gpu
from toolkit.hardware.gpus import visible_world_size
from toolkit.models.read_model import check_unquantized, read_model
from toolkit.plan.candidates import (
    EQUAL_WITHIN,
    Candidate,
    NothingFits,
    RecommendRequest,
    best_candidates,
    divided_request,
    largest_candidate,
    memory_refusal,
    why_refused,
)
from toolkit.plan.methods import check_generations
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import PlannedJob, check_planned_job, check_size, check_world_size, scaled
from toolkit.plan.planner import LARGEST_WORLD_SIZE
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB, gib

OBJECTIVES = ("fastest", "least-memory")
DEFAULT_GLOBAL_BATCH = 32  # sequences; rounded up to a multiple of the GPUs
LARGEST_GLOBAL_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chosen preset, and the reasons against the others."""

    choice: Candidate
    others: tuple[Candidate, ...]  # the two next best that fit
    reasons: tuple[str, ...]
    why_not: dict[str, str]  # reason against every other preset, by name
    rule_of_thumb: str  # the preset that fits with the least sharding, regardless of speed


def recommend_request(model: str, options: RecommendOptions) -> RecommendRequest:
    """Return the request with model and GPU read. Raises ToolkitError for what cannot be read or trained."""
    if options.objective not in OBJECTIVES:
        raise ToolkitError(
            f"--objective is {options.objective!r}, expected {' or '.join(OBJECTIVES)}",
            hint=did_you_mean(options.objective, OBJECTIVES),
        )
    check_unquantized(model)
    shape, job = read_model(model), PlannedJob.from_options(options, full_length=options.equal_lengths)
    # the micro-batch is to be found
    check_planned_job(replace(job, per_device_train_batch_size=job.method.smallest_batch), shape)
    world_size = visible_world_size() if options.num_processes is None else options.num_processes
    check_world_size(world_size)
    if options.global_batch_size is not None:
        check_size("--global-batch-size", options.global_batch_size, LARGEST_GLOBAL_BATCH)
    gpu = custom_gpu(
        named_or_visible_gpu(options.gpu, has_memory=options.gpu_memory_gib is not None),
        memory_gib=options.gpu_memory_gib,
        tflops=options.gpu_tflops,
        link_gb_per_second=options.gpu_link_gb_per_second,
    )
    global_batch_size = options.global_batch_size or -(-DEFAULT_GLOBAL_BATCH // world_size) * world_size
    check_generations(job.method, global_batch_size)
    return RecommendRequest(
        shape=shape,
        gpu=gpu,
        world_size=world_size,
        global_batch_size=global_batch_size,
        job=replace(job, method=replace(job.method, gpu_memory_bytes=gpu.memory_bytes)),
        network_bytes_per_second=scaled("--network-gb-per-second", options.network_gb_per_second, GIGA),
        nvme_bytes_per_second=scaled("--nvme-gb-per-second", options.nvme_gb_per_second, GIGA),
        host_memory_bytes=scaled("--host-memory-gib", options.host_memory_gib, GIB),
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
    choice, *others = _best_first(fitting, objective)
    rule_of_thumb = min(fitting, key=_sharding)
    refused = {preset.name: why_refused(request, preset) for preset in presets if preset.name != choice.preset.name}
    why_not = {name: reason for name, reason in refused.items() if reason is not None}
    for candidate in candidates:
        if candidate is not choice:
            too_large = memory_refusal(request, candidate).removeprefix("it ").removeprefix("is ")
            why_not[candidate.preset.name] = _compared(candidate, choice) if candidate.fits else too_large
    return Recommendation(
        choice=choice,
        others=tuple(others[:2]),
        reasons=tuple(_reasons(request, choice, fitting, rule_of_thumb)),
        why_not=why_not,
        rule_of_thumb=rule_of_thumb.preset.name,
    )


def _candidates(request: RecommendRequest, presets: Sequence[PresetSpec]) -> list[Candidate]:
    """Candidates of data parallelism; where none fits without offload, also of presets that split layers or sequences.

    Data parallelism is simpler, and split layers and sequences cost communication in every layer.
    """
    simple = best_candidates(request, [preset for preset in presets if not preset.degrees])
    if any(each.fits and not (each.preset.offload_optimizer or each.preset.offload_param) for each in simple):
        return simple
    return simple + best_candidates(request, [preset for preset in presets if preset.degrees])


def _best_first(fitting: list[Candidate], objective: str) -> list[Candidate]:
    """Candidates as fast as the fastest come first, the least sharded of them at the front.

    Packed 4-bit weights cross PCIe in little planned time, and none of it has been measured: candidates that keep them
    in host memory come last.
    """
    resident = [candidate for candidate in fitting if candidate.preset.offload_param is None]
    if fitting[0].job.load_in_4bit and 0 < len(resident) < len(fitting):
        offloaded = [candidate for candidate in fitting if candidate not in resident]
        return _best_first(resident, objective) + _best_first(offloaded, objective)
    if objective == "least-memory":
        return sorted(fitting, key=lambda candidate: (candidate.memory.planned_peak_bytes, candidate.seconds))
    fastest = min(fitting, key=lambda candidate: candidate.seconds)
    equal = [candidate for candidate in fitting if max(candidate.time_ratios(fastest)) <= EQUAL_WITHIN]
    slower = [candidate for candidate in fitting if candidate not in equal]
    return sorted(equal, key=_sharding) + sorted(slower, key=lambda candidate: candidate.seconds)


def _sharding(candidate: Candidate) -> tuple[int, int, int, bool, float, str]:
    """Offloads, dimensions beside data parallelism, sharded parts, hybrid sharding; then seconds."""
    preset = candidate.preset
    cost = {None: 0, "cpu": 1, "nvme": 2}
    offloads = cost[preset.offload_optimizer] + cost[preset.offload_param]
    hybrid = preset.sharding == "hybrid_shard"
    return offloads, len(preset.degrees), len(preset.sharded_parts), hybrid, candidate.seconds, preset.name


def _reasons(
    request: RecommendRequest, choice: Candidate, fitting: list[Candidate], rule_of_thumb: Candidate
) -> list[str]:
    preset, peak, gpu = choice.preset, gib(choice.memory.planned_peak_bytes), gib(request.gpu.memory_bytes)
    reasons = [f"planned peak {peak} of {gpu} per GPU, in the {choice.memory.peak.phase}"]
    fastest = min(fitting, key=lambda candidate: candidate.seconds)
    if fastest is not choice and choice.speed is not None:
        reasons.append(f"{preset.name} takes {ratios_text(choice, fastest)} as long as {fastest.preset.name}")
    if request.host_memory_bytes is None and (preset.offload_optimizer or preset.offload_param):
        host = gib(choice.memory.host.peak_bytes)
        reasons.append(f"each node is assumed to have {host} of host memory (`--host-memory-gib` sets what it has)")
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
        text = f"no difference that a plan can tell ({text})"
    elif low < 1 < high:
        text += ", so faster or slower depending on the interconnect"
    return f"{text}; {planned}"


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
    adapters = "" if request.job.lora_r else "`--lora-r 16`, "
    hint, size = f"{adapters}a shorter `--max-seq-length`, or a larger GPU", 2 * request.world_size
    while size <= LARGEST_WORLD_SIZE:
        larger = replace(request, world_size=size, global_batch_size=-(-request.global_batch_size // size) * size)
        if any(candidate.fits for candidate in _candidates(larger, presets)):
            hint = f"`--num-processes {size}` fits"
            break
        size *= 2
    return NothingFits(f"nothing fits on {hardware}: {smallest.preset.name}, the smallest, {reason}", hint=hint)
