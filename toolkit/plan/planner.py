"""`toolkit plan`: one plan per preset and world size, from memory, communication and step time.

request = plan_request("Qwen/Qwen3-8B", PlanOptions(num_processes=(8,), gpu="h100"))
plans = make_plans(request)
"""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GPUS, Gpu, chosen_gpu, find_gpu, shared_gpu
from toolkit.hardware.gpus import count_gpus, gpu_names, visible_world_size
from toolkit.job.job import Job
from toolkit.models.read_model import model_and_gpu, read_model
from toolkit.plan.candidates import (
    LARGEST_WORLD_SIZE,
    Candidate,
    PlannedModel,
    RecommendRequest,
    best_candidate,
    best_first,
    candidate_of,
    default_global_batch,
    divided_request,
    refusal,
    tolerance_text,
)
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import DOES_NOT_FIT, FITS, TOO_CLOSE
from toolkit.plan.method_advice import method_advice
from toolkit.plan.methods import SFT, check_generations, not_planned
from toolkit.plan.options import PlanOptions
from toolkit.plan.phases import PARTS
from toolkit.plan.planned_job import PlannedJob, check_planned_job, check_world_size, node_memory, on_gpu
from toolkit.plan.step_time import DimensionTraffic, dimension_traffic
from toolkit.presets.compatibility import Reason
from toolkit.presets.preset import list_presets, load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import unsupported
from toolkit.versions import is_importable

LARGEST_MICRO_BATCH = 4096
VERDICT_TEXT = {FITS: "fits", DOES_NOT_FIT: "does not fit", TOO_CLOSE: "too close to call"}


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlannedModel):
    """What to plan, with model, presets and GPU resolved."""

    presets: Sequence[PresetSpec]
    world_sizes: Sequence[int]
    finds_batch: bool = False  # True: instead of the job's batch each plan has the largest micro-batch that fits
    strict: bool = True  # True: a preset that does not support a world size is an error; False: it is left out


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """The plan of one preset at one world size."""

    num_trainable_params: int
    communication_bytes_per_step: int
    largest_micro_batch: int | None
    smallest_world_size: int | None
    traffic: tuple[DimensionTraffic, ...]  # what each GPU sends in a step, by dimension of the mesh
    advice: tuple[str, ...] = ()

    @property
    def logits_fraction(self) -> float:
        """Share of the logits in what torch allocates at the peak."""
        return self.memory.peak.logits_bytes / max(self.memory.peak.allocated_bytes, 1)

    def as_row(self) -> dict[str, Any]:
        """Return the plan as `toolkit plan --json` prints it."""
        memory, peak = self.memory, self.memory.peak
        return {
            **super().as_row(),
            "method": self.job.method.method,
            "world_size": self.world_size,
            "gpu": self.request.gpu.name,
            "allocated_peak_bytes": peak.allocated_bytes,
            "logits_fraction": self.logits_fraction,
            "num_params": self.request.shape.num_params,
            "num_trainable_params": self.num_trainable_params,
            **{f"{part}_bytes": getattr(memory.states, f"{part}_bytes") for part in PARTS[:3]},
            **{f"{part}_bytes": getattr(peak, f"{part}_bytes") for part in PARTS[3:]},
            "overhead_bytes": memory.overhead_bytes,
            "host_memory_bytes": self.request.node_memory_bytes,
            "peak_phase": peak.phase,
            "phases": {phase.phase: phase.as_row() for phase in memory.phases},
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_world_size": self.smallest_world_size,
            "communication_bytes_per_step": self.communication_bytes_per_step,
            "communication": [asdict(traffic) for traffic in self.traffic],
            "layout": None if self.setup.layout is None else self.setup.layout.degrees(),
            "advice": list(self.advice),
        }


def asks_which_gpus(options: PlanOptions) -> bool:
    """Return True if no GPU is named, and none is visible."""
    named = any(each is not None for each in (options.gpu, options.gpu_memory_gib, options.gpu_tflops))
    return not named and not options.verify and count_gpus() == 0


