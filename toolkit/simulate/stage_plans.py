"""Times and memory of a model's pipeline stages, from the planner: each stage is planned like a small model of its own.

    shape = read_model("Qwen/Qwen2.5-72B")
    staged = StagedModel(shape=shape, job=job, gpu=find_gpu("h100"), tp=8)
    times = staged.chunk_times(PipelineSize(stages=4, micro_batches=16))

Layers are divided as those of the preset `pipeline_1f1b`, and other micro-batches wait in the same memory plan
(`toolkit.plan.planned_job`). Model states are those of `zero1`, where the preset has those of `ddp`: bf16 weights
and gradients, and fp32 master weights and Adam's states sharded over the data parallel ranks (Megatron's distributed
optimizer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, custom_gpu, named_or_visible_gpu
from toolkit.models.flops import flops_of
from toolkit.models.read_model import check_unquantized, read_model
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import ParallelLayout
from toolkit.plan.communication import split_collectives
from toolkit.plan.engine_settings import EngineSettings, engine_settings
from toolkit.plan.interconnect import Collective, Interconnect, Range
from toolkit.plan.memory import FITS, fit_verdict, plan_engine_memory
from toolkit.plan.planned_job import PlannedJob, StageLoad, TrainingSetup, check_planned_job, check_size, model_part
from toolkit.plan.step_time import compute_seconds
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.presets.support import check_supported
from toolkit.simulate.options import PipelineOptions
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.pipeline_step import ChunkTimes, PipelineRun, simulate
from toolkit.units import gib

STATES_LIKE = "zero1"
SPLIT_LIKE = "fsdp2_tp"
"""Preset whose tensor parallelism is planned within a stage; on two replicas, so that it computes in bf16."""
BF16_BYTES = 2
LARGEST_TP = 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Memory of one GPU of a stage."""

    peak_bytes: int
    state_bytes: int
    """Weights, gradients and optimizer states."""
    held_bytes: int
    """Activations in the forward of the last micro-batch in flight, of all of them."""
    verdict: str

    @property
    def fits(self) -> bool:
        return self.verdict == FITS


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model whose layers are divided among stages, on GPUs of one kind."""

    shape: ModelShape
    job: PlannedJob
    """One micro-batch: sequences, length, activation checkpointing."""
    gpu: Gpu
    tp: int = 1
    """GPUs that split each layer of a stage."""
    data_parallel_size: int = 1
    """Replicas of the pipeline, which shard the optimizer's states."""
    network_bytes_per_second: int | None = None

    @property
    def heading(self) -> str:
        """Model, micro-batch and GPU in one line."""
        shape, job = self.shape, self.job
        parts = [
            f"{shape.model_type}, {shape.num_params:,} parameters, {shape.num_layers} layers",
            f"{job.per_device_train_batch_size} x {job.tokens_per_row} tokens per micro-batch",
            "activation checkpointing" if job.activation_checkpointing else "",
            f"tp {self.tp}" if self.tp > 1 else "",
            f"{self.gpu.name}, {gib(self.gpu.memory_bytes)}",
        ]
        return "; ".join(filter(None, parts))

    def check(self) -> None:
        """Raise ToolkitError for a model without formulas, a GPU of unknown speed, or heads that tp does not divide."""
        if self.shape.activations_from != "formulas":
            what = f"stages of {self.shape.model_type} cannot be planned: there are no formulas for its activations"
            raise ToolkitError(what, hint="give --forward-ms, --backward-ms and --weight-ms instead of --model")
        if self.gpu.peak_flops("bf16") is None:
            raise ToolkitError(f"the bf16 peak of {self.gpu.name} is unknown", hint="`--gpu-tflops`")
        if self.tp > 1:
            job, model = self._split_job, self._split_job.limits_on(self.shape)
            check_supported(self._split_preset, job.as_trained, world_size=2 * self.tp, model=model, purpose="plan")

    def part(self, size: PipelineSize, *chunks: int) -> ModelShape:
        """Return the model with the layers of some chunks only."""
        return model_part(self.shape, size.num_chunks, chunks)

    def chunk_times(self, size: PipelineSize, end: int | None = None) -> list[ChunkTimes]:
        """Return the times of each chunk: at the fast end (0) or the slow one (1) of the plan, or their mean."""
        parts = [self.part(size, chunk) for chunk in range(size.num_chunks)]
        by_tensors = {(part.layers, part.outer): part for part in parts}
        times = {tensors: self._times(part, end) for tensors, part in by_tensors.items()}
        return [times[part.layers, part.outer] for part in parts]

    def transfer_seconds(self, size: PipelineSize) -> Range:
        """Return the seconds in which the activations of a micro-batch reach the next stage.

        If the pipeline leaves a node, as if all GPUs of a node sent to the next one at once.
        """
        per_stage = self.tp * self.data_parallel_size
        leaves_node = size.stages * per_stage > self.job.gpus_per_node
        activations = Collective(
            name="permute",
            purpose="activations of a stage",
            payload_bytes=BF16_BYTES * self.job.tokens_per_micro_batch * self.shape.hidden_size,
            group_size=2,
            group="pp",
            stride=self.job.gpus_per_node if leaves_node else per_stage,
        )
        return self._interconnect(size.stages).seconds(activations)

    def simulate(self, schedule: str, size: PipelineSize, end: int | None = None) -> PipelineRun:
        """Return one step at one end of the planned range, or with the geometric means of both."""
        transfer = at_end(self.transfer_seconds(size), end)
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
            chunks = [chunk for chunk in range(num_chunks) if run.order.stage_of(chunk) == stage]
            with_head = run.peak_held(stage, [0] * (num_chunks - 1) + [1])
            load = StageLoad(micro_batches_in_flight=in_flight, logits_in_flight=max(0, with_head - 1))
            plan = plan_engine_memory(self.part(run.size, *chunks), self._engine, self.job, load=load)
            peak, states = plan.planned_peak_bytes, plan.states.total_bytes
            held = next(phase.activation_bytes for phase in plan.phases if phase.phase == "forward")
            verdict = fit_verdict(planned_peak_bytes=peak, exact_bytes=states, memory_bytes=self.gpu.memory_bytes)
            stages.append(StageMemory(peak_bytes=peak, state_bytes=states, held_bytes=held, verdict=verdict))
        return stages

    def _times(self, shape: ModelShape, end: int | None) -> ChunkTimes:
        """Compute in proportion to the operations of each part; half of the exchanges of split layers in each pass."""
        peak, job = self.gpu.peak_flops("bf16"), self.job
        assert peak is not None
        recompute, tokens = job.activation_checkpointing, job.tokens_per_micro_batch
        flops = flops_of(shape, seq_length=job.tokens_per_row, recompute=recompute, count_embeddings=False)
        total = flops.hardware_flops
        of_rank = round(total * (tokens / self.tp))
        compute = compute_seconds(self.gpu, shape, tp=self.tp, peak=peak, tokens=tokens, flops=of_rank)
        seconds = at_end(compute, end) / max(total, 1)
        exchange = at_end(self._exchange_seconds(shape), end) / 2
        weight = flops.dense_backward // 2
        backward = flops.recomputed + flops.attention_backward + flops.dense_backward - weight
        return ChunkTimes(
            forward_seconds=seconds * flops.forward_flops + exchange,
            backward_seconds=seconds * backward + exchange,
            weight_seconds=seconds * weight,
        )

    def _exchange_seconds(self, shape: ModelShape) -> Range:
        if self.tp == 1:
            return 0.0, 0.0
        setup = TrainingSetup(shape=shape, preset=self._split_preset, world_size=2 * self.tp, job=self._split_job)
        ranges = [self._interconnect(1).seconds(collective) for collective in split_collectives(setup)]
        return sum(low for low, _ in ranges), sum(high for _, high in ranges)

    @cached_property
    def _engine(self) -> EngineSettings:
        preset, replicas = load_preset(STATES_LIKE), self.data_parallel_size
        engine = engine_settings(preset, world_size=replicas, hidden_size=self.shape.hidden_size)
        return replace(engine, layout=ParallelLayout(dp_shard=replicas, tp=self.tp))

    @cached_property
    def _split_preset(self) -> PresetSpec:
        return load_preset(SPLIT_LIKE)

    @property
    def _split_job(self) -> PlannedJob:
        return replace(self.job, tp=self.tp, gradient_accumulation_steps=1)

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


def staged_model(model: str, options: PipelineOptions) -> StagedModel:
    """Return the model whose stages are to be planned. Raises ToolkitError for what cannot be planned."""
    check_size("--tp", options.tp, LARGEST_TP)
    check_unquantized(model)
    shape = read_model(model)
    job = PlannedJob.from_options(options, full_length=True)
    job = replace(job, tp=None, gradient_accumulation_steps=options.micro_batches)
    check_planned_job(job, shape)
    listed = named_or_visible_gpu(options.gpu, has_memory=options.gpu_memory_gib is not None)
    gpu = custom_gpu(listed, memory_gib=options.gpu_memory_gib, tflops=options.gpu_tflops)
    staged = StagedModel(shape=shape, job=job, gpu=gpu, tp=options.tp)
    staged.check()
    return staged
