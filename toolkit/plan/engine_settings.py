"""Settings of an engine at one world size: sharding, buffers and thresholds from a preset's files, `auto` filled in.

transformers 5 fills `auto` from the hidden size (`integrations/deepspeed.py`); settings that a file leaves out have the
library's default (deepspeed 0.19.8, `runtime/zero/config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.models.shape import Tensor
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.shard_bytes import persistence_threshold, zero_block
from toolkit.presets.spec import PresetSpec

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET, PREFETCH_BUCKET, SUB_GROUP = 500_000_000, 50_000_000, 1_000_000_000
REUSE_DISTANCE = LIVE_PARAMETERS = 1_000_000_000
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "no": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Everything about an engine that decides bytes, once the world size is known. Bucket sizes are in elements."""

    kind: str
    """`none`, `ddp`, `deepspeed`, `fsdp2` or `pipeline`; DDP with one process is `none`: it has nothing to reduce."""
    sharding: str
    shards_parameters: bool
    world_size: int
    shard_ranks: int  # ranks that share one copy of the model
    rank: int = 0
    element_bytes: int = 2  # bytes per element of a parameter in the compute dtype
    trained_bytes: int = 4  # per element of a trained weight and its gradient, outside of DeepSpeed
    offload_optimizer: str | None = None
    offload_param: str | None = None
    reduce_bucket: int = 0  # size of each buffer that gradients are reduced in
    num_reduce_buckets: int = 1
    prefetch_bucket: int = 0
    persistence_threshold: int = 0
    reuse_distance: int = 0
    live_parameters: int = 0  # gathered ones, above which ZeRO-3 prefetches nothing
    sub_group: int = SUB_GROUP
    secondary_partition: int = 1
    """ZeRO++ (hpZ): ranks of one node that share a second copy of the parameters; 1 if there is none."""
    pins_memory: bool = True  # true if offloaded tensors are in page-locked memory
    layout: ParallelLayout | None = None  # how the ranks are divided; None for data parallelism alone
    sharded_at_load: bool = False  # transformers shards the model while it loads it, and reduces gradients in fp32

    def ranks_sharing(self, tensor: Tensor) -> int:
        """Return how many ranks share a tensor, which tensor and expert parallelism have split already.

        Experts have a mesh of their own, and adapters are attached after transformers sharded the model.
        """
        if self.layout is None or not self.sharded_at_load:
            return self.shard_ranks
        if ".lora_" in tensor.name:
            return 1
        return self.layout.expert_shard if self.layout.ep > 1 and tensor.is_expert else self.shard_ranks

    @property
    def tp(self) -> int:
        """Ranks that each layer is split over."""
        return 1 if self.layout is None else self.layout.tp

    @property
    def unties_head(self) -> bool:
        """True if a tied head is gathered and reduced beside its embedding: transformers splits the two one by one."""
        return self.sharded_at_load and self.tp > 1 and self.kind == "fsdp2"

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence."""
        return 1 if self.layout is None else self.layout.cp * self.layout.sp

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient while it is reduced."""
        return 4 if self.sharded_at_load else self.element_bytes

    @property
    def num_groups(self) -> int:
        """Groups of ranks that communicate, each with a communicator of its own."""
        if self.world_size == 1:
            return 0
        if self.layout is None:
            return 2 if self.sharding == "hybrid_shard" else 1
        if not self.sharded_at_load and self.layout.pp == 1:  # model states are shared among all, sequences among some
            return 2
        return sum(degree > 1 for degree in self.layout.degrees().values())

    @property
    def autocasts(self) -> bool:
        """True if fp32 weights are cast where they are used; those of DeepSpeed and FSDP2 are bf16 by then."""
        return self.kind in ("none", "ddp", "pipeline") and self.element_bytes < self.trained_bytes


def engine_settings(
    preset: PresetSpec,
    *,
    world_size: int,
    hidden_size: int,
    rank: int = 0,
    mixed_precision: str | None = None,
    layout: ParallelLayout | None = None,
    pure_bf16: bool = False,
) -> EngineSettings:
    """Return the settings for one rank; `mixed_precision` overrides the preset's own, as `--bf16 false` does.

    With `pure_bf16` trained weights are held in bf16, without fp32 masters. DeepSpeed always has masters.
    """
    single, shard_ranks = preset.engine == "ddp" and world_size == 1, max(1, world_size // preset.replicas)
    if preset.sharded_at_load and layout is not None:
        single = layout.data_parallel_size == 1  # without data parallelism, without FSDP2
        # Ranks that divide a sequence share the model states too: only tensor parallelism splits them before.
        shard_ranks = layout.dp_shard
    return EngineSettings(
        kind="none" if single else preset.engine,
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
        **(_zero_settings(preset, hidden_size) if preset.engine == "deepspeed" else {}),
    )


def _zero_settings(preset: PresetSpec, hidden_size: int) -> dict[str, Any]:
    zero, full, square = zero_block(preset), preset.shards_parameters, hidden_size * hidden_size

    def setting(key: str, auto: int, default: int) -> int:
        value = zero.get(key, default)
        return int(auto if value == "auto" else value)

    overlaps = full if zero.get("overlap_comm") in (None, "auto") else zero["overlap_comm"]
    return {
        "reduce_bucket": setting("reduce_bucket_size", square, REDUCE_BUCKET),
        # ZeRO-3 has a single buffer: the next bucket fills it while the last one is reduced.
        "num_reduce_buckets": 2 if overlaps and not full else 1,
        "prefetch_bucket": setting("stage3_prefetch_bucket_size", int(0.9 * square), PREFETCH_BUCKET),
        "persistence_threshold": persistence_threshold(preset, hidden_size=hidden_size),
        "reuse_distance": setting("stage3_max_reuse_distance", REUSE_DISTANCE, REUSE_DISTANCE),
        "live_parameters": setting("stage3_max_live_parameters", LIVE_PARAMETERS, LIVE_PARAMETERS),
        "sub_group": setting("sub_group_size", SUB_GROUP, SUB_GROUP),
        "secondary_partition": int(zero.get("zero_hpz_partition_size", 1)),
        "pins_memory": bool((zero.get("offload_optimizer") or {}).get("pin_memory", True)),
    }
