"""DDP: every rank holds the whole model, and gradients are averaged in buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.engines.engine import Engine, Sharding


class Ddp(Engine):
    """torch's DistributedDataParallel, as accelerate wraps a model in it."""

    name = "ddp"
    shardings: Mapping[str, Sharding] = {"replicate": Sharding("2 P per step", "NO_SHARD", "ZeRO-0")}
    uses_ddp = True
    no_comm_hook = None

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
    is_loaded_whole = False
    no_comm_hook = "gradients between pipelines are reduced without DDP's buckets"
    no_async_save = "its stages write their checkpoints themselves"


class Single(Engine):
    """One process."""

    needs_launcher = False
