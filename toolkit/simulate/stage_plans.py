"""Times and memory of a model's pipeline stages, from the planner: each stage is planned like a small model of its own.

Layers are divided as those of the preset `pipeline_1f1b`, and other micro-batches wait in the same memory plan
(`toolkit.plan.training_setup`). Model states are those of `zero1`, where the preset has those of `ddp`: bf16 weights
and gradients, and fp32 master weights and Adam's states sharded over the data parallel ranks (Megatron's distributed
optimizer).

Where no preset fits a model, layouts of data x tensor x pipeline parallelism are such stages: 1F1B is simulated with
their times, and gradients are summed over the replicas after the last backward.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from toolkit.engines.engine import EngineSettings
from toolkit.engines.planned import Collective
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, chosen_gpu
from toolkit.models.flops import flops_of
from toolkit.models.read_model import check_unquantized, read_model
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan import candidates, planned_job
from toolkit.plan.candidates import Candidate, NothingFits, RecommendRequest
from toolkit.plan.communication import split_collectives
from toolkit.plan.interconnect import Interconnect, Range
from toolkit.plan.memory import FITS, fit_verdict, plan_engine_memory
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.recommended_commands import broken, train_command
from toolkit.plan.step_parts import compute_seconds
from toolkit.plan.step_time import SPREAD
from toolkit.plan.training_setup import StageLoad, TrainingSetup, engine_settings, model_part
from toolkit.presets.preset import load_preset
from toolkit.presets.support import check_supported
from toolkit.simulate.options import PipelineOptions
from toolkit.simulate.pipeline_schedules import ChunkTimes, PipelineRun, PipelineSize, simulate
from toolkit.units import gib, seconds

STATES_LIKE = "zero1"
SPLIT_LIKE = "fsdp2_tp"  # its tensor parallelism within a stage; on two replicas, so that it computes in bf16
BF16_BYTES = 2
SCHEDULE = "1f1b"  # of least memory
MOST_MICRO_BATCHES = 4096
TRAINED_PRESET = "pipeline_1f1b"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Memory of one GPU of a stage."""

    peak_bytes: int
    state_bytes: int  # weights, gradients and optimizer states; and the weights of a reference
    activation_bytes: int  # those in the forward of the last micro-batch in flight, of all of them
    verdict: str

    @property
    def fits(self) -> bool:
        return self.verdict == FITS


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model whose layers are divided among stages, on GPUs of one kind."""

    shape: ModelShape
    job: PlannedJob  # one micro-batch: sequences, length, activation checkpointing
    gpu: Gpu
    tp: int = 1  # GPUs that split each layer of a stage
    data_parallel_size: int = 1  # replicas of the pipeline, which shard the optimizer's states
    network_bytes_per_second: int | None = None

    @property
    def heading(self) -> str:
        """Model, micro-batch and GPU in one line."""
        shape, job = self.shape, self.job
        parts = [
            f"{shape.model_type}, {shape.num_params:,} parameters, {shape.num_layers} layers",
            f"{job.rows} x {job.tokens_per_row} tokens per micro-batch",
            "" if job.method.method == SFT else job.method.method.upper(),
            "activation checkpointing" if job.activation_checkpointing else "",
            f"tp {self.tp}" if self.tp > 1 else "",
            f"{self.gpu.name}, {gib(self.gpu.memory_bytes)}",
        ]
        return "; ".join(filter(None, parts))

    def check(self) -> None:
        """Raise ToolkitError for a model without formulas, a GPU of unknown speed, or heads that tp does not divide."""
        if self.shape.activations_from != "formulas":
            what = f"stages of {self.shape.model_type} cannot be planned: there are no formulas for its activations"
            raise ToolkitError(what, hint="give --forward-ms and --backward-ms instead of --model")
        if self.job.method.generates:
            what = f"--method {self.job.method.method} generates, which the stages of a pipeline are not planned to do"
            raise ToolkitError(what, hint="`toolkit plan MODEL --method ...` has its memory under other presets")
        if self.gpu.peak_flops("bf16") is None:
            raise ToolkitError(f"the bf16 peak of {self.gpu.name} is unknown", hint="`--gpu-tflops`")
        if self.tp > 1:
            split = self._split(self.shape)
            job, model = split.job.as_trained, split.job.limits_on(self.shape)
            check_supported(split.preset, job, world_size=split.world_size, model=model, purpose="plan")

    def part(self, size: PipelineSize, *chunks: int) -> ModelShape:
        """Return the model with the layers of some chunks only."""
        return self.job.method.model(model_part(self.shape, size.num_chunks, chunks))

    def chunk_times(self, size: PipelineSize, end: int | None = None) -> list[ChunkTimes]:
        """Return the times of each chunk: at the fast end (0) or the slow one (1) of the plan, or their mean."""
        parts = [self.part(size, chunk) for chunk in range(size.num_chunks)]
        distinct = {(part.layers, part.outer): part for part in parts}
        times = {tensors: self._times(part, end) for tensors, part in distinct.items()}
        return [times[part.layers, part.outer] for part in parts]

    def simulate(self, schedule: str, size: PipelineSize, end: int | None = None) -> PipelineRun:
        """Return one step at one end of the planned range, or with the geometric means of both.

        If the pipeline leaves a node, activations travel as if all GPUs of a node sent to the next one at once.
        """
        per_stage, per_node = self.tp * self.data_parallel_size, self.job.gpus_per_node
        activations = Collective(
            name="permute",
            purpose="activations of a stage",
            payload_bytes=BF16_BYTES * self.job.tokens_per_forward * self.shape.hidden_size,
            group_size=2,
            group="pp",
            stride=per_node if size.stages * per_stage > per_node else per_stage,
        )
        transfer = at_end(self._interconnect(size.stages).seconds(activations), end)
        return simulate(schedule, size, self.chunk_times(size, end), transfer_seconds=transfer)

    def gradient_seconds(self, size: PipelineSize) -> Range:
        """Return the seconds in which the replicas of the largest stage sum their gradients, once per step."""
        if self.data_parallel_size == 1:
            return 0.0, 0.0
        largest = max(self.part(size, chunk).num_params for chunk in range(size.num_chunks)) * size.chunks
        gradients = Collective(
            name="all_reduce",
            purpose="gradients",
            payload_bytes=BF16_BYTES * largest // self.tp,
            group_size=self.data_parallel_size,
            stride=self.tp,
        )
        return self._interconnect(size.stages).seconds(gradients)

    def stage_memory(self, run: PipelineRun) -> list[StageMemory]:
        """Return the memory of each stage of a simulated step."""
        num_chunks, stages = run.size.num_chunks, []
        for stage, in_flight in enumerate(run.peak_micro_batches):
            chunks = range(stage, num_chunks, run.size.stages)
            with_head = run.peak_held(stage, [0] * (num_chunks - 1) + [1])
            load = StageLoad(micro_batches_in_flight=in_flight, logits_in_flight=max(0, with_head - 1))
            plan = plan_engine_memory(self.part(run.size, *chunks), self._engine, self.job, load=load)
            peak, states = plan.planned_peak_bytes, plan.states.total_bytes + plan.peak.reference_bytes
            held = next(phase.activation_bytes for phase in plan.phases if phase.phase == "forward")
            verdict = fit_verdict(planned_peak_bytes=peak, exact_bytes=states, memory_bytes=self.gpu.memory_bytes)
            stages.append(StageMemory(peak_bytes=peak, state_bytes=states, activation_bytes=held, verdict=verdict))
        return stages

    def _times(self, shape: ModelShape, end: int | None) -> ChunkTimes:
        """Compute in proportion to the operations of each part; half of the exchanges of split layers in each pass.

        Forwards without a graph, of a reference, come before each forward.
        """
        peak, job = self.gpu.peak_flops("bf16"), self.job
        assert peak is not None
        recompute, tokens = job.activation_checkpointing, job.tokens_per_forward
        counted = partial(flops_of, shape, seq_length=job.tokens_per_row, recompute=recompute, count_embeddings=False)
        flops, causal = counted(), counted(causal=True)
        compute = compute_seconds(
            self.gpu, shape, job, peak=peak, tokens=tokens / self.tp, own_tokens=tokens, flops=causal, tp=self.tp
        )
        seconds = at_end((compute / math.exp(SPREAD), compute * math.exp(SPREAD)), end) / max(flops.hardware_flops, 1)
        collectives = split_collectives(self._split(shape)) if self.tp > 1 else []
        ranges = [self._interconnect(1).seconds(collective) for collective in collectives]
        exchange = at_end((sum(low for low, _ in ranges), sum(high for _, high in ranges)), end) / 2
        backward = flops.recomputed + flops.attention_backward + flops.dense_backward
        return ChunkTimes(
            forward_seconds=(1 + job.method.scoring_forwards) * (seconds * flops.forward_flops + exchange),
            backward_seconds=seconds * backward + exchange,
        )

    @cached_property
    def _engine(self) -> EngineSettings:
        preset, replicas = load_preset(STATES_LIKE), self.data_parallel_size
        engine = engine_settings(preset, world_size=replicas, hidden_size=self.shape.hidden_size)
        return replace(engine, layout=ParallelLayout(dp_shard=replicas, tp=self.tp))

    def _split(self, shape: ModelShape) -> TrainingSetup:
        """Two replicas of tensor parallel ranks, in which the layers of a stage are split."""
        job = replace(self.job, tp=self.tp, gradient_accumulation_steps=1)
        return TrainingSetup(shape=shape, preset=load_preset(SPLIT_LIKE), world_size=2 * self.tp, job=job)

    def _interconnect(self, stages: int) -> Interconnect:
        gpus, per_node = stages * self.tp * self.data_parallel_size, self.job.gpus_per_node
        return Interconnect(
            gpu=self.gpu,
            world_size=gpus if gpus <= per_node else math.ceil(gpus / per_node) * per_node,
            gpus_per_node=per_node,
            network_bytes_per_second=self.network_bytes_per_second,
        )


def at_end(seconds: Range, end: int | None) -> float:
    """Return one end of a range (0 or 1), or the geometric mean of both.

    >>> at_end((1.0, 4.0), None)
    2.0
    """
    return math.sqrt(seconds[0] * seconds[1]) if end is None else seconds[end]


def staged_model(options: PipelineOptions) -> StagedModel:
    """Return `--model`, whose stages are to be planned. Raises ToolkitError for what cannot be planned."""
    planned_job.check_size("--tp", options.tp, planned_job.LARGEST_DEGREE)
    assert options.model is not None
    check_unquantized(options.model)
    shape = read_model(options.model)
    job = PlannedJob.from_options(options, full_length=True)
    job = replace(job, tp=None, gradient_accumulation_steps=options.micro_batches)
    planned_job.check_planned_job(job, shape)
    gpu = chosen_gpu(options.gpu, memory_gib=options.gpu_memory_gib, tflops=options.gpu_tflops)
    staged = StagedModel(shape=shape, job=job, gpu=gpu, tp=options.tp)
    staged.check()
    return staged


# -- Layouts for a model that no preset fits


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Degrees, micro-batches and plan of one layout."""

    staged: StagedModel
    run: PipelineRun
    memory: list[StageMemory]  # by stage

    @property
    def degrees(self) -> dict[str, int]:
        """Replicas, GPUs that split a layer, and stages."""
        return {"dp": self.staged.data_parallel_size, "tp": self.staged.tp, "pp": self.run.size.stages}

    @property
    def fits(self) -> bool:
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
            "activation_bytes": [stage.activation_bytes for stage in self.memory],
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
                for checkpointing in (False, True):
                    job = replace(request.job, activation_checkpointing=checkpointing)
                    divided = replace(staged, job=job, data_parallel_size=groups // stages)
                    yield from _fitting(divided, stages, request.global_batch_size)


def _fitting(staged: StagedModel, stages: int, global_batch_size: int) -> Iterator[PipelineLayout]:
    """Micro-batches in powers of two that leave 1F1B one per stage, or more; the last may not fit."""
    share, rest = divmod(global_batch_size, staged.data_parallel_size)
    rows = 1
    while not rest and share % rows == 0 and share // rows >= stages:
        if (count := share // rows) <= MOST_MICRO_BATCHES:
            job = replace(staged.job, per_device_train_batch_size=rows, gradient_accumulation_steps=count)
            divided = replace(staged, job=job)
            run = divided.simulate(SCHEDULE, PipelineSize(stages=stages, micro_batches=count))
            layout = PipelineLayout(staged=divided, run=run, memory=divided.stage_memory(run))
            yield layout
            if not layout.fits:
                return
        rows *= 2


def trained_pipeline(request: RecommendRequest) -> tuple[Candidate | None, str | None]:
    """Return the best degrees and micro-batch of the preset that trains pipelines, or why it cannot train the job."""
    preset = load_preset(TRAINED_PRESET)
    best = next(iter(candidates.best_candidates(request, [preset], purpose="plan")), None)
    if best is None:
        return None, candidates.why_refused(request, preset, purpose="plan")
    return (best, None) if best.fits else (None, candidates.memory_refusal(best).removeprefix("it "))


def layout_json(layout: PipelineLayout, request: RecommendRequest, *, model: str, error: NothingFits) -> dict[str, Any]:
    """Return what `toolkit recommend --json` prints in place of a recommendation: `choice` is null."""
    candidate, why_not = trained_pipeline(request)
    if candidate is None:
        trained: dict[str, Any] = {"command": None, "why_not": why_not}
    else:
        trained = {"command": train_command(candidate, request, model), "degrees": candidate.job.degrees}
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
        "trained_pipeline": {"preset": TRAINED_PRESET, **trained},
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
        sizes = f"{gib(stage.state_bytes):>14}{gib(stage.activation_bytes):>14}{gib(stage.peak_bytes):>12}"
        lines.append(f"{number:<8}{in_flight:>10g}{sizes}")
    candidate, why_not = trained_pipeline(request)
    preset = f"Preset {TRAINED_PRESET}, which has neither tensor parallelism nor sharded optimizer states,"
    if candidate is None:
        lines += ["", f"{preset} does not train it: {why_not}."]
    else:
        peak = gib(candidate.memory.planned_peak_bytes)
        lines += ["", f"{preset} trains it: {candidate.settings}; planned peak {peak} of {memory}."]
        lines.append(broken(train_command(candidate, request, model)))
    return [*lines, "", "No figure is measured." + ("" if error.hint is None else f" For a preset: {error.hint}.")]
