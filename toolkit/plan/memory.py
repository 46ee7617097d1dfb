"""GPU memory of one rank by phase and part: load, forward, backward, optimizer step; and whether it fits.

The peak is that of the largest phase. Its parts are computed in modules of their own: `training_setup`,
`engine_buffers` and `toolkit.models.activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from toolkit.engines.engine import EngineSettings
from toolkit.engines.planned import ModelStates
from toolkit.models.shape import ModelShape
from toolkit.models.split import part_of_rank
from toolkit.plan.engine_buffers import HostMemory, driver_bytes, host_memory, overhead_bytes
from toolkit.plan.methods import SFT
from toolkit.plan.micro_batch import micro_batch
from toolkit.plan.phases import PhaseMemory, Rank, peaks
from toolkit.plan.planned_job import PlannedJob, with_attention
from toolkit.plan.programs import TOOLKIT
from toolkit.plan.training_setup import StageLoad, TrainingSetup, model_states, stage_shape
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB, tenths_of_gib

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does_not_fit", "too_close"
# Share of a plan, apart from the model states, by which the peak may be higher: 30 of 35 published peaks are inside
# (`tests/plan/test_measured_memory.py`). Those of ZeRO-2 and ZeRO-3 are closer. No peak of FSDP2 is published. On one
# H200 (`benchmarks/results/gpu-check.json`, part `peaks`) adapters under FSDP2 needed up to 2.5 % more of what is not
# model states, and a full fine-tune reserved 9 % more. FSDP1 with adapters needs up to 54 % more: no margin for FSDP2.
UNCERTAINTY, UNCERTAINTY_DEEPSPEED = 0.15, 0.10
# The same if Llama's activations stand in for those of an architecture that could not be counted.
UNCERTAINTY_UNKNOWN = 0.5
# The same if another size of the family was counted: of 5 % more than needed (docs/evidence/plan-accuracy.md).
UNCERTAINTY_FAMILY = 0.2
# Share of the whole plan by which the peak of a full fine-tune under DeepSpeed may be higher, by what was published.
OF_ALL_DEEPSPEED_FULL = 0.10
# Share of a GPU up to which the plan of another program's job fits: the largest at which, of 188 public jobs that ran
# out of memory, at most one in ten of the group is planned with less, also where each repository in turn is left out
# (docs/evidence/plan-accuracy.md). Groups that are not named never fit: no share separates their jobs, or there are
# too few.
OF_GPU = {"without sharding": 0.65, "under DeepSpeed": 0.80, "under FSDP1": 0.65}
# The cause is not known: of the worst of these, DeepSpeed's own code allocates less than is planned.
REPORTED_WITH_OFFLOAD = "21 public peaks were 1.2 times their plans at the median, up to 2.8"
# Plans of other programs' jobs that ran were up to so many times the memory they had, with rows of half the length.
OVERPLANNED = 1.15
# The least of it: what others report for CUDA's context and a communicator differs by as much.
LEAST_MARGIN_BYTES = 1 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """By how much a peak may be higher than planned: the largest of two shares and `LEAST_MARGIN_BYTES`."""

    of_rest: float  # share of all but the model states
    of_all: float | None = 0.0  # none: by how much is not known
    reason: str = "everything but model states"

    def of(self, planned_peak_bytes: int, exact_bytes: int) -> int | None:
        """Return the bytes, for a peak of which `exact_bytes` are certain; None if they are not known."""
        if self.of_all is None:
            return None
        rest = int(self.of_rest * (planned_peak_bytes - exact_bytes))
        return max(rest, int(self.of_all * planned_peak_bytes), LEAST_MARGIN_BYTES)


DEFAULT_MARGIN = Margin(of_rest=UNCERTAINTY)


class OtherReading(NamedTuple):
    """The planned peak where an option that is not given has another value, and the option that excludes it.

    >>> OtherReading(2**30, "--zero3-init").text
    'up to 1.0 unless `--zero3-init`'
    """

    planned_peak_bytes: int
    option: str

    @property
    def text(self) -> str:
        return f"up to {tenths_of_gib(self.planned_peak_bytes)} unless `{self.option}`"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Planned memory of rank 0 of one preset at one world size; in a pipeline, of the rank that needs most."""

    states: ModelStates  # model states wherever they are, as the attestation counts them
    phases: tuple[PhaseMemory, ...]
    overhead_bytes: int
    driver_bytes: int  # part of the overhead that is not torch's: CUDA's context and NCCL's communicators
    host: HostMemory
    margin: Margin
    readings: Callable[[], Iterable[OtherReading]] = field(default=tuple, compare=False)
    """Plans the other readings of the job's options; only asked for where this one fits."""
    least_reading: Callable[[], MemoryPlan] | None = field(default=None, compare=False)
    """Plans the reading with least memory of another program's job; only asked for where this one does not fit."""

    @cached_property
    def other(self) -> OtherReading | None:
        """The reading with most memory; None where all options that decide are given."""
        return max(self.readings(), default=None)

    @cached_property
    def peak(self) -> PhaseMemory:
        """The phase that allocates most."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def planned_peak_bytes(self) -> int:
        """Memory that the GPU reports as used: allocated at the peak, and the overhead."""
        return self.peak.allocated_bytes + self.overhead_bytes

    @property
    def least_peak_bytes(self) -> int:
        """Lower end of the range: nothing is reserved beside tensors and what the driver takes.

        Where memory runs short, torch's allocator gives unused blocks back and tries again.
        """
        return self.peak.allocated_bytes + self.driver_bytes

    @cached_property
    def lowest_peak_bytes(self) -> int:
        """The same in the reading with least memory, less what plans of other programs or Llama's may be too high."""
        if self.least_reading is None:
            rest = self.least_peak_bytes - self.peak.state_bytes
            more = UNCERTAINTY_UNKNOWN if self.margin.of_rest == UNCERTAINTY_UNKNOWN else 0
            return self.peak.state_bytes + int(rest / (1 + more))
        return int(self.least_reading().least_peak_bytes / OVERPLANNED)

    @cached_property
    def least_host_bytes(self) -> int:
        """The host memory in the reading with least memory, in which no blocks are page-locked and rounded."""
        return (self if self.least_reading is None else self.least_reading()).host.peak_bytes

    @property
    def possible_peak_bytes(self) -> int | None:
        """Upper end of the range: the planned peak, and the margin by which it may be higher; None: not known."""
        margin = self.margin.of(self.planned_peak_bytes, self.peak.state_bytes)
        return None if margin is None else self.planned_peak_bytes + margin


