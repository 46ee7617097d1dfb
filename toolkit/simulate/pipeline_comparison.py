"""Schedules side by side: from the options of `toolkit simulate pipeline` to simulated steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import ToolkitError
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, INTERLEAVED_CHUNKS, ONE_F_ONE_B
from toolkit.simulate.options import PipelineOptions
from toolkit.simulate.pipeline_schedules import (
    SCHEDULES,
    V_SHAPED,
    PipelineSize,
    check_schedule,
    chunks_of,
)
from toolkit.simulate.pipeline_step import PREDICTED_OVER_MEASURED, ChunkTimes, PipelineRun, simulate
from toolkit.units import gib

if TYPE_CHECKING:
    from toolkit.simulate.stage_plans import StagedModel, StageMemory

WHOLE_BACKWARD = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
"""Schedules that never split a backward."""
OF_TIMES = ("forward_ms", "backward_ms", "weight_ms", "transfer_ms", "num_layers")
OF_A_MODEL = ("gpu", "gpu_memory_gib", "gpu_tflops", "tp", "activation_checkpointing")
LONGEST_MS = 1e7  # hours: more is a unit mixed up
EQUAL_MS = 1.0
MOST_LAYERS = 2**16


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """One step of one schedule, and with a model what the plan adds."""

    run: PipelineRun
    step_seconds_range: tuple[float, float] | None = None
    """Steps at both ends of the planned times; None for given times."""
    memory: tuple[StageMemory, ...] | None = None
    """By stage; None without a model."""

    @property
    def largest(self) -> StageMemory | None:
        """The stage that needs most memory."""
        return None if self.memory is None else max(self.memory, key=lambda stage: stage.peak_bytes)

    def as_row(self) -> dict[str, Any]:
        """Return the schedule as `toolkit simulate pipeline --json` prints it."""
        run, size, memory = self.run, self.run.size, self.memory
        row: dict[str, Any] = {
            "schedule": run.order.schedule,
            "stages": size.stages,
            "micro_batches": size.micro_batches,
            "chunks": size.chunks,
            "step_seconds": run.step_seconds,
            "makespan_seconds": run.makespan_seconds,
            "bubble_fraction": run.bubble_fraction,
            "peak_micro_batches": list(run.peak_micro_batches),
            "chunk_seconds": [list(times.by_kind()) for times in run.times],
        }
        if memory is not None:
            row["step_seconds_range"] = list(self.step_seconds_range or ())
            row["peak_bytes"] = [stage.peak_bytes for stage in memory]
            row["state_bytes"] = [stage.state_bytes for stage in memory]
            row["activation_bytes"] = [stage.held_bytes for stage in memory]
            row["verdict"] = [stage.verdict for stage in memory]
        return row


@dataclass(frozen=True, kw_only=True)
class PipelineComparison:
    """Simulated steps of several schedules with the same stages, micro-batches and times."""

    heading: str
    schedules: tuple[SimulatedSchedule, ...]
    left_out: tuple[str, ...] = ()
    """Why schedules are missing that were not named."""
    staged: StagedModel | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what `toolkit simulate pipeline --json` prints."""
        return {
            "schedules": [each.as_row() for each in self.schedules],
            "left_out": list(self.left_out),
            "predicted_over_measured": list(PREDICTED_OVER_MEASURED),
        }


def compare_schedules(options: PipelineOptions) -> PipelineComparison:
    """Return the schedules that were named, or all that are possible.

    Raises ToolkitError for an impossible schedule that was named, and for values out of range.
    """
    staged = _staged(options)
    times = given_times(options)
    transfer_seconds = _seconds("--transfer-ms", options.transfer_ms or 0.0)
    possible, left_out = _possible(options, options.num_layers if staged is None else staged.shape.num_layers)
    schedules = []
    for schedule, size in possible:
        if staged is not None:
            run = staged.simulate(schedule, size)
            fast, slow = (staged.simulate(schedule, size, end).step_seconds for end in (0, 1))
            memory = tuple(staged.stage_memory(run))
            schedules.append(SimulatedSchedule(run=run, step_seconds_range=(fast, slow), memory=memory))
        else:
            chunks = [times.divided(size.chunks)] * size.num_chunks
            schedules.append(SimulatedSchedule(run=simulate(schedule, size, chunks, transfer_seconds=transfer_seconds)))
    heading = _times_text(times, transfer_seconds) if staged is None else _model_text(staged)
    return PipelineComparison(
        heading=f"{options.stages} stages, {options.micro_batches} micro-batches; {heading}",
        schedules=tuple(schedules),
        left_out=tuple(left_out),
        staged=staged,
    )


