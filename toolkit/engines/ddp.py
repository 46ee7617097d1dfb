"""DDP: every rank holds the whole model, and gradients are averaged in buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.engines.engine import Engine, Sharding
from toolkit.engines.fsdp2 import ShardedAtLoad


class Ddp(Engine):
    """torch's DistributedDataParallel, as accelerate wraps a model in it."""

    name = "ddp"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("2 P per step", "NO_SHARD", "ZeRO-0")}
    dimensions: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "ep")
    uses_ddp = True
    no_comm_hook = None

    def with_dimensions(self, names: Sequence[str]) -> Engine:
        """Return the toolkit's pipeline, or transformers' sharding at load: accelerate only starts their ranks."""
        if "pp" in names:
            return Pipeline()
        return ShardedAtLoad() if names else self

    def in_effect(self, world_size: int | None) -> str:
        """Return `none` for one process: there is no other rank to reduce with."""
        return "none" if world_size == 1 else self.name

    def training_arguments(
        self, config: Mapping[str, Any], deepspeed_config: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return what keeps DDP from the Trainer's default, which traverses the graph again in every step."""
        del config, deepspeed_config
        return {"ddp_find_unused_parameters": False}


class Pipeline(Engine):
    """Stages of a model, and replicas of the pipeline; the toolkit's own loop."""

    name = "pipeline"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("2 P/K between replicas per step", None, None)}
    dimensions: tuple[str, ...] = ("dp_replicate", "pp")
    is_loaded_whole = False
    no_comm_hook = "gradients between pipelines are reduced without DDP's buckets"
    no_async_save = "its stages write their checkpoints themselves"


class Single(Engine):
    """One process."""

    max_world_size = 1
    needs_launcher = False