def plan_request(model: str, options: PlanOptions) -> PlanRequest:
    """Return the request with model, presets and GPU read. Raises ToolkitError for what cannot be read.

    Where no GPU is named or visible, the GPU is the first of the table, and the world sizes are those of the options.
    """
    any_gpu = asks_which_gpus(options)
    given = {"memory_gib": options.gpu_memory_gib, "tflops": options.gpu_tflops}
    shape, gpu = model_and_gpu(model, lambda: GPUS[0] if any_gpu else chosen_gpu(options.gpu, **given))
    if options.packing and options.equal_lengths:
        raise ToolkitError("--equal-lengths has no effect with --packing: packed rows are full")
    presets = [load_preset(name) for name in dict.fromkeys(options.preset)] or list_presets()
    if options.verify and options.method != SFT:
        raise ToolkitError(f"--verify rehearses --method {SFT} only", hint="leave it out")
    if any_gpu and options.vllm == "colocate":
        raise ToolkitError("--vllm colocate takes a share of a GPU, and none is named", hint="add `--gpu h100`")
    full_length = options.equal_lengths or options.verify  # a rehearsal's rows all have the full length
    job, recomputes = PlannedJob.from_options(options, full_length=full_length), options.activation_checkpointing
    recomputes = job.activation_checkpointing or None if recomputes is None else recomputes
    finds_batch = options.per_device_train_batch_size is None
    if finds_batch and options.gradient_accumulation_steps is None and job.pp:  # any number that suits the stages
        job = replace(job, gradient_accumulation_steps=job.pp)
    return PlanRequest(
        shape=shape,
        presets=presets,
        world_sizes=sorted(set(options.num_processes)) or ([] if any_gpu else [visible_world_size()]),
        job=on_gpu(job, gpu, fp16=options.fp16),
        gpu=gpu,
        host_memory_bytes=node_memory(options.host_memory_gib, options.gpu),
        finds_batch=finds_batch,
        accumulation=options.gradient_accumulation_steps,
        checkpointing=(False, True) if recomputes is None else (recomputes,),
        strict=bool(options.preset),
    )


def make_plans(request: PlanRequest) -> list[Plan]:
    """Return the plans by world size, then in the order of the presets.

    Raises ToolkitError for what cannot be trained: see `check_planned_job`, and the limits of each preset.
    """
    check_request(request)
    supported, refused = [], []
    for world_size, preset in itertools.product(request.world_sizes, request.presets):
        reason = why_unsupported(request, preset, world_size)
        if reason is None:
            supported.append((preset, world_size))
        elif request.strict:
            raise ToolkitError(reason.message, hint=reason.hint)
        else:
            refused.append((len(set(preset.degrees) - set(request.job.degrees)), preset, reason))
    for name in request.job.degrees:
        reasons = [(lacks, reason) for lacks, preset, reason in refused if name in preset.parallel]
        if reasons and not any(name in preset.parallel for preset, _ in supported):
            reason = min(reasons, key=itemgetter(0))[1]
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
        check_generations(request.job.method, _global_batch_size(request, world_size), num_processes=world_size)
        Interconnect(gpu=request.gpu, world_size=world_size, gpus_per_node=request.job.gpus_per_node)


def plan_run(preset: PresetSpec, job: Job, *, world_size: int, gpu: Gpu, host_memory_bytes: int | None = None) -> Plan:
    """Return the plan for rows of full length on one node. Raises ToolkitError, with the reason, if there is none."""
    shape = read_model(str(job.model_name_or_path), count=False)
    planned = replace(PlannedJob.of(job), gpus_per_node=max(PlannedJob.gpus_per_node, world_size))
    request = PlanRequest(shape=shape, presets=[preset], world_sizes=[world_size], job=planned, gpu=gpu)
    return make_plans(replace(request, host_memory_bytes=host_memory_bytes))[0]


