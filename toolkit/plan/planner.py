"""`toolkit plan`: one plan per preset and world size, from memory, communication and step time.

request = plan_request("Qwen/Qwen3-8B", PlanOptions(num_processes=(8,), gpu="h100"))
plans = make_plans(request)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GPUS, Gpu, custom_gpu, find_gpu, named_or_visible_gpu
from toolkit.hardware.gpus import count_gpus, gpu_names, visible_world_size
from toolkit.job.job import Job
from toolkit.models.read_model import check_unquantized, read_model
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.candidates import EQUAL_WITHIN
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import DOES_NOT_FIT, FITS, PARTS, TOO_CLOSE, MemoryPlan, memory_verdict, plan_memory
from toolkit.plan.method_advice import method_advice
from toolkit.plan.methods import SFT, check_generations, not_planned
from toolkit.plan.model_states import job_weights
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob, TrainingSetup, check_planned_job, check_world_size, scaled
from toolkit.plan.step_time import DimensionTraffic, MeasuredStep, StepTime, dimension_traffic, speed_row, step_time
from toolkit.presets.compatibility import Reason
from toolkit.presets.preset import list_presets, load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import unsupported
from toolkit.units import GIB, gib

LARGEST_MICRO_BATCH = 4096
LARGEST_WORLD_SIZE = 1024
VERDICT_TEXT = {FITS: "fits", DOES_NOT_FIT: "does not fit", TOO_CLOSE: "too close to call"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan, with model, presets and GPU resolved."""

    shape: ModelShape
    presets: Sequence[PresetSpec]
    world_sizes: Sequence[int]
    job: PlannedJob
    gpu: Gpu
    host_memory_bytes: int | None = None  # host memory of a node; None: not part of the verdict
    measured: MeasuredStep | None = None  # step of a run on such GPUs, which calibrates the speeds
    strict: bool = True  # True: a preset that does not support a world size is an error; False: it is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of one preset at one world size."""

    preset: str
    world_size: int
    gpu: str
    verdict: str
    gpu_memory_bytes: int
    memory: MemoryPlan
    num_params: int
    num_trainable_params: int
    communication_bytes_per_step: int
    speed: StepTime | None  # None if the GPU's peak is unknown
    largest_micro_batch: int | None
    smallest_world_size: int | None
    traffic: tuple[DimensionTraffic, ...]  # what each GPU sends in a step, by dimension of the mesh
    layout: ParallelLayout | None = None  # how the ranks are divided; None for data parallelism alone
    accumulate: str | None = None
    """Gradients between accumulation steps: `sharded` or `whole`; None where there is one step."""
    method: str = SFT
    advice: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int:
        """Memory of the GPU that is left at the peak; negative if the plan does not fit."""
        return self.gpu_memory_bytes - self.memory.planned_peak_bytes

    @property
    def estimate_seconds(self) -> float | None:
        """Best estimate of a step; None if the GPU's peak is unknown."""
        return None if self.speed is None else self.speed.estimate_seconds

    @property
    def logits_fraction(self) -> float:
        """Share of the logits in what torch allocates at the peak."""
        return self.memory.peak.logits_bytes / max(self.memory.peak.allocated_bytes, 1)

    def as_row(self) -> dict[str, Any]:
        """Return the plan as `toolkit plan --json` prints it."""
        memory, peak, speed = self.memory, self.memory.peak, self.speed
        return {
            "preset": self.preset,
            "method": self.method,
            "world_size": self.world_size,
            "gpu": self.gpu,
            "verdict": self.verdict,
            "planned_peak_bytes": memory.planned_peak_bytes,
            "headroom_bytes": self.headroom_bytes,
            "allocated_peak_bytes": peak.allocated_bytes,
            "logits_fraction": self.logits_fraction,
            "num_params": self.num_params,
            "num_trainable_params": self.num_trainable_params,
            **{f"{part}_bytes": getattr(memory.states, f"{part}_bytes") for part in PARTS[:3]},
            **{f"{part}_bytes": getattr(peak, f"{part}_bytes") for part in PARTS[3:]},
            "overhead_bytes": memory.overhead_bytes,
            "host_bytes": memory.host.peak_bytes,
            "disk_bytes": memory.host.disk_bytes,
            "accumulate": self.accumulate,
            "peak_phase": peak.phase,
            "phases": {phase.phase: phase.as_row() for phase in memory.phases},
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_world_size": self.smallest_world_size,
            "communication_bytes_per_step": self.communication_bytes_per_step,
            "communication": [asdict(traffic) for traffic in self.traffic],
            "layout": None if self.layout is None else self.layout.degrees(),
            "advice": list(self.advice),
            **speed_row(speed),
        }


def asks_which_gpus(options: PlanOptions) -> bool:
    """Return True if no GPU is named, and none is visible."""
    named = any(each is not None for each in (options.gpu, options.gpu_memory_gib, options.gpu_tflops))
    return not named and not options.verify and count_gpus() == 0