def _possible(options: PipelineOptions, num_layers: int | None) -> tuple[list[tuple[str, PipelineSize]], list[str]]:
    """Named schedules, or those of all that are possible; `--chunks` is that of the interleaved one, and 2 for a V."""
    possible, left_out = [], []
    given = INTERLEAVED_CHUNKS if options.chunks is None else options.chunks
    for schedule in dict.fromkeys(options.schedule or SCHEDULES):
        is_named_v = schedule in V_SHAPED and schedule in options.schedule
        chunks = given if is_named_v else chunks_of(schedule, given)
        size = PipelineSize(stages=options.stages, micro_batches=options.micro_batches, chunks=chunks)
        try:
            check_schedule(schedule, size)
            check_layers(num_layers, size)
            if options.backward_ms is not None and options.weight_ms is None and schedule not in WHOLE_BACKWARD:
                raise ToolkitError(
                    f"{schedule} splits the backward, but --weight-ms is missing",
                    hint="--backward-ms for the gradient of the input, --weight-ms for that of the weights",
                )
        except ToolkitError as error:
            if options.schedule or schedule == GPIPE:  # whatever rules out GPipe rules out all of them
                raise
            left_out.append(f"{schedule}: {error.message}")
        else:
            possible.append((schedule, size))
    return possible, left_out


def chunks_without_effect(options: PipelineOptions) -> bool:
    """Return True if `--chunks` was given, and no named schedule has several chunks per stage."""
    chunked = (INTERLEAVED, *V_SHAPED)
    return options.chunks not in (None, 1) and not set(options.schedule or SCHEDULES) & set(chunked)


def check_layers(num_layers: int | None, size: PipelineSize) -> None:
    """Raise ToolkitError for fewer layers than chunks, and for layers that the chunks of a stage do not divide."""
    if num_layers is None:
        return
    if num_layers < size.num_chunks:
        chunks = "" if size.chunks == 1 else f" of {size.chunks} chunks"
        raise ToolkitError(
            f"{num_layers} layers are too few for {size.stages} stages{chunks}",
            hint=f"`--stages {max(1, num_layers // size.chunks)}` or fewer",
        )
    if size.chunks > 1 and num_layers % size.num_chunks:
        raise ToolkitError(
            f"{num_layers} layers are not divisible by {size.stages} stages of {size.chunks} chunks",
            hint="other --stages or --chunks, or a schedule with one chunk per stage",
        )


def _staged(options: PipelineOptions) -> StagedModel | None:
    """None without a model; a flag that has no effect with one, or without, is refused."""
    if options.model is not None:
        from toolkit.simulate.stage_plans import staged_model  # the planner takes as long to import as all the rest

        if flag := _first_given(options, OF_TIMES):
            raise ToolkitError(f"{flag} has no effect with --model, which has its own", hint="give one of them")
        return staged_model(options.model, options)
    if flag := _first_given(options, OF_A_MODEL):
        raise ToolkitError(f"{flag} has no effect without --model", hint="`--model MODEL`")
    if options.num_layers is not None and not 1 <= options.num_layers <= MOST_LAYERS:
        raise ToolkitError(f"--num-layers is {options.num_layers:,}, expected 1 to {MOST_LAYERS:,}")
    return None


def _first_given(options: PipelineOptions, names: Sequence[str]) -> str | None:
    given = (name for name in names if getattr(options, name) != getattr(PipelineOptions, name))
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def given_times(options: PipelineOptions) -> ChunkTimes:
    """Return the times of a stage from the flags: all of them, those of a whole backward, or equal ones."""
    forward, backward, weight = options.forward_ms, options.backward_ms, options.weight_ms
    if forward is backward is weight is None:
        forward = backward = weight = EQUAL_MS
    if forward is None or backward is None:
        missing = "--forward-ms" if forward is None else "--backward-ms"
        raise ToolkitError(f"{missing} is missing", hint="give --forward-ms and --backward-ms, or none of the times")
    times = ChunkTimes(
        forward_seconds=_seconds("--forward-ms", forward),
        backward_seconds=_seconds("--backward-ms", backward),
        weight_seconds=_seconds("--weight-ms", weight or 0.0),
    )
    for option, value in (("--forward-ms", forward), ("--backward-ms", backward)):
        if not value:
            raise ToolkitError(f"{option} is {value:g}, expected more than 0")
    return times


def _seconds(option: str, milliseconds: float) -> float:
    if not (math.isfinite(milliseconds) and 0 <= milliseconds <= LONGEST_MS):
        raise ToolkitError(f"{option} is {milliseconds:g}, expected 0 to {LONGEST_MS:,.0f} milliseconds")
    return milliseconds / 1000


def _times_text(times: ChunkTimes, transfer_seconds: float) -> str:
    parts = [("forward", times.forward_seconds), ("backward", times.backward_seconds)]
    parts += [("weight gradient", times.weight_seconds), ("transfer", transfer_seconds)]
    return ", ".join(f"{name} {value * 1000:g} ms" for name, value in parts)


def _model_text(staged: StagedModel) -> str:
    shape, job = staged.shape, staged.job
    parts = [
        f"{shape.model_type}, {shape.num_params:,} parameters, {shape.num_layers} layers",
        f"{job.per_device_train_batch_size} x {job.max_seq_length} tokens per micro-batch",
        "activation checkpointing" if job.activation_checkpointing else "",
        f"tp {staged.tp}" if staged.tp > 1 else "",
        f"{staged.gpu.name}, {gib(staged.gpu.memory_bytes)}",
    ]
    return "; ".join(part for part in parts if part)
