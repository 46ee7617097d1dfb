"""Data x tensor x pipeline parallelism on paper, for a model that no preset fits on the GPUs.

    layout = best_pipeline_layout(recommend_request("Qwen/Qwen2.5-72B", options))

Each layout is one of `toolkit.simulate.stage_plans`: stages planned like small models, 1F1B simulated with their times,
and gradients summed over the replicas after the last backward. Of those whose largest stage fits, the fastest is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from toolkit.errors import ToolkitError
from toolkit.plan.candidates import Candidate, RecommendRequest, best_candidates
from toolkit.plan.interconnect import Range
from toolkit.plan.memory import FITS
from toolkit.plan.recommend import NothingFits, memory_refusal, why_refused
from toolkit.plan.recommendation import train_command
from toolkit.presets import load_preset
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.pipeline_step import PipelineRun
from toolkit.simulate.stage_plans import StagedModel, StageMemory, at_end
from toolkit.units import gib, seconds

SCHEDULE = "1f1b"
"""The schedule of least memory that needs no split backward."""
MOST_MICRO_BATCHES = 4096
TRAINED_PRESET = "pipeline_1f1b"
WITHOUT = "which has neither tensor parallelism nor optimizer states sharded over replicas"


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Degrees, micro-batches and plan of one layout."""

    staged: StagedModel
    run: PipelineRun
    memory: tuple[StageMemory, ...]
    """By stage."""

    @property
    def degrees(self) -> dict[str, int]:
        """Replicas, GPUs that split a layer, and stages."""
        return {"dp": self.staged.data_parallel_size, "tp": self.staged.tp, "pp": self.run.size.stages}

    @property
    def largest(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.memory, key=lambda stage: stage.peak_bytes)

    @property
    def fits(self) -> bool:
        """True if every stage fits on its GPUs."""
        return all(stage.verdict == FITS for stage in self.memory)

    @property
    def seconds(self) -> float:
        """Step time with the geometric means of the planned ranges."""
        return self._seconds(None)

    @property
    def step_seconds(self) -> Range:
        """Step time at both ends of the planned ranges, without the optimizer."""
        return self._seconds(0), self._seconds(1)

    def _seconds(self, end: int | None) -> float:
        size = self.run.size
        run = self.run if end is None else self.staged.simulate(SCHEDULE, size, end)
        return run.makespan_seconds + at_end(self.staged.gradient_seconds(size), end)

    def as_row(self) -> dict[str, Any]:
        """Return the layout as `toolkit recommend --json` prints it."""
        job = self.staged.job
        return {
            "degrees": self.degrees,
            "schedule": SCHEDULE,
            "per_device_train_batch_size": job.per_device_train_batch_size,
            "micro_batches": self.run.size.micro_batches,
            "activation_checkpointing": job.activation_checkpointing,
            "bubble_fraction": self.run.bubble_fraction,
            "step_seconds": list(self.step_seconds),
            "planned_peak_bytes": [stage.peak_bytes for stage in self.memory],
            "state_bytes": [stage.state_bytes for stage in self.memory],
            "activation_bytes": [stage.held_bytes for stage in self.memory],
        }


def best_pipeline_layout(request: RecommendRequest) -> PipelineLayout | None:
    """Return the fastest layout that fits; None where none does, and for jobs that stages are not planned for."""
    fitting = [layout for layout in pipeline_layouts(request) if layout.fits]
    return min(fitting, key=lambda layout: layout.seconds, default=None)


def pipeline_layouts(request: RecommendRequest) -> Iterator[PipelineLayout]:
    """Yield layouts of at least two stages, with the micro-batches of each up to the first that does not fit."""
    if request.job.lora_r is not None:
        return
    for staged, stages in _divided(request):
        for checkpointing in (False, True):
            for layout in _micro_batches(staged, stages, request.global_batch_size, checkpointing=checkpointing):
                yield layout
                if not layout.fits:
                    break