def plan_request(model: str, options: PlanOptions) -> PlanRequest:
    """Return the request with model, presets and GPU read. Raises ToolkitError for what cannot be read.

    Where no GPU is named or visible, the GPU is the first of the table, and the world sizes are those of the options.
    """
    gpu = GPUS[0] if (any_gpu := asks_which_gpus(options)) else None
    gpu = gpu or named_or_visible_gpu(options.gpu, has_memory=options.gpu_memory_gib is not None)
    gpu = custom_gpu(gpu, memory_gib=options.gpu_memory_gib, tflops=options.gpu_tflops)
    host_bytes = scaled("--host-memory-gib", options.host_memory_gib, GIB)
    if options.packing and options.equal_lengths:
        raise ToolkitError("--equal-lengths has no effect with --packing: packed rows are full")
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    if options.verify and options.method != SFT:
        raise ToolkitError(f"--verify rehearses --method {SFT} only", hint="leave it out")
    if any_gpu and options.vllm == "colocate":
        raise ToolkitError("--vllm colocate takes a share of a GPU, and none is named", hint="add `--gpu h100`")
    check_unquantized(model)
    # a rehearsal's rows all have the full length
    job = PlannedJob.from_options(options, full_length=options.equal_lengths or options.verify)
    return PlanRequest(
        shape=read_model(model),
        presets=presets,
        world_sizes=sorted(set(options.num_processes)) or ([] if any_gpu else [visible_world_size()]),
        job=replace(job, method=replace(job.method, gpu_memory_bytes=gpu.memory_bytes)),
        gpu=gpu,
        host_memory_bytes=host_bytes,
        strict=bool(options.preset),
    )


def make_plans(request: PlanRequest) -> list[Plan]:
    """Return the plans by world size, then in the order of the presets.

    Raises ToolkitError for what cannot be trained: see `check_planned_job`, and the limits of each preset.
    """
    check_request(request)
    supported = []
    for world_size, preset in itertools.product(request.world_sizes, request.presets):
        reason = why_unsupported(request, preset, world_size)
        if reason is None:
            supported.append((preset, world_size))
        elif request.strict:
            raise ToolkitError(reason.message, hint=reason.hint)
    if not supported:
        sizes = ", ".join(map(str, request.world_sizes))
        raise ToolkitError(f"no preset trains this in {sizes} processes", hint="see `toolkit presets`")
    by_name = {preset.name: preset for preset, _ in supported}
    smallest = {name: _smallest_world_size(request, preset) for name, preset in by_name.items()}
    return [plan_of(request, preset, size, smallest[preset.name]) for preset, size in supported]


def check_request(request: PlanRequest) -> None:
    """Raise ToolkitError for a job that cannot be trained, and for world sizes out of range."""
    check_planned_job(request.job, request.shape)
    for world_size in request.world_sizes:
        check_world_size(world_size)
        completions = world_size * request.job.per_device_train_batch_size * request.job.gradient_accumulation_steps
        check_generations(request.job.method, completions)
        Interconnect(gpu=request.gpu, world_size=world_size, gpus_per_node=request.job.gpus_per_node)


def plan_run(preset: PresetSpec, job: Job, *, world_size: int, gpu: Gpu) -> Plan:
    """Return the plan for rows of full length on one node. Raises ToolkitError, with the reason, if there is none."""
    shape = read_model(str(job.model_name_or_path), count=False)
    request = PlanRequest(shape=shape, presets=[preset], world_sizes=[world_size], job=PlannedJob.of(job), gpu=gpu)
    return make_plans(request)[0]