def plan_memory(
    shape: ModelShape, preset: PresetSpec, *, world_size: int, job: PlannedJob, mixed_precision: str | None = None
) -> MemoryPlan:
    """Return the memory of rank 0, or in a pipeline of the rank that needs most.

    `mixed_precision` overrides the preset's own.
    """
    setup = TrainingSetup(shape=shape, preset=preset, world_size=world_size, job=job, mixed_precision=mixed_precision)
    engine, settings = setup.engine, job.pipeline
    if preset.engine != "pipeline" or settings is None:
        return plan_engine_memory(shape, engine, job)
    stages = []
    for rank in range(settings.ranks):
        load = StageLoad.of(settings, rank, micro_batches=job.gradient_accumulation_steps)
        stages.append(plan_engine_memory(stage_shape(shape, settings, rank), engine, job, load=load))
    return max(stages, key=lambda stage: stage.planned_peak_bytes)


def plan_engine_memory(
    shape: ModelShape, engine: EngineSettings, job: PlannedJob, *, load: StageLoad | None = None
) -> MemoryPlan:
    """Return the memory under engine settings that need not come from a preset; `load` is that of a stage."""
    shape = part_of_rank(job.method.model(shape), engine.layout)
    shape = with_attention(shape, job.attention_with_scores)
    weights = job.weights(shape, element_bytes=engine.element_bytes)
    states = model_states(engine, weights, job.optimizer)
    rank = Rank(
        shape=shape,
        engine=engine,
        job=job,
        weights=weights,
        states=states,
        buffers=engine.traits.buffers(engine, weights, states, job),
        batch=micro_batch(shape, engine, job, weights),
        evaluated=None if job.evaluation is None else micro_batch(shape, engine, job.evaluation, weights),
        load=load,
    )
    phases = peaks(rank)
    in_step = next(phase.allocated_bytes for phase in phases if phase.phase == "step")

    def readings() -> Iterable[OtherReading]:
        for option, other in job.other_readings():
            held = 4 if job.numerics.pure_bf16 and not other.numerics.pure_bf16 else engine.trained_bytes
            read = plan_engine_memory(shape, replace(engine, trained_bytes=held), other, load=load)
            yield OtherReading(read.planned_peak_bytes, option)

    def least_reading() -> MemoryPlan:
        # its JSON for DeepSpeed may say `pin_memory: false`; FSDP always locks pages
        pins = engine.pins_memory and not engine.traits.has_flat_states
        return plan_engine_memory(shape, replace(engine, pins_memory=pins), job.least_reading(), load=load)

    return MemoryPlan(
        states=states,
        phases=phases,
        # what was reserved in any phase stays reserved
        overhead_bytes=overhead_bytes(
            engine,
            activation_bytes=max(phase.activation_bytes for phase in phases),
            logits_bytes=max(phase.logits_bytes for phase in phases),
            step_bytes=0 if weights.adapters else in_step,
            expandable_segments=job.numerics.expandable_segments,
        ),
        driver_bytes=driver_bytes(engine),
        host=host_memory(engine, weights, states, job),
        margin=_margin(engine, shape, job),
        readings=readings,
        least_reading=least_reading if job.is_of_another_program else None,
    )