def _divided(request: RecommendRequest) -> Iterator[tuple[StagedModel, int]]:
    """Degrees whose product is the world size: tensor parallelism in powers of two within a node, then stages."""
    inside = min(request.world_size, request.job.gpus_per_node)
    for tp in (2**power for power in range(inside.bit_length())):
        groups, rest = divmod(request.world_size, tp)
        staged = StagedModel(
            shape=request.shape,
            job=request.job,
            gpu=request.gpu,
            tp=tp,
            network_bytes_per_second=request.network_bytes_per_second,
        )
        try:
            staged.check()
        except ToolkitError:
            continue
        for stages in range(2, min(groups, request.shape.num_layers) + 1):
            if rest == 0 and groups % stages == 0:
                yield replace(staged, data_parallel_size=groups // stages), stages


def _micro_batches(
    staged: StagedModel, stages: int, global_batch_size: int, *, checkpointing: bool
) -> Iterator[PipelineLayout]:
    """Micro-batches in powers of two that leave 1F1B one per stage, or more."""
    share, rest = divmod(global_batch_size, staged.data_parallel_size)
    rows = 1
    while not rest and share % rows == 0 and share // rows >= stages:
        count = share // rows
        job = replace(
            staged.job,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count,
            activation_checkpointing=checkpointing,
        )
        rows *= 2
        if count <= MOST_MICRO_BATCHES:
            divided = replace(staged, job=job)
            run = divided.simulate(SCHEDULE, PipelineSize(stages=stages, micro_batches=count))
            yield PipelineLayout(staged=divided, run=run, memory=tuple(divided.stage_memory(run)))


@dataclass(frozen=True, kw_only=True)
class TrainedPipeline:
    """What the preset of real pipelines can do for a job that is planned on paper."""

    candidate: Candidate | None
    """Its best degrees and micro-batch; None where it cannot train the job."""
    why_not: str | None
    """What is missing."""

    @classmethod
    def of(cls, request: RecommendRequest) -> Self:
        """Plan the preset at every number of stages."""
        preset = load_preset(TRAINED_PRESET)
        found = best_candidates(request, [preset], purpose="plan")
        if not found:
            return cls(candidate=None, why_not=why_refused(request, preset, purpose="plan"))
        if not found[0].fits:
            return cls(candidate=None, why_not=memory_refusal(request, found[0]).removeprefix("it "))
        return cls(candidate=found[0], why_not=None)

    def as_row(self, request: RecommendRequest, model: str) -> dict[str, Any]:
        """Return the answer as `toolkit recommend --json` prints it."""
        if self.candidate is None:
            return {"preset": TRAINED_PRESET, "command": None, "why_not": self.why_not}
        command = train_command(self.candidate, request, model)
        return {"preset": TRAINED_PRESET, "command": command, "degrees": self.candidate.job.degrees}

    def lines(self, request: RecommendRequest, model: str) -> list[str]:
        """Return the answer as lines of text."""
        if self.candidate is None:
            return [f"Preset {TRAINED_PRESET}, {WITHOUT}, does not train it: {self.why_not}."]
        peak = gib(self.candidate.memory.planned_peak_bytes)
        fits = f"{self.candidate.settings}; planned peak {peak} of {gib(request.gpu.memory_bytes)}"
        return [
            f"Preset {TRAINED_PRESET}, {WITHOUT}, trains it: {fits}.",
            f"  {train_command(self.candidate, request, model)}",
        ]


def layout_json(layout: PipelineLayout, request: RecommendRequest, *, model: str, error: NothingFits) -> dict[str, Any]:
    """Return what `toolkit recommend --json` prints in place of a recommendation: `choice` is null."""
    return {
        "model": model,
        "model_type": request.shape.model_type,
        "num_params": request.shape.num_params,
        "gpu": request.gpu.name,
        "world_size": request.world_size,
        "choice": None,
        "why_no_choice": error.message,
        "way_out": error.hint,
        "pipeline_layout": layout.as_row(),
        "trained_pipeline": TrainedPipeline.of(request).as_row(request, model),
    }


def layout_lines(layout: PipelineLayout, request: RecommendRequest, *, model: str, error: NothingFits) -> list[str]:
    """Return the layout as lines of text: degrees, step, and memory by stage."""
    job, (fast, slow) = layout.staged.job, layout.step_seconds
    degrees = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
    settings = f"{layout.run.size.micro_batches} micro-batches of {job.per_device_train_batch_size}"
    settings += ", activation checkpointing" if job.activation_checkpointing else ""
    lines = [
        f"no preset: {error.message}",
        f"on paper:  {degrees} (data x tensor x pipeline parallelism), {SCHEDULE}, {settings}",
        f"           largest stage {gib(layout.largest.peak_bytes)} of {gib(request.gpu.memory_bytes)},"
        f" step {seconds(fast)} to {seconds(slow)}, bubble {100 * layout.run.bubble_fraction:.1f} %",
        "",
        f"{'stage':<8}{'in flight':>10}{'model states':>14}{'activations':>14}{'peak':>12}",
    ]
    for number, (in_flight, stage) in enumerate(zip(layout.run.peak_micro_batches, layout.memory, strict=True)):
        sizes = f"{gib(stage.state_bytes):>14}{gib(stage.held_bytes):>14}{gib(stage.peak_bytes):>12}"
        lines.append(f"{number:<8}{in_flight:>10g}{sizes}")
    way_out = "" if error.hint is None else f" For a preset: {error.hint}."
    lines += ["", *TrainedPipeline.of(request).lines(request, model)]
    return [*lines, "", f"No figure is measured.{way_out}"]
