"""Data x tensor x pipeline parallelism on paper, for a model that no preset fits on the GPUs.

    layout = best_pipeline_layout(recommend_request("Qwen/Qwen2.5-72B", options))

Each layout is one of `toolkit.simulate.stage_plans`: stages planned like small models, 1F1B simulated with their times,
and gradients summed over the replicas after the last backward. Of those whose largest stage fits, the fastest is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.plan.candidates import Candidate, RecommendRequest, best_candidates
from toolkit.plan.recommend import NothingFits, memory_refusal, train_command, why_refused
from toolkit.presets.preset import load_preset
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.pipeline_step import PipelineRun
from toolkit.simulate.stage_plans import StagedModel, StageMemory, at_end
from toolkit.units import gib, seconds

SCHEDULE = "1f1b"
"""The schedule of least memory that needs no split backward."""
MOST_MICRO_BATCHES = 4096
TRAINED_PRESET = "pipeline_1f1b"


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Degrees, micro-batches and plan of one layout."""

    staged: StagedModel
    run: PipelineRun
    memory: list[StageMemory]
    """By stage."""

    @property
    def degrees(self) -> dict[str, int]:
        """Replicas, GPUs that split a layer, and stages."""
        return {"dp": self.staged.data_parallel_size, "tp": self.staged.tp, "pp": self.run.size.stages}

    @property
    def fits(self) -> bool:
        """True if every stage fits on its GPUs."""
        return all(stage.fits for stage in self.memory)

    def step_seconds(self, end: int | None = None) -> float:
        """Return the step time at one end of the planned ranges, or with their means; without the optimizer."""
        run = self.run if end is None else self.staged.simulate(SCHEDULE, self.run.size, end)
        return run.makespan_seconds + at_end(self.staged.gradient_seconds(run.size), end)

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
            "step_seconds": [self.step_seconds(0), self.step_seconds(1)],
            "planned_peak_bytes": [stage.peak_bytes for stage in self.memory],
            "state_bytes": [stage.state_bytes for stage in self.memory],
            "activation_bytes": [stage.held_bytes for stage in self.memory],
        }


def best_pipeline_layout(request: RecommendRequest) -> PipelineLayout | None:
    """Return the fastest layout that fits; None where none does, and for jobs that stages are not planned for."""
    fitting = [layout for layout in pipeline_layouts(request) if layout.fits]
    return min(fitting, key=PipelineLayout.step_seconds, default=None)


def pipeline_layouts(request: RecommendRequest) -> Iterator[PipelineLayout]:
    """Yield layouts of at least two stages, with the micro-batches of each up to the first that does not fit.

    Their degrees multiply to the world size: tensor parallelism in powers of two within a node, then stages.
    """
    if request.job.lora_r is not None:
        return
    network = request.network_bytes_per_second
    alone = StagedModel(shape=request.shape, job=request.job, gpu=request.gpu, network_bytes_per_second=network)
    for power in range(min(request.world_size, request.job.gpus_per_node).bit_length()):
        groups, rest = divmod(request.world_size, 2**power)
        staged = replace(alone, tp=2**power)
        try:
            staged.check()
        except ToolkitError:
            continue
        for stages in range(2, min(groups, request.shape.num_layers) + 1):
            if rest == 0 and groups % stages == 0:
                divided = replace(staged, data_parallel_size=groups // stages)
                for checkpointing in (False, True):
                    yield from _fitting(divided, stages, request.global_batch_size, checkpointing=checkpointing)


def _fitting(
    staged: StagedModel, stages: int, global_batch_size: int, *, checkpointing: bool
) -> Iterator[PipelineLayout]:
    """Micro-batches in powers of two that leave 1F1B one per stage, or more; the last may not fit."""
    share, rest = divmod(global_batch_size, staged.data_parallel_size)
    rows = 1
    while not rest and share % rows == 0 and share // rows >= stages:
        count = share // rows
        job = replace(staged.job, per_device_train_batch_size=rows, gradient_accumulation_steps=count)
        rows *= 2
        if count > MOST_MICRO_BATCHES:
            continue
        divided = replace(staged, job=replace(job, activation_checkpointing=checkpointing))
        run = divided.simulate(SCHEDULE, PipelineSize(stages=stages, micro_batches=count))
        layout = PipelineLayout(staged=divided, run=run, memory=divided.stage_memory(run))
        yield layout
        if not layout.fits:
            return


def trained_pipeline(request: RecommendRequest) -> tuple[Candidate | None, str | None]:
    """Return the best degrees and micro-batch of the preset that trains pipelines, or why it cannot train the job."""
    preset = load_preset(TRAINED_PRESET)
    found = best_candidates(request, [preset], purpose="plan")
    if not found:
        return None, why_refused(request, preset, purpose="plan")
    if not found[0].fits:
        return None, memory_refusal(request, found[0]).removeprefix("it ")
    return found[0], None


def layout_json(layout: PipelineLayout, request: RecommendRequest, *, model: str, error: NothingFits) -> dict[str, Any]:
    """Return what `toolkit recommend --json` prints in place of a recommendation: `choice` is null."""
    candidate, why_not = trained_pipeline(request)
    trained: dict[str, Any] = {"preset": TRAINED_PRESET, "command": None, "why_not": why_not}
    if candidate is not None:
        trained = {"preset": TRAINED_PRESET, "command": train_command(candidate, request, model)}
        trained["degrees"] = candidate.job.degrees
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
        "trained_pipeline": trained,
    }


def layout_lines(layout: PipelineLayout, request: RecommendRequest, *, model: str, error: NothingFits) -> list[str]:
    """Return the layout as lines of text: degrees, step, memory by stage, and the preset that trains pipelines."""
    job, memory = layout.staged.job, gib(request.gpu.memory_bytes)
    fast, slow = (seconds(layout.step_seconds(end)) for end in (0, 1))
    degrees = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
    settings = f"{layout.run.size.micro_batches} micro-batches of {job.per_device_train_batch_size}"
    settings += ", activation checkpointing" if job.activation_checkpointing else ""
    lines = [
        f"no preset: {error.message}",
        f"on paper:  {degrees} (data x tensor x pipeline parallelism), {SCHEDULE}, {settings}",
        f"           largest stage {gib(max(stage.peak_bytes for stage in layout.memory))} of {memory},"
        f" step {fast} to {slow}, bubble {100 * layout.run.bubble_fraction:.1f} %",
        "",
        f"{'stage':<8}{'in flight':>10}{'model states':>14}{'activations':>14}{'peak':>12}",
    ]
    for number, (in_flight, stage) in enumerate(zip(layout.run.peak_micro_batches, layout.memory, strict=True)):
        sizes = f"{gib(stage.state_bytes):>14}{gib(stage.held_bytes):>14}{gib(stage.peak_bytes):>12}"
        lines.append(f"{number:<8}{in_flight:>10g}{sizes}")
    candidate, why_not = trained_pipeline(request)
    preset = f"Preset {TRAINED_PRESET}, which has neither tensor parallelism nor sharded optimizer states,"
    if candidate is None:
        lines += ["", f"{preset} does not train it: {why_not}."]
    else:
        peak = gib(candidate.memory.planned_peak_bytes)
        lines += ["", f"{preset} trains it: {candidate.settings}; planned peak {peak} of {memory}."]
        lines.append(f"  {train_command(candidate, request, model)}")
    return [*lines, "", "No figure is measured." + ("" if error.hint is None else f" For a preset: {error.hint}.")]
