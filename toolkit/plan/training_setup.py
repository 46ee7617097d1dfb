"""One job on one model under one preset at one world size: the engine's settings, and what a rank has of the model.

transformers 5 fills `auto` of DeepSpeed's settings from the hidden size (`integrations/deepspeed.py`); settings that a
file leaves out have the library's default (deepspeed 0.19.8, `runtime/zero/config.py`). Rank 0 has the largest share of
the model states under every engine; `tests/plan/test_engine_bytes.py` compares all of it with real engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from toolkit.engines.engine import SUB_GROUP, EngineSettings
from toolkit.engines.planned import ModelStates
from toolkit.engines.registry import ENGINES
from toolkit.engines.zero import bf16_keys
from toolkit.models.job_weights import JobWeights
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerSpec
from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.models.split import part_of_rank
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import GPIPE, PipelineSettings, divide_layers
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets.spec import PresetSpec

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET, PREFETCH_BUCKET = 500_000_000, 50_000_000
REUSE_DISTANCE = LIVE_PARAMETERS = 1_000_000_000
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "no": 4}


@dataclass(frozen=True, kw_only=True, eq=False)  # caches keyed by a setup need not compare its job
class TrainingSetup:
    """One job on one model under one preset at one world size: everything that decides communication and step time."""

    shape: ModelShape
    preset: PresetSpec
    world_size: int
    job: PlannedJob = field(default_factory=PlannedJob)
    mixed_precision: str | None = None  # None: the preset's own; `no` for a run on a CPU

    @cached_property
    def engine(self) -> EngineSettings:
        """The preset's engine at this world size, buckets and thresholds in elements."""
        numerics = self.job.numerics
        return engine_settings(
            self.preset,
            world_size=self.world_size,
            hidden_size=self.shape.hidden_size,
            mixed_precision=self.precision,
            layout=self.layout,
            pure_bf16=numerics.pure_bf16 and not (numerics.fsdp2_masters and self.preset.traits.gathers_layers),
            library_buckets=numerics.library_buckets,
        )

    @property
    def precision(self) -> str | None:
        """The compute dtype, where it is not the preset's own."""
        fp16 = self.job.numerics.fp16 and self.preset.mixed_precision != "no"
        return self.mixed_precision or ("fp16" if fp16 else None)

    @property
    def layout(self) -> ParallelLayout | None:
        """How the ranks are divided; None for data parallelism alone."""
        return self.preset.layout(self.world_size, self.job.degrees)

    @property
    def accumulation_steps(self) -> int:
        """Accumulation steps per optimizer step."""
        return self.job.gradient_accumulation_steps

    @property
    def forwards(self) -> int:
        """Forward passes through the layers in an optimizer step: activation checkpointing repeats them."""
        return self.accumulation_steps * (2 if self.job.activation_checkpointing else 1)

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch that one rank holds: a part of each where ranks share sequences."""
        return -(-self.job.tokens_per_forward // self.engine.ranks_per_sequence)

    @cached_property
    def part(self) -> ModelShape:
        """The model as far as one rank computes it, before anything shards it; in a pipeline, the last one."""
        settings = self.job.pipeline
        if settings is not None and self.preset.engine == "pipeline":
            return stage_shape(self.shape, settings, settings.ranks - 1)
        return part_of_rank(self.shape, self.layout)

    @property
    def largest_stage(self) -> int:
        """Parameters of the rank of a pipeline that holds most."""
        settings = self.job.pipeline
        assert settings is not None, "a pipeline is planned with its number of stages"
        return max(stage_shape(self.shape, settings, rank).num_params for rank in range(settings.ranks))

    @property
    def zero_block(self) -> dict[str, Any]:
        """The `zero_optimization` block of the preset's DeepSpeed file; empty for other engines."""
        return self.preset.zero_block

    @cached_property
    def weights(self) -> JobWeights:
        """The tensors of that part, trained and frozen."""
        return self.job.weights(self.part, element_bytes=self.engine.element_bytes)

    @property
    def trained(self) -> tuple[Layer, ...]:
        """Groups of tensors that have gradients."""
        weights = self.weights
        return weights.adapter_units or (*weights.units[:-1], weights.trained_outer)


# -- the engine's settings: sharding, buffers and thresholds from a preset's files, `auto` filled in


