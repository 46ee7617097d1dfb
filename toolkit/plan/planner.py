"""One plan for each preset and world size: memory, traffic and time put together.

    >>> plans = make_plans(request)

Values in, values out: `door.py` reads and prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.models.shape import ModelShape
from toolkit.plan.communication import step_collectives
from toolkit.plan.job import Job, check_job, check_world_size
from toolkit.plan.links import Cluster
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.step_time import StepTime, step_time
from toolkit.plan.traffic import communication_bytes, traffic_of
from toolkit.plan.verdict import FITS, largest_micro_batch, memory_verdict, smallest_world_size
from toolkit.plan.weights import job_weights
from toolkit.presets.preset import Preset
from toolkit.presets.world import check_trains_in, why_not

# What the toolkit refuses to start as well (`toolkit/runs/switches.py`).
WHY_NO_QLORA = "4-bit weights are not sharded or offloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to plan for."""

    shape: ModelShape
    presets: Sequence[Preset]
    world_sizes: Sequence[int]
    job: Job
    gpu: Gpu
    host_memory_bytes: int | None = None
    """Of a machine; None: not judged."""
    strict: bool = True
    """Whether a preset that cannot have a world size is an error, or left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer for one preset at one world size."""

    preset: str
    world_size: int
    gpu: str
    verdict: str
    memory_bytes: int
    """Of the GPU."""
    memory: MemoryPlan
    num_params: int
    num_trainable_params: int
    communication_bytes_per_step: int
    speed: StepTime | None
    largest_micro_batch: int | None
    smallest_world_size: int | None

    @property
    def headroom_bytes(self) -> int:
        """What the GPU has left at the peak; negative where it lacks."""
        return self.memory_bytes - self.memory.planned_peak_bytes

    def as_row(self) -> dict[str, Any]:
        """As `toolkit plan --json` gives it."""
        memory, peak, speed = self.memory, self.memory.peak, self.speed
        return {
            "preset": self.preset,
            "world_size": self.world_size,
            "gpu": self.gpu,
            "verdict": self.verdict,
            "planned_peak_bytes": memory.planned_peak_bytes,
            "headroom_bytes": self.headroom_bytes,
            "num_params": self.num_params,
            "num_trainable_params": self.num_trainable_params,
            "parameter_bytes": memory.states.parameter_bytes,
            "gradient_bytes": memory.states.gradient_bytes,
            "optimizer_bytes": memory.states.optimizer_bytes,
            "activation_bytes": peak.activation_bytes,
            "logits_bytes": peak.logits_bytes,
            "buffer_bytes": peak.buffer_bytes,
            "overhead_bytes": memory.overhead_bytes,
            "host_bytes": memory.host.peak_bytes,
            "disk_bytes": memory.host.disk_bytes,
            "peak_phase": peak.phase,
            "phases": {phase.phase: _parts(phase) for phase in memory.phases},
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_world_size": self.smallest_world_size,
            "communication_bytes_per_step": self.communication_bytes_per_step,
            "step_seconds": None if speed is None else list(speed.step_seconds),
            "tokens_per_second_per_gpu": None if speed is None else list(speed.tokens_per_second_per_gpu),
            "mfu": None if speed is None else list(speed.mfu),
        }


def _parts(phase: Any) -> dict[str, int]:
    names = ("parameter", "gradient", "optimizer", "activation", "logits", "buffer")
    return {f"{name}_bytes": getattr(phase, f"{name}_bytes") for name in names} | {
        "allocated_bytes": phase.allocated_bytes
    }


def make_plans(request: Request) -> list[Plan]:
    """By world size, then in the order of the presets.

    Raises ToolkitError for what no run could be: see `check_job`, `check_world_size`, and each preset's limits.
    """
    check_job(request.job, request.shape)
    for world_size in request.world_sizes:
        check_world_size(world_size)
        Cluster(gpu=request.gpu, world_size=world_size, gpus_per_machine=request.job.gpus_per_machine)
    chosen = list(_chosen(request))
    if not chosen:
        sizes = ", ".join(map(str, request.world_sizes))
        raise ToolkitError(f"no preset trains this in {sizes} processes", hint="see `toolkit presets`")
    named = {preset.name: preset for preset, _ in chosen}
    smallest = {name: _smallest(request, preset) for name, preset in named.items()}
    return [_plan(request, preset, size, smallest[preset.name]) for preset, size in chosen]


def _chosen(request: Request) -> Iterator[tuple[Preset, int]]:
    for world_size in request.world_sizes:
        for preset in request.presets:
            if request.strict:
                check_trains_in(preset, world_size, given=f"--world-size is {world_size}", option="--world-size")
                _check_quantized(preset, request.job)
            elif why_not(preset, world_size) is not None or not _takes_quantized(preset, request.job):
                continue
            yield preset, world_size


def _takes_quantized(preset: Preset, job: Job) -> bool:
    offloads = preset.offload_optimizer or preset.offload_param
    return not job.load_in_4bit or not (offloads or "parameter" in preset.sharded_parts)


def _check_quantized(preset: Preset, job: Job) -> None:
    if not _takes_quantized(preset, job):
        raise ToolkitError(
            f"--load-in-4bit does not work under preset {preset.name!r}: {WHY_NO_QLORA}",
            hint="`--preset ddp`, `zero1` or `zero2`",
        )


def _fits(request: Request, preset: Preset, world_size: int, micro_batch: int) -> bool:
    job = replace(request.job, per_device_train_batch_size=micro_batch)
    memory = plan_memory(request.shape, preset, world_size=world_size, job=job)
    return _judged(request, memory) == FITS


def _judged(request: Request, memory: MemoryPlan) -> str:
    return memory_verdict(memory, memory_bytes=request.gpu.memory_bytes, host_bytes=request.host_memory_bytes)


def _smallest(request: Request, preset: Preset) -> int | None:
    micro_batch = request.job.per_device_train_batch_size
    return smallest_world_size(preset, lambda size: _fits(request, preset, size, micro_batch))


def _plan(request: Request, preset: Preset, world_size: int, smallest: int | None) -> Plan:
    shape, job = request.shape, request.job
    memory = plan_memory(shape, preset, world_size=world_size, job=job)
    traffic = traffic_of(shape, preset, job, world_size=world_size)
    cluster = Cluster(gpu=request.gpu, world_size=world_size, gpus_per_machine=job.gpus_per_machine)
    speed = step_time(
        traffic,
        cluster,
        per_device_train_batch_size=job.per_device_train_batch_size,
        seq_length=job.max_seq_length,
    )
    sent = communication_bytes(step_collectives(traffic)) if speed is None else speed.communication_bytes_per_step
    return Plan(
        preset=preset.name,
        world_size=world_size,
        gpu=request.gpu.name,
        verdict=_judged(request, memory),
        memory_bytes=request.gpu.memory_bytes,
        memory=memory,
        num_params=shape.num_params,
        num_trainable_params=job_weights(shape, job).num_trained,
        communication_bytes_per_step=sent,
        speed=speed,
        largest_micro_batch=largest_micro_batch(lambda size: _fits(request, preset, world_size, size)),
        smallest_world_size=smallest,
    )
