"""DDP: every rank holds the whole model, and gradients are averaged in buckets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.engines.engine import Engine, EngineSettings, PlannedStep, Sharding
from toolkit.engines.fsdp2 import ShardedAtLoad
from toolkit.engines.planned import ACTIVATION_BYTES, Collective, EngineBuffers, ModelStates, PlannedBatch
from toolkit.models.job_weights import JobWeights
from toolkit.units import MIB

# DDP first broadcasts all parameters through flat copies of this size, two at a time (torch, `distributed.py`,
# `broadcast_bucket_size`; `c10d/comm.cpp`, `broadcast_coalesced`).
BROADCAST_BYTES, BROADCASTS = 250 * MIB, 2
BUCKET_BYTES = 25 * MIB  # torch's default (`bucket_cap_mb`)


class Ddp(Engine):
    """torch's DistributedDataParallel, as accelerate wraps a model in it."""

    name = "ddp"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("2 P per step", "NO_SHARD", "ZeRO-0")}
    dimensions: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "ep")
    uses_ddp = True
    plain_preset = "ddp"
    no_comm_hook = None

    def with_dimensions(self, names: Sequence[str]) -> Engine:
        """Return the toolkit's pipeline, or transformers' sharding at load: accelerate only starts their ranks."""
        if "pp" in names:
            return Pipeline()
        return ShardedAtLoad() if names else self

    def in_effect(self, world_size: int | None) -> str:
        """Return `none` for one process: there is no other rank to reduce with."""
        return "none" if world_size == 1 else self.name

    def training_arguments(self, config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what keeps DDP from the Trainer's default, which traverses the graph again in every step."""
        return {"ddp_find_unused_parameters": False}

    def buffers(
        self, settings: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedBatch
    ) -> EngineBuffers:
        """Return the same with DDP's buckets, and the copies through which it first broadcasts all parameters."""
        buckets = settings.trained_bytes * weights.num_trained
        # As views of them, gradients take nothing of their own, but for those of earlier accumulation steps.
        views, accumulates = job.has_bucket_views, job.gradient_accumulation_steps > 1
        # A tied head's gradient waits outside of its bucket until the embedding's is added.
        tied = views and weights.shape.tied_embeddings and not weights.adapters
        head = settings.trained_bytes * weights.embedding if tied else 0
        alone = super().buffers(settings, weights, states, job)
        return replace(
            alone,
            lasting_bytes=0 if views else buckets,
            waiting_bytes=buckets if views and accumulates else 0,
            backward_bytes=alone.backward_bytes + head,
            first_layer_bytes=alone.first_layer_bytes + head,
            load_bytes=min(states.parameter_bytes, BROADCASTS * BROADCAST_BYTES),
        )

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield the fp32 gradients of fp32 weights, in the last accumulation step; in buckets of 25 MiB."""
        payload = 4 * step.weights.num_trained
        calls = math.ceil(payload / BUCKET_BYTES)
        yield Collective("all_reduce", "gradients", payload, calls, group_size=step.world_size)


class Pipeline(Engine):
    """Stages of a model, and replicas of the pipeline; the toolkit's own loop."""

    name = "pipeline"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("2 P/K between replicas per step", None, None)}
    dimensions: tuple[str, ...] = ("dp_replicate", "pp")
    is_loaded_whole = False
    no_comm_hook = "gradients between pipelines are reduced without DDP's buckets"
    no_async_save = "its stages write their checkpoints themselves"

    def collectives(self, step: PlannedStep) -> Iterator[Collective]:
        """Yield what a rank between two others sends, and the reductions of gradients after it."""
        shape, settings, layout, job = step.shape, step.job.pipeline, step.layout, step.job
        assert settings is not None, "a pipeline is planned with its number of stages"
        assert layout is not None
        stages, purpose = partial(Collective, group="pp"), "activations to the next stage, and their gradients back"
        calls = 2 * step.accumulation_steps * settings.chunks
        payload = ACTIVATION_BYTES * job.tokens_per_micro_batch * shape.hidden_size * calls
        yield stages("permute", purpose, payload, calls, group_size=layout.pp)
        if shape.tied_embeddings:
            payload = 4 * shape.vocab_size * shape.hidden_size
            yield stages("all_reduce", "gradient of a tied embedding", payload, group_size=2)
        replicas = partial(Collective, group="replicas", group_size=layout.dp_replicate, stride=layout.pp)
        yield replicas("all_reduce", "gradients between pipelines", 4 * step.largest_stage)


class Single(Engine):
    """One process."""

    max_world_size = 1
    needs_launcher = False

    def launcher_environment(self, launch: Any, arguments: Any, defaults: Any) -> dict[str, str]:
        return dict(launch.prepare_simple_launcher_cmd_env(arguments)[1])