def plan_run_here(
    preset: PresetSpec, job: Job, *, world_size: int, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the plan for this node's GPUs as a row of `toolkit plan --json`, or None if it cannot be planned.

    Passes one line about the plan, or the reason for which there is none, to `say`.
    """
    try:
        names = sorted(set(gpu_names()))
        if len(names) != 1:
            raise ToolkitError(f"the GPUs of this node are {', '.join(names) or 'not known to nvidia-smi'}")
        plan = plan_run(preset, job, world_size=world_size, gpu=find_gpu(names[0]))
    except ToolkitError as error:
        say(f"not planned: {error.message}")
        return None
    say(plan_line(plan))
    if plan.verdict == DOES_NOT_FIT:
        say("  hint: `toolkit recommend` names presets that fit; a run that goes out of memory has exit code 3")
    return plan.as_row()


def plan_line(plan: Plan) -> str:
    """Return one line about planned peak, GPU memory and verdict."""
    peak, memory = gib(plan.memory.planned_peak_bytes), gib(plan.gpu_memory_bytes)
    return f"planned peak {peak} of {memory} per GPU ({plan.memory.peak.phase}): {VERDICT_TEXT[plan.verdict]}"


def why_unsupported(request: PlanRequest, preset: PresetSpec, world_size: int) -> Reason | None:
    """Return why a preset does not train the job on that many GPUs; None if it does."""
    job = _job_of(request, preset)
    limits = job.limits_on(request.shape)
    return not_planned(job.method, preset) or unsupported(
        preset, job.as_trained, world_size=world_size, model=limits, purpose="plan"
    )


def _job_of(request: PlanRequest, preset: PresetSpec) -> PlannedJob:
    """The job without degrees of other presets' dimensions; one that no preset has stays, and is refused."""
    planned = {name for each in request.presets for name in each.parallel}
    others = [name for name in request.job.degrees if name in planned and name not in preset.parallel]
    if "pp" not in preset.parallel and "pp" in planned:
        others += ["pipeline_schedule", "pipeline_chunks"]
    return replace(request.job, **dict.fromkeys(others))  # type: ignore[arg-type]


def _fits(request: PlanRequest, preset: PresetSpec, world_size: int, micro_batch: int) -> bool:
    job = replace(_job_of(request, preset), per_device_train_batch_size=micro_batch)
    return _verdict(request, plan_memory(request.shape, preset, world_size=world_size, job=job)) == FITS


def _verdict(request: PlanRequest, memory: MemoryPlan) -> str:
    return memory_verdict(memory, memory_bytes=request.gpu.memory_bytes, host_bytes=request.host_memory_bytes)


def simplest_fast(plans: Sequence[Plan], presets: Sequence[PresetSpec]) -> Plan:
    """Return the plan that shards and offloads least of those that are as fast as the fastest, as far as plans tell.

    One that offloads to the host is returned only where all do.
    """
    by_name = {preset.name: preset for preset in presets}
    resident = [each for each in plans if not offloads(by_name[each.preset])] or plans
    fastest = min(each.estimate_seconds or 0.0 for each in resident)
    equal = [each for each in resident if (each.estimate_seconds or 0.0) <= EQUAL_WITHIN * fastest]

    def sharding(plan: Plan) -> tuple[int, int, bool, float]:
        preset = by_name[plan.preset]
        return len(preset.degrees), len(preset.sharded_parts), preset.name != "single", plan.estimate_seconds or 0.0

    return min(equal, key=sharding)


def offloads(preset: PresetSpec) -> bool:
    """Return True for a preset that keeps something in host memory or on a disk."""
    return bool(preset.offload_optimizer or preset.offload_param)


def verdict_of_batch(request: PlanRequest, plan: Plan, micro_batch: int) -> str:
    """Return the verdict of a plan with another micro-batch."""
    other = replace(request, job=replace(request.job, per_device_train_batch_size=micro_batch))
    (preset,) = (each for each in request.presets if each.name == plan.preset)
    return _verdict(other, memory_of(other, preset, plan.world_size))


def _smallest_world_size(request: PlanRequest, preset: PresetSpec) -> int | None:
    """The smallest power of two, up to 1,024, on which the job fits; None if there is none."""
    rows = request.job.per_device_train_batch_size
    sizes = (1 << power for power in range(LARGEST_WORLD_SIZE.bit_length()))
    supported = (size for size in sizes if why_unsupported(request, preset, size) is None)
    return next((size for size in supported if _fits(request, preset, size, rows)), None)


def largest_micro_batch(fits: Callable[[int], bool]) -> int | None:
    """Return the largest micro-batch, up to 4,096, for which `fits` is true; None if 1 does not fit.

    Memory grows with the micro-batch, so this doubles, then bisects.

    >>> largest_micro_batch(lambda size: size <= 7)
    7
    """
    if not fits(1):
        return None
    good, bad = 1, 2
    while bad <= LARGEST_MICRO_BATCH and fits(bad):
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def memory_of(request: PlanRequest, preset: PresetSpec, world_size: int) -> MemoryPlan:
    """Return the memory of a job under one of the presets."""
    return plan_memory(request.shape, preset, world_size=world_size, job=_job_of(request, preset))


def plan_of(request: PlanRequest, preset: PresetSpec, world_size: int, smallest: int | None = None) -> Plan:
    """Return the plan of one preset at one world size; `smallest` is the fewest GPUs that fit, if it is known."""
    shape, job = request.shape, _job_of(request, preset)
    memory = memory_of(request, preset, world_size)
    setup = TrainingSetup(shape=shape, preset=preset, world_size=world_size, job=job)
    interconnect = Interconnect(gpu=request.gpu, world_size=world_size, gpus_per_node=job.gpus_per_node)
    collectives = step_collectives(setup)
    return Plan(
        preset=preset.name,
        world_size=world_size,
        gpu=request.gpu.name,
        verdict=_verdict(request, memory),
        gpu_memory_bytes=request.gpu.memory_bytes,
        memory=memory,
        num_params=shape.num_params,
        num_trainable_params=job_weights(shape, job.lora_r, job.load_in_4bit, job.lora_target_modules).num_trained,
        communication_bytes_per_step=communication_bytes(collectives),
        traffic=dimension_traffic(collectives, interconnect),
        layout=setup.layout,
        speed=step_time(setup, interconnect, measured=request.measured),
        largest_micro_batch=largest_micro_batch(lambda size: _fits(request, preset, world_size, size)),
        smallest_world_size=smallest,
        accumulate=job.accumulate_under(preset),
        method=job.method.method,
        advice=tuple(method_advice(shape, preset, world_size=world_size, job=job, memory=memory)),
    )