def _margin(engine: EngineSettings, shape: ModelShape, job: PlannedJob) -> Margin:
    if job.is_of_another_program:
        return _margin_of_another_program(engine, shape, job)
    if shape.activations_from == "llama":
        return Margin(of_rest=UNCERTAINTY_UNKNOWN, reason="activations estimated as Llama's")
    if shape.scaled_from is not None:
        return Margin(of_rest=UNCERTAINTY_FAMILY, reason=f"activations scaled from {shape.scaled_from}'s")
    if engine.traits.has_flat_states and job.lora_r is None:
        reason = "a full fine-tune under DeepSpeed"
        return Margin(of_rest=UNCERTAINTY_DEEPSPEED, of_all=OF_ALL_DEEPSPEED_FULL, reason=reason)
    return Margin(of_rest=UNCERTAINTY_DEEPSPEED) if engine.traits.has_flat_states else DEFAULT_MARGIN


def _margin_of_another_program(engine: EngineSettings, shape: ModelShape, job: PlannedJob) -> Margin:
    group = "under FSDP1" if job.numerics.fsdp1 else "under FSDP2"
    group = group if engine.traits.gathers_layers else "without sharding"
    group = "under DeepSpeed" if engine.traits.has_flat_states else group
    if job.method.method != SFT:
        group = f"with {job.method.method}"
    if job.image_tokens or (job.image_tokens is None and shape.num_tower_params):
        group = "of models with images"
    if engine.offload_optimizer is not None or engine.offload_param is not None:
        group = "with offload"
    who = "another program" if job.numerics.program == TOOLKIT else job.numerics.program
    of_rest, share = UNCERTAINTY_UNKNOWN if shape.activations_from == "llama" else 0, OF_GPU.get(group)
    if share is None:
        reported = f": {REPORTED_WITH_OFFLOAD}" if group == "with offload" else ""
        return Margin(of_rest=of_rest, of_all=None, reason=f"not known for jobs of {who} {group}{reported}")
    reason = f"a job of {who} {group} fits up to {share:.0%} of a GPU"
    return Margin(of_rest=of_rest, of_all=1 / share - 1, reason=reason)


def fit_verdict(
    *,
    planned_peak_bytes: int,
    exact_bytes: int,
    memory_bytes: int,
    margin: Margin = DEFAULT_MARGIN,
    least_peak_bytes: int | None = None,
) -> str:
    """Return the verdict for a peak of which `exact_bytes`, the model states, are certain.

    It does not fit where the lower end of the range, by default the planned peak, is more than the GPU has; and it is
    too close where the upper end is more.
    """
    if (planned_peak_bytes if least_peak_bytes is None else least_peak_bytes) > memory_bytes:
        return DOES_NOT_FIT
    more = margin.of(planned_peak_bytes, exact_bytes)
    return FITS if more is not None and planned_peak_bytes + more <= memory_bytes else TOO_CLOSE


def memory_verdict(plan: MemoryPlan, *, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Return the verdict for a GPU of `memory_bytes`, and for a node of `host_bytes` if given.

    It fits in the reading of the job with most memory, and does not in the one with least; else it is too close.
    """
    lacks_host = host_bytes is not None and plan.host.peak_bytes > host_bytes
    if host_bytes is not None and lacks_host and plan.least_host_bytes > host_bytes:
        return DOES_NOT_FIT
    verdict = fit_verdict(
        planned_peak_bytes=plan.planned_peak_bytes,
        exact_bytes=plan.peak.state_bytes,
        memory_bytes=memory_bytes,
        margin=plan.margin,
        least_peak_bytes=plan.least_peak_bytes,
    )
    if verdict == DOES_NOT_FIT and plan.lowest_peak_bytes <= memory_bytes:
        return TOO_CLOSE
    if verdict == FITS and (lacks_host or (plan.other is not None and plan.other.planned_peak_bytes > memory_bytes)):
        return TOO_CLOSE
    return verdict