def engine_settings(
    preset: PresetSpec,
    *,
    world_size: int,
    hidden_size: int,
    rank: int = 0,
    mixed_precision: str | None = None,
    layout: ParallelLayout | None = None,
    pure_bf16: bool = False,
    library_buckets: bool = False,
) -> EngineSettings:
    """Return the settings for one rank; `mixed_precision` overrides the preset's own, as `--bf16 false` does.

    With `pure_bf16` trained weights are held in bf16, without fp32 masters. DeepSpeed always has masters. With
    `library_buckets` its sizes are the library's, whatever the preset's file says.
    """
    engine, shard_ranks = preset.traits, max(1, world_size // preset.replicas)
    if engine.in_effect(world_size) != engine.name:
        engine = ENGINES[engine.in_effect(world_size)]
    if preset.sharded_at_load and layout is not None:
        if layout.data_parallel_size == 1:
            engine = ENGINES["none"]  # without data parallelism, without FSDP2
        # Ranks that divide a sequence share the model states too: only tensor parallelism splits them before.
        shard_ranks = layout.dp_shard
    return EngineSettings(
        traits=engine,
        sharding=preset.sharding,
        shards_parameters=preset.shards_parameters,
        world_size=world_size,
        shard_ranks=shard_ranks,
        rank=rank,
        element_bytes=COMPUTE_BYTES[mixed_precision or preset.mixed_precision],
        trained_bytes=2 if pure_bf16 else 4,
        offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param,
        layout=layout,
        sharded_at_load=preset.sharded_at_load,
        **(_zero_settings(preset, hidden_size, library_buckets) if preset.traits.has_settings_file else {}),
    )


def _zero_settings(preset: PresetSpec, hidden_size: int, library_buckets: bool) -> dict[str, Any]:
    zero, full, square = preset.zero_block, preset.shards_parameters, hidden_size * hidden_size
    if library_buckets:
        zero = {key: value for key, value in zero.items() if value != "auto"}

    def setting(key: str, auto: int, default: int) -> int:
        value = zero.get(key, default)
        return int(auto if value == "auto" else value)

    masters, states = bf16_keys(preset.settings)
    overlaps = full if zero.get("overlap_comm") in (None, "auto") else zero["overlap_comm"]
    return {
        "reduce_bucket": setting("reduce_bucket_size", square, REDUCE_BUCKET),
        # ZeRO-3 has a single buffer: the next bucket fills it while the last one is reduced.
        "num_reduce_buckets": 2 if overlaps and not full else 1,
        "prefetch_bucket": setting("stage3_prefetch_bucket_size", int(0.9 * square), PREFETCH_BUCKET),
        "persistence_threshold": preset.persistence_threshold(hidden_size=hidden_size),
        "reuse_distance": setting("stage3_max_reuse_distance", REUSE_DISTANCE, REUSE_DISTANCE),
        "live_parameters": setting("stage3_max_live_parameters", LIVE_PARAMETERS, LIVE_PARAMETERS),
        "sub_group": setting("sub_group_size", SUB_GROUP, SUB_GROUP),
        "secondary_partition": int(zero.get("zero_hpz_partition_size", 1)),
        "master_bytes": 2 if masters else 4,
        "state_bytes": 2 if states else 4,
        "pins_memory": bool((zero.get("offload_optimizer") or {}).get("pin_memory", True)),
    }


# -- model states of one rank between steps: parameters, gradients and optimizer states, exact to the byte


@lru_cache(maxsize=64)  # the same for every micro-batch that a search tries
def model_states(engine: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec | None = None) -> ModelStates:
    """Return the bytes that the engine's rank holds between steps, with the default optimizer or another."""
    return engine.traits.model_states(engine, weights, optimizer or OPTIMIZERS[DEFAULT_OPTIMIZER])


def all_ranks_bytes(shape: ModelShape, preset: PresetSpec, *, world_size: int, job: PlannedJob) -> int:
    """Return the bytes of all ranks in fp32, as a run on a CPU holds them."""
    setup = TrainingSetup(shape=shape, preset=preset, world_size=world_size, job=job, mixed_precision="no")
    return world_size * model_states(setup.engine, setup.weights, job.optimizer).total_bytes


# -- the stages of a pipeline: the one with the head has its logits, the first one the most micro-batches in flight


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What one rank of a pipeline holds beside model states, in micro-batches of all its layers."""

    micro_batches_in_flight: float
    buffered_activations: int = 0
    """Buffers for activations and gradients from other ranks, each of one micro-batch: torch allocates all at once."""
    logits_in_flight: int = 0
    """Micro-batches whose log-probabilities wait for their backward, beside the one that computes."""

    @classmethod
    def of(cls, settings: PipelineSettings, rank: int, *, micro_batches: int) -> StageLoad:
        """Return that of one rank under a schedule."""
        is_first, is_last = rank == 0, rank == settings.ranks - 1
        return cls(
            micro_batches_in_flight=settings.in_flight(rank, micro_batches) / settings.chunks,
            buffered_activations=(2 * settings.chunks - is_first - is_last) * micro_batches,
            logits_in_flight=micro_batches - 1 if is_last and settings.schedule == GPIPE else 0,
        )


def stage_shape(shape: ModelShape, settings: PipelineSettings, rank: int) -> ModelShape:
    """Return the part of a model that one rank of a pipeline holds."""
    return model_part(shape, settings.stages, tuple(settings.stages_of(rank)))


@lru_cache(maxsize=1024)
def model_part(shape: ModelShape, stages: int, own: tuple[int, ...]) -> ModelShape:
    """Return what some of the stages into which a model is divided hold of it.

    The first has the embedding, the last the final norm and the head; a tied head is a tensor of its own there.
    """
    ranges = divide_layers(shape.num_layers, stages)
    layers = tuple(chain.from_iterable(shape.layers[ranges[stage].start : ranges[stage].stop] for stage in own))
    embeddings = tuple(tensor for tensor in shape.outer if tensor.is_embedding)
    head = tuple(tensor for tensor in shape.outer if not tensor.is_embedding)
    if shape.tied_embeddings and stages > 1:
        head += (Tensor(name="lm_head.weight", shape=embeddings[0].shape),)
    is_last = stages - 1 in own
    outer: Layer = (*(embeddings if 0 in own else ()), *(head if is_last else ()))
    return replace(
        shape,
        layers=layers,
        num_layers=len(layers),
        outer=outer,
        tied_embeddings=shape.tied_embeddings and stages == 1,
        vocab_size=shape.vocab_size if is_last else 0,
        num_sliding_layers=round(shape.num_sliding_layers * len(layers) / shape.num_layers),
    )
