"""Each preset at its best for a job: the largest micro-batch that fits, with or without activation checkpointing.

Also here, since simulations need it too: why a preset is refused or does not fit.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.job.accumulation import WHOLE
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import DEFAULT_REPLICAS, NAMES
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import FITS, TOO_CLOSE, MemoryPlan, memory_verdict, plan_memory
from toolkit.plan.methods import Method, not_planned
from toolkit.plan.planned_job import PlannedJob, with_workspaces
from toolkit.plan.step_time import MeasuredStep, StepTime, speed_row, step_time
from toolkit.plan.training_setup import TrainingSetup
from toolkit.presets.compatibility import Device, Purpose
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import Known, unsupported
from toolkit.units import GIB, percent, tenths_of_gib

# Of 237 pairs of published rows with the same model, GPU and method and another preset, 89 % have a ratio of speeds
# that is planned within 15 % (tests/plan/test_step_time.py): what a plan does not know of a GPU cancels.
EQUAL_WITHIN = 1.15
LARGEST_WORLD_SIZE = 1024  # of those that are searched
OBJECTIVES = ("fastest", "least-memory")
DEFAULT_GLOBAL_BATCH = 32  # sequences; rounded up to what the GPUs can share
NOT_NEEDED = "is for layers, experts or sequences that do not fit with data parallelism alone, which does here"


def default_global_batch(method: Method, world_size: int) -> int:
    """Return the sequences of a step where nobody says: 32, rounded up to what GPUs and generations can share.

    >>> default_global_batch(Method(), 24), default_global_batch(Method(method="grpo"), 12)
    (48, 48)
    """
    unit = math.lcm(world_size * method.smallest_batch, (method.num_generations or method.spec.num_generations) or 1)
    return -(-DEFAULT_GLOBAL_BATCH // unit) * unit


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A job on a model and a GPU, with what is known of the nodes, and what of its batch is to be found."""

    shape: ModelShape
    gpu: Gpu
    job: PlannedJob
    host_memory_bytes: int | None = None  # host memory of one node; None: what is typical for its GPUs
    measured: MeasuredStep | None = None  # step of a run on such GPUs, which calibrates the speeds
    accumulation: int | None = None  # accumulation steps; None: those that fill the global batch
    checkpointing: tuple[bool, ...] = (False, True)  # activation checkpointing that may be chosen