def default_preset(job: Job, *, world_size: int, gpu: Gpu) -> str:
    """Return the preset that `toolkit recommend` takes for a job in its batch; where none fits, the smallest.

    Those whose libraries are not installed here, or that need a disk, are left out. Raises ToolkitError for a job that
    cannot be planned.
    """
    presets = [preset for preset in list_presets() if not preset.uses_nvme]
    usable = [preset for preset in presets if set(job.degrees) <= set(preset.parallel)]
    usable = [preset for preset in usable if all(map(is_importable, preset.traits.needs))]
    shape = read_model(str(job.model_name_or_path), count=False)
    request = PlanRequest(shape=shape, presets=usable, world_sizes=[world_size], job=PlannedJob.of(job), gpu=gpu)
    plans = make_plans(replace(request, strict=False))
    fitting = [plan for plan in plans if plan.fits]
    fitting = [
        plan for plan in fitting if not plan.preset.traits.needs_launcher
    ] or fitting  # one process has nothing to shard
    smallest = min(plans, key=lambda plan: plan.memory.planned_peak_bytes)
    return (best_plan(fitting)[0] if fitting else smallest).preset.name


def plan_run_here(
    preset: PresetSpec, job: Job, *, world_size: int, say: Callable[[str], None], ranks_per_gpu: int = 1
) -> dict[str, Any] | None:
    """Return the plan for this node's GPUs as a row of `toolkit plan --json`, or None if it cannot be planned.

    Passes one line about the plan, or the reason for which there is none, to `say`. Raises ToolkitError for more ranks
    on each GPU than fit.
    """
    try:
        names = sorted(set(gpu_names()))
        if len(names) != 1:
            raise ToolkitError(f"the GPUs of this node are {', '.join(names) or 'not known to nvidia-smi'}")
        gpu = shared_gpu(find_gpu(names[0]), ranks_per_gpu)
        plan = plan_run(preset, job, world_size=world_size, gpu=gpu, host_memory_bytes=node_memory())
    except ToolkitError as error:
        say(f"not planned: {error.message}")
        return None
    if ranks_per_gpu > 1:
        check_ranks_fit(preset, job, world_size=world_size, gpu=find_gpu(names[0]), ranks_per_gpu=ranks_per_gpu)
    say(plan_line(plan))
    if plan.verdict == DOES_NOT_FIT:
        say("  hint: `toolkit recommend` names presets that fit; a run that goes out of memory has exit code 3")
    return plan.as_row()


def check_ranks_fit(preset: PresetSpec, job: Job, *, world_size: int, gpu: Gpu, ranks_per_gpu: int) -> None:
    """Raise ToolkitError where the ranks of a GPU do not fit on it, each with a CUDA context and communicators."""
    plans: list[Plan] = []
    for ranks in range(ranks_per_gpu, 1, -1):
        with contextlib.suppress(ToolkitError):  # a job or a number of processes that is not planned
            size = world_size * ranks // ranks_per_gpu
            plans.append(plan_run(preset, job, world_size=size, gpu=shared_gpu(gpu, ranks)))
        if not plans or plans[0].verdict != DOES_NOT_FIT or plans[-1].fits:
            break
    if not plans or plans[0].verdict != DOES_NOT_FIT:
        return
    hint = "a smaller model, or `-- --max_seq_length 512 --per_device_train_batch_size 1`"
    if plans[-1].fits:
        hint = f"`--ranks-per-gpu {ranks} --num-processes {plans[-1].world_size}`"
    raise ToolkitError(f"{ranks_per_gpu} ranks do not fit on one {gpu.name}: {plan_line(plans[0])}", hint=hint)


def plan_line(plan: Plan) -> str:
    """Return one line about planned peak, GPU memory and verdict."""
    verdict = plan.host_refusal or VERDICT_TEXT[plan.verdict]
    what = "memory of one rank" if plan.request.gpu.shared_by > 1 else "GPU memory"
    return f"{what}: {plan.peak_text} ({plan.memory.peak.phase}): {verdict}"


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
        others += [name for name in ("pipeline_schedule", "pipeline_chunks") if request.job.value(name) is not None]
    return replace(request.job, **dict.fromkeys(others)) if others else request.job  # type: ignore[arg-type]


