"""Each preset at its best for a job: the largest micro-batch that fits, with and without activation checkpointing.

>>> found = candidates(ask)
>>> found[0].preset.name, found[0].job.per_device_train_batch_size
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.models.shape import ModelShape
from toolkit.plan.job import Job
from toolkit.plan.links import Cluster
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.step_time import StepTime, step_time
from toolkit.plan.traffic import traffic_of
from toolkit.plan.verdict import FITS, memory_verdict
from toolkit.presets.preset import Preset
from toolkit.presets.world import why_not
from toolkit.units import gib


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What somebody wants to train, and on what."""

    shape: ModelShape
    gpu: Gpu
    world_size: int
    global_batch_size: int
    """Sequences a step, over all GPUs and micro-steps."""
    job: Job
    """Length, LoRA, 4 bits; its micro-batch, accumulation and checkpointing are what is looked for."""
    network_bytes_per_second: int | None = None
    nvme_bytes_per_second: int | None = None
    """Of a machine's disks; None: there is none, and no preset that needs one is considered."""
    host_memory_bytes: int | None = None
    """Of one machine; None: as much as it takes."""

    def __post_init__(self) -> None:
        if self.global_batch_size % self.world_size:
            fitting = math.ceil(self.global_batch_size / self.world_size) * self.world_size
            raise ToolkitError(
                f"--global-batch-size {self.global_batch_size} is not divisible by {self.world_size} GPUs",
                hint=f"`--global-batch-size {fitting}`",
            )

    @property
    def cluster(self) -> Cluster:
        """The GPUs and what joins them."""
        return Cluster(
            gpu=self.gpu,
            world_size=self.world_size,
            gpus_per_machine=self.job.gpus_per_machine,
            network_bytes_per_second=self.network_bytes_per_second,
        )

    @property
    def micro_batches(self) -> list[int]:
        """What one GPU's share of the global batch divides into, ascending."""
        share = self.global_batch_size // self.world_size
        return [size for size in range(1, share + 1) if share % size == 0]

    def job_of(self, micro_batch: int, *, checkpointing: bool) -> Job:
        """The job with its open values filled in."""
        return replace(
            self.job,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=self.global_batch_size // self.world_size // micro_batch,
            activation_checkpointing=checkpointing,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A preset with its micro-batch, accumulation and checkpointing, and what is planned for it."""

    preset: Preset
    job: Job
    memory: MemoryPlan
    verdict: str
    """`fits`, `too_close` or `does_not_fit`: that of the GPU."""
    speed: StepTime | None
    """None where the GPU's peak is unknown."""
    refused: str | None = None
    """Why it is none, although the GPU may hold it."""

    @property
    def fits(self) -> bool:
        """Whether it may be chosen."""
        return self.verdict == FITS and self.refused is None

    @property
    def settings(self) -> str:
        """Micro-batch, accumulation and checkpointing, for people."""
        said = f"micro-batch {self.job.per_device_train_batch_size}"
        if self.job.gradient_accumulation_steps > 1:
            said += f", accumulation {self.job.gradient_accumulation_steps}"
        return said + (", activation checkpointing" if self.job.activation_checkpointing else "")

    @property
    def seconds(self) -> float:
        """Middle of the step's interval, geometric; 1 without a peak, so that all are equal."""
        return 1.0 if self.speed is None else math.sqrt(self.speed.step_seconds[0] * self.speed.step_seconds[1])

    def times(self, other: Candidate) -> tuple[float, float]:
        """This step's seconds over the other's: all at the best rates, all at the worst."""
        if self.speed is None or other.speed is None:
            return 1.0, 1.0
        mine, others = self.speed.step_seconds, other.speed.step_seconds
        return mine[0] / others[0], mine[1] / others[1]


def candidates(ask: Ask, presets: Iterable[Preset]) -> list[Candidate]:
    """One candidate for each preset that the job and the number of GPUs allow, fitting or not."""
    return [_best(ask, preset) for preset in presets if refusal(ask, preset) is None]


def refusal(ask: Ask, preset: Preset) -> str | None:
    """What rules a preset out before any arithmetic."""
    reason = why_not(preset, ask.world_size)
    if reason is not None:
        return reason
    if "nvme" in (preset.offload_optimizer, preset.offload_param) and ask.nvme_bytes_per_second is None:
        return "needs a local NVMe disk (`--nvme-gb-per-second`)"
    if ask.gpu.peak_flops("fp16") is not None and ask.gpu.peak_flops("bf16") is None:
        return f"computes in {preset.mixed_precision}, for which {ask.gpu.name} has no units"
    offloads = preset.offload_optimizer or preset.offload_param
    if ask.job.load_in_4bit and (offloads or "parameter" in preset.sharded_parts):
        return "does not shard or offload 4-bit weights"
    if preset.needs_gpu is not None:
        return "quantises what it sends, so it trains another problem (docs/numerics.md): choose it by hand"
    if preset.engine == "ddp" and ask.world_size == 1:
        return "is `single` where there is one process"
    return None


def _best(ask: Ask, preset: Preset) -> Candidate:
    """The faster of with and without checkpointing; the smaller one where nothing fits."""
    both = [largest(ask, preset, checkpointing=checkpointing) for checkpointing in (False, True)]
    fitting = [candidate for candidate in both if candidate.fits]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(both, key=lambda one: one.memory.planned_peak_bytes)


def largest(ask: Ask, preset: Preset, *, checkpointing: bool) -> Candidate:
    """The largest micro-batch that fits, or the smallest there is."""
    sizes = ask.micro_batches
    made: dict[int, Candidate] = {}

    def fails(size: int) -> bool:
        made[size] = _candidate(ask, preset, ask.job_of(size, checkpointing=checkpointing))
        return not made[size].fits

    place = bisect.bisect_left(sizes, True, key=fails)
    size = sizes[max(place - 1, 0)]
    if size not in made:
        fails(size)
    return made[size]


def _candidate(ask: Ask, preset: Preset, job: Job) -> Candidate:
    memory = plan_memory(ask.shape, preset, world_size=ask.world_size, job=job)
    said = memory_verdict(memory, memory_bytes=ask.gpu.memory_bytes)
    host = ask.host_memory_bytes
    refused = None
    if host is not None and memory.host.peak_bytes > host:
        refused = f"needs {gib(memory.host.peak_bytes)} of host memory a machine, which has {gib(host)}"
    speed = None
    if said == FITS and refused is None:
        traffic = traffic_of(ask.shape, preset, job, world_size=ask.world_size)
        speed = step_time(
            traffic,
            ask.cluster,
            per_device_train_batch_size=job.per_device_train_batch_size,
            seq_length=job.max_seq_length,
            nvme_bytes_per_second=ask.nvme_bytes_per_second,
        )
    return Candidate(preset=preset, job=job, memory=memory, verdict=said, speed=speed, refused=refused)