@dataclass(frozen=True, kw_only=True)
class RecommendRequest(PlannedModel):
    """What to train and on which hardware, with the model and GPU resolved."""

    world_size: int
    global_batch_size: int  # sequences per optimizer step, over all GPUs and accumulation steps
    network_bytes_per_second: int | None = None
    nvme_bytes_per_second: int | None = None
    """Disks of a node; None: it has none, and presets that need one are left out."""
    data_parallel_size: int | None = None  # GPUs, or groups of GPUs, that train on different rows; None: each of them

    def __post_init__(self) -> None:
        if self.global_batch_size % self.world_size:
            multiple = math.ceil(self.global_batch_size / self.world_size) * self.world_size
            raise ToolkitError(
                f"--global-batch-size {self.global_batch_size} is not divisible by {self.world_size} GPUs",
                hint=f"`--global-batch-size {multiple}`",
            )

    @property
    def interconnect(self) -> Interconnect:
        """The GPUs and what connects them."""
        made = Interconnect(gpu=self.gpu, world_size=self.world_size, gpus_per_node=self.job.gpus_per_node)
        return replace(made, network_bytes_per_second=self.network_bytes_per_second)

    def step_time(self, setup: TrainingSetup) -> StepTime | None:
        """Return the planned times of a setup on such GPUs, as many as it has; None if their peak is unknown."""
        interconnect = replace(self.interconnect, world_size=setup.world_size)
        return step_time(setup, interconnect, nvme_bytes_per_second=self.nvme_bytes_per_second, measured=self.measured)

    @property
    def node_memory_bytes(self) -> int:
        """Host memory of a node: as given, or what is typical for its GPUs."""
        gpus = min(self.world_size, self.job.gpus_per_node)
        return self.host_memory_bytes or gpus * self.gpu.host_memory[0] * GIB

    @property
    def sequences_per_group(self) -> int:
        """Sequences of a step for a GPU, or for the group of GPUs that train on the same rows."""
        return self.global_batch_size // (self.data_parallel_size or self.world_size)

    @property
    def micro_batches(self) -> list[int]:
        """Divisors of a group's sequences, ascending; those that fill a pipeline."""
        share, pipeline = self.sequences_per_group, self.job.pipeline
        smallest = self.job.method.smallest_batch
        sizes = [size for size in range(smallest, share + 1) if share % size == 0] or [smallest]
        if pipeline is None:
            return sizes
        return [size for size in sizes if not pipeline.problem(micro_batches=self.steps_of(size))] or [smallest]

    def steps_of(self, micro_batch: int) -> int:
        """Return the accumulation steps with a micro-batch."""
        return self.accumulation or max(self.sequences_per_group // micro_batch, 1)

    def job_with(self, *, micro_batch: int, checkpointing: bool) -> PlannedJob:
        """Return the job with micro-batch, accumulation steps and activation checkpointing filled in."""
        return replace(
            self.job,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=self.steps_of(micro_batch),
            activation_checkpointing=checkpointing,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A preset with its micro-batch, accumulation and checkpointing, and the plan for it."""

    request: RecommendRequest
    setup: TrainingSetup
    memory: MemoryPlan

    @property
    def verdict(self) -> str:
        """Verdict for GPU and host: `fits`, `too_close` or `does_not_fit`."""
        gpu, host = self.request.gpu.memory_bytes, self.request.node_memory_bytes
        return memory_verdict(self.memory, memory_bytes=gpu, host_bytes=host)

    @property
    def peak_text(self) -> str:
        """Planned and possible peak, and what the GPU has, for people; above that, there is no range."""
        plan, gpu_bytes = self.memory, self.request.gpu.memory_bytes
        possible, more, reason = plan.possible_peak_bytes, "", f"margin: {plan.margin.reason}"
        if plan.least_peak_bytes > gpu_bytes and self.verdict == TOO_CLOSE:
            more = f" planned, from {tenths_of_gib(plan.lowest_peak_bytes)} possible,"
            if plan.least_reading is not None:
                reason = "with shorter rows, unless `--equal-lengths`, and a plan 15 % too high"
        elif plan.least_peak_bytes <= gpu_bytes:
            more = f" planned, up to {tenths_of_gib(possible)} possible," if possible else " planned"
            if possible is not None and possible <= gpu_bytes and plan.other and self.verdict == TOO_CLOSE:
                reason = plan.other.text
        source = self.request.shape.activations_from
        wide = self.verdict == TOO_CLOSE or source == "llama" or (more and source == "family")
        why = f" ({reason})" if wide and not self.host_refusal else ""
        return f"{tenths_of_gib(plan.planned_peak_bytes)} GiB{more} of {tenths_of_gib(gpu_bytes)}{why}"

    @property
    def host_refusal(self) -> str | None:
        """Why the node's host memory is too small; None if it is not."""
        needed, host = self.memory.host.peak_bytes, self.request.node_memory_bytes
        sizes = f"{tenths_of_gib(needed)} GiB of host memory per node, which has {tenths_of_gib(host)}"
        least = self.memory.least_host_bytes if needed > host else host
        unlocked = f", or {tenths_of_gib(least)} that is not page-locked" if least < needed else ""
        return f"needs {sizes}{unlocked}" if needed > host else None

    @property
    def preset(self) -> PresetSpec:
        """The preset."""
        return self.setup.preset

    @property
    def job(self) -> PlannedJob:
        """The job with micro-batch, accumulation and activation checkpointing."""
        return self.setup.job

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.setup.world_size

    @cached_property
    def speed(self) -> StepTime | None:
        """Planned times; None if the GPU's peak is unknown."""
        return self.request.step_time(self.setup)

    @property
    def ranks_per_batch(self) -> int:
        """GPUs that train on the same rows."""
        return 1 if self.setup.layout is None else self.setup.layout.ranks_per_batch

    @property
    def fits(self) -> bool:
        """True if the candidate can be chosen."""
        return self.verdict == FITS

    def as_row(self) -> dict[str, Any]:
        """Return what `toolkit plan` and `toolkit recommend` both print with `--json`."""
        job, memory = self.job, self.memory
        return {
            "preset": self.preset.name,
            "per_device_train_batch_size": job.per_device_train_batch_size,
            "gradient_accumulation_steps": job.gradient_accumulation_steps,
            "accumulate": job.accumulate_under(self.preset),
            "activation_checkpointing": job.activation_checkpointing,
            "verdict": self.verdict,
            "planned_peak_bytes": memory.planned_peak_bytes,
            "possible_peak_bytes": memory.possible_peak_bytes,
            "depends_on": memory.other.option if memory.other and self.verdict == TOO_CLOSE else None,
            "headroom_bytes": self.request.gpu.memory_bytes - memory.planned_peak_bytes,
            "host_bytes": memory.host.peak_bytes,
            "disk_bytes": memory.host.disk_bytes,
            **speed_row(self.speed),
        }

    @property
    def settings(self) -> str:
        """Batch, accumulation and checkpointing, for people."""
        degrees = "".join(f"{name} {degree}, " for name, degree in self.job.degrees.items())
        text = f"{degrees}per-GPU batch {self.job.per_device_train_batch_size}"
        if self.job.gradient_accumulation_steps > 1:
            text += f", accumulation {self.job.gradient_accumulation_steps}"
        if self.preset.traits.chooses_accumulation and self.job.keeps_whole_gradients:
            text += " of whole gradients"
        return text + (", activation checkpointing" if self.job.activation_checkpointing else "")

    @property
    def seconds(self) -> float:
        """Best estimate of the step; 1 without a known peak, so that all candidates are equal."""
        return 1.0 if self.speed is None else self.speed.estimate_seconds

    def time_ratios(self, other: Candidate) -> tuple[float, float]:
        """Return this step time over the other's, both at the best rates and both at the worst.

        How fast the GPU computes is the same in both, and what is wrong about it cancels.
        """
        if self.speed is None or other.speed is None:
            return 1.0, 1.0
        own, others = self.speed.seconds_at_ends, other.speed.seconds_at_ends
        return own[0] / others[0], own[1] / others[1]


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def best_candidates(
    request: RecommendRequest, presets: Iterable[PresetSpec], *, purpose: Purpose = "recommend"
) -> list[Candidate]:
    """Return one candidate per preset that supports the job and world size, whether it fits or not.

    A preset with degrees of parallelism has its best ones.
    """
    best = []
    for preset in presets:
        layouts = [divided for divided in divided_requests(request, preset) if not refusal(divided, preset, purpose)]
        best += [_better([best_candidate(divided, preset) for divided in layouts])] if layouts else []
    return best


def divided_requests(request: RecommendRequest, preset: PresetSpec) -> list[RecommendRequest]:
    """Return the request with every combination of degrees worth a plan.

    They are powers of two that stay within a node; a pipeline, which sends little, may cross nodes.
    """
    if not preset.degrees:
        return [request]
    inside = min(request.world_size, request.job.gpus_per_node)
    largest = [request.world_size if name == "pp" else inside for name in preset.degrees]
    powers = [[2**power for power in range(1, 11) if 2**power <= size] for size in largest]
    requests = []
    for degrees in itertools.product(*powers):
        chosen = dict(zip(preset.degrees, degrees, strict=True))
        if {"dp_replicate", "dp_shard"} <= set(preset.parallel):
            chosen["dp_replicate"] = max(DEFAULT_REPLICAS, request.interconnect.num_nodes)
        divided = divided_request(request, preset, chosen)
        requests += [divided] if divided.data_parallel_size else []
    return requests


def divided_request(request: RecommendRequest, preset: PresetSpec, degrees: Mapping[str, int]) -> RecommendRequest:
    """Return the request with these degrees of parallelism; the request itself where there are none."""
    layout = preset.layout(request.world_size, degrees)
    if layout is None:
        return request
    job = replace(request.job, **degrees)  # type: ignore[arg-type]
    return replace(request, job=job, data_parallel_size=layout.data_parallel_size)


def refusal(request: RecommendRequest, preset: PresetSpec, purpose: Purpose = "recommend") -> str | None:
    """Return the reason that rules a preset out before anything is planned, or None."""
    device = Device(
        name=request.gpu.name,
        has_bf16=request.job.numerics.fp16
        or request.gpu.peak_flops("fp16") is None
        or request.gpu.peak_flops("bf16") is not None,
        has_nvme=request.nvme_bytes_per_second is not None,
    )
    # the accumulation steps are to be found: any number that suits the stages
    job = replace(request.job.as_trained, gradient_accumulation_steps=request.job.pp or 1)
    limits = request.job.limits_on(request.shape)
    known: Known = {"world_size": request.world_size, "device": device, "model": limits, "purpose": purpose}
    reason = not_planned(request.job.method, preset) or unsupported(preset, job, **known)
    return None if reason is None else reason.why


def best_candidate(request: RecommendRequest, preset: PresetSpec) -> Candidate:
    """Return the best with sharded gradients, unless a plan can tell that FSDP2 with whole ones is faster.

    Those are summed in bf16, and shards in fp32, so a difference within a plan's precision is no reason.
    """
    best = _fastest(request, preset)
    could_wait = best.fits and best.job.gradient_accumulation_steps > 1
    if not preset.traits.chooses_accumulation or request.job.accumulate is not None or not could_wait:
        return best
    whole = _fastest(replace(request, job=replace(request.job, accumulate=WHOLE)), preset)
    is_faster = whole.fits and whole.job.keeps_whole_gradients and min(best.time_ratios(whole)) > EQUAL_WITHIN
    return whole if is_faster else best


def _fastest(request: RecommendRequest, preset: PresetSpec) -> Candidate:
    """With or without checkpointing, which is slower where all sequences fit into one micro-batch without it."""
    found: list[Candidate] = []
    for checkpointing in request.checkpointing:
        if not found or not found[0].fits or found[0].job.gradient_accumulation_steps > 1:
            found.append(largest_candidate(request, preset, checkpointing=checkpointing))
    return _better(found)


def _better(candidates: Sequence[Candidate]) -> Candidate:
    fitting = [candidate for candidate in candidates if candidate.fits]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.seconds)
    return min(candidates, key=lambda candidate: candidate.memory.planned_peak_bytes)


def best_first(fitting: Sequence[AnyCandidate], objective: str = OBJECTIVES[0]) -> list[AnyCandidate]:
    """Return those as fast as the fastest first, as far as plans tell, the least sharded of them at the front.

    Packed 4-bit weights cross PCIe in little planned time, and none of it has been measured: candidates that keep them
    in host memory come last.
    """
    resident = [candidate for candidate in fitting if candidate.preset.offload_param is None]
    if fitting[0].job.load_in_4bit and 0 < len(resident) < len(fitting):
        offloaded = [candidate for candidate in fitting if candidate not in resident]
        return best_first(resident, objective) + best_first(offloaded, objective)
    if objective == OBJECTIVES[1]:
        return sorted(fitting, key=lambda candidate: (candidate.memory.planned_peak_bytes, candidate.seconds))
    fastest = min(fitting, key=lambda candidate: candidate.seconds)
    equal = [candidate for candidate in fitting if may_be_as_fast(candidate, fastest)]
    slower = [candidate for candidate in fitting if candidate not in equal]
    return sorted(equal, key=sharding) + sorted(slower, key=lambda candidate: candidate.seconds)


def may_be_as_fast(candidate: Candidate, fastest: Candidate) -> bool:
    """Return True within `EQUAL_WITHIN`, or where the candidate is as clearly the faster one at another end.

    The ends are those of the rates, and the slow one of the intervals, which offload widens for one of the two.
    """
    ratios = candidate.time_ratios(fastest)
    if candidate.speed is None or fastest.speed is None or max(ratios) <= EQUAL_WITHIN:
        return True
    slow_ends = candidate.speed.step_seconds[1] / fastest.speed.step_seconds[1]
    return min(*ratios, slow_ends) < 1 / EQUAL_WITHIN


def tolerance_text(choice: Candidate, fitting: Sequence[Candidate], objective: str = OBJECTIVES[0]) -> str:
    """Return the rule of `best_first` by which one of several candidates was chosen, for people."""
    if objective == OBJECTIVES[1]:
        return "it needs the least memory per GPU"
    if choice.speed is None:
        return "it shards and offloads least; `--gpu-tflops` plans speeds too"
    if len(fitting) == 1:
        return "it is the only one that fits"
    stays = choice.job.load_in_4bit and choice.preset.offload_param is None
    compared = [each for each in fitting if each.preset.offload_param is None] if stays else fitting
    fastest = min(compared, key=lambda candidate: candidate.seconds)
    if fastest is choice:
        return f"it is the fastest{' that keeps the weights on the GPU' if len(compared) < len(fitting) else ''}"
    if max(choice.time_ratios(fastest)) > EQUAL_WITHIN:
        return f"it may be faster than the fastest by estimate (`{fastest.preset.name}`), and shards least"
    return f"it is within {percent(EQUAL_WITHIN - 1)} of the fastest (`{fastest.preset.name}`), and shards least"


def sharding(candidate: Candidate) -> tuple[int, int, int, bool, float, str]:
    """Return offloads, dimensions beside data parallelism, sharded parts, hybrid sharding; then seconds."""
    preset = candidate.preset
    cost = {None: 0, "cpu": 1, "nvme": 2}
    offloads = cost[preset.offload_optimizer] + cost[preset.offload_param]
    hybrid = preset.sharding == "hybrid_shard"
    return offloads, len(preset.degrees), len(preset.sharded_parts), hybrid, candidate.seconds, preset.name


def largest_candidate(request: RecommendRequest, preset: PresetSpec, *, checkpointing: bool) -> Candidate:
    """Return the candidate with the largest micro-batch that fits, or with the smallest one if none fits."""
    sizes = request.micro_batches

    @cache
    def planned(size: int) -> Candidate:
        return candidate_of(request, preset, request.job_with(micro_batch=size, checkpointing=checkpointing))

    return planned(sizes[max(bisect.bisect_left(sizes, True, key=lambda size: not planned(size).fits) - 1, 0)])


def candidate_of(request: RecommendRequest, preset: PresetSpec, job: PlannedJob) -> Candidate:
    """Return the candidate of a job whose micro-batch, accumulation and checkpointing are known."""
    shape, job = job.method.model(request.shape), with_workspaces(job, request.gpu)
    setup = TrainingSetup(shape=shape, preset=preset, world_size=request.world_size, job=job)
    memory = plan_memory(request.shape, preset, world_size=request.world_size, job=job)
    return Candidate(request=request, setup=setup, memory=memory)


def host_assumption(request: RecommendRequest) -> str:
    """Return how much host memory a node is assumed to have, and why."""
    per_gpu, source = request.gpu.host_memory
    node = f"{request.node_memory_bytes / GIB:,.0f} GiB per node"
    return f"{node} assumed, {per_gpu} per GPU ({source}); `--host-memory-gib` sets it"


class NothingFits(ToolkitError):
    """No preset fits on the GPUs, or none is for them."""


def memory_refusal(candidate: Candidate) -> str:
    """Return why a candidate that does not fit does not, with its bytes: `it does not fit: ...`."""
    if candidate.host_refusal is not None:
        return f"it {candidate.host_refusal}"
    verdict = "it is too close to call" if candidate.verdict == TOO_CLOSE else "it does not fit"
    return f"{verdict}: {candidate.peak_text} ({candidate.settings})"


def why_refused(request: RecommendRequest, preset: PresetSpec, *, purpose: Purpose = "recommend") -> str | None:
    """Return the reason against every layout of a preset; where one was not considered, the reason for that."""
    refusals = [refusal(divided, preset, purpose) for divided in divided_requests(request, preset)]
    if not refusals:
        return f"needs GPUs for {' and '.join(NAMES[name] for name in preset.degrees)}"
    if all(refusals):
        return refusals[0]
    return NOT_NEEDED if preset.degrees else None