def _on_gpus(request: PlanRequest, preset: PresetSpec, world_size: int) -> RecommendRequest:
    job = _job_of(request, preset)
    values = {field.name: getattr(request, field.name) for field in fields(PlannedModel)} | {"job": job}
    rows = _global_batch_size(request, world_size)
    on_gpus = RecommendRequest(**values, world_size=world_size, global_batch_size=rows)
    return divided_request(on_gpus, preset, job.degrees)


def _global_batch_size(request: PlanRequest, world_size: int) -> int:
    job = request.job
    if request.finds_batch:
        return default_global_batch(job.method, world_size)
    return world_size * job.per_device_train_batch_size * job.gradient_accumulation_steps


def smallest_plan(request: PlanRequest, preset: PresetSpec, world_size: int) -> Candidate:
    """Return the plan of the job; where its batch is to be found, with the least memory that can be chosen."""
    on_gpus = _on_gpus(request, preset, world_size)
    if not request.finds_batch:
        return candidate_of(on_gpus, preset, on_gpus.job)
    job = on_gpus.job_with(micro_batch=on_gpus.micro_batches[0], checkpointing=request.checkpointing[-1])
    return candidate_of(on_gpus, preset, job)


def best_plan(plans: Sequence[Plan]) -> tuple[Plan, str]:
    """Return the plan that `toolkit recommend` would choose, and why; of presets that it never names, if need be."""
    named = [plan for plan in plans if refusal(plan.request, plan.preset) is None] or plans
    best = best_first(named)[0]
    return best, tolerance_text(best, named if len(named) > 1 else plans)


def _smallest_world_size(request: PlanRequest, preset: PresetSpec) -> int | None:
    """The smallest power of two, up to 1,024, on which the job fits, with the smallest batch if that is to be found.

    Memory does not always fall with the GPUs: fused experts are padded, so 8 on 64 GPUs take eight times the space.
    """
    sizes = [1 << power for power in range(LARGEST_WORLD_SIZE.bit_length())]
    supported = (size for size in sizes if why_unsupported(request, preset, size) is None)

    def fits(size: int) -> bool:
        return smallest_plan(request, preset, size).fits

    return next(filter(fits, supported), None)


def largest_micro_batch(fits: Callable[[int], bool], *, near: int = 1) -> int | None:
    """Return the largest micro-batch, up to 4,096, for which `fits` is true; None if 1 does not fit.

    Memory grows with the micro-batch, so this doubles `near` while that fits, then bisects.

    >>> largest_micro_batch(lambda size: size <= 7, near=2), largest_micro_batch(lambda size: False)
    (7, None)
    """
    fitting, too_large = (near, 2 * near) if fits(near) else (0, near)
    while fitting and too_large <= LARGEST_MICRO_BATCH and fits(too_large):
        fitting, too_large = too_large, 2 * too_large
    between = range(fitting + 1, too_large)
    return fitting + bisect.bisect_left(between, True, key=lambda size: not fits(size)) or None


def plan_of(request: PlanRequest, preset: PresetSpec, world_size: int, smallest: int | None = None) -> Plan:
    """Return the plan of one preset at one world size; `smallest` is the fewest GPUs that fit, if it is known."""
    on_gpus, shape = _on_gpus(request, preset, world_size), request.shape
    candidate = best_candidate(on_gpus, preset) if request.finds_batch else candidate_of(on_gpus, preset, on_gpus.job)
    job = candidate.job
    trained = job.weights(shape).num_trained
    collectives = step_collectives(candidate.setup)
    return Plan(
        request=candidate.request,
        setup=candidate.setup,
        memory=candidate.memory,
        num_trainable_params=trained,
        communication_bytes_per_step=communication_bytes(collectives),
        traffic=dimension_traffic(collectives, on_gpus.interconnect),
        largest_micro_batch=largest_micro_batch(
            lambda size: candidate_of(candidate.request, preset, replace(job, per_device_train_batch_size=size)).fits,
            near=job.per_device_train_batch_size,
        ),
        smallest_world_size=smallest,
        advice=tuple(method_advice(shape, preset, world_size=world_size, job=job, memory=candidate.memory)),
    )
