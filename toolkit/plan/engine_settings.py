"""Settings of an engine at one world size: sharding, buffers and thresholds from a preset's files, `auto` filled in.

    >>> from toolkit.presets import load_preset
    >>> engine_settings(load_preset("zero3"), world_size=8, hidden_size=4096).reduce_bucket
    16777216

transformers 5 fills `auto` from the hidden size (`integrations/deepspeed.py`); settings that a file leaves out have the
library's default (deepspeed 0.19.8, `runtime/zero/config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from toolkit.presets.preset import Preset

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET, PREFETCH_BUCKET, SUB_GROUP = 500_000_000, 50_000_000, 1_000_000_000
PERSISTENCE_THRESHOLD, REUSE_DISTANCE = 100_000, 1_000_000_000
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "no": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Everything about an engine that decides bytes, once the world size is known. Bucket sizes are in elements."""

    kind: str
    """`none`, `ddp`, `deepspeed` or `fsdp2`; DDP with one process is `none`, since it has nothing to reduce."""
    sharding: str
    shards_parameters: bool
    world_size: int
    shard_ranks: int
    """Ranks that share one copy of the model."""
    rank: int = 0
    element_bytes: int = 2
    """Bytes per element of a parameter in the compute dtype."""
    offload_optimizer: str | None = None
    offload_param: str | None = None
    reduce_bucket: int = 0
    """Size of each buffer that gradients are reduced in."""
    num_reduce_buckets: int = 1
    prefetch_bucket: int = 0
    persistence_threshold: int = 0
    reuse_distance: int = 0
    sub_group: int = SUB_GROUP
    secondary_partition: int = 1
    """ZeRO++ (hpZ): ranks of one node that share a second copy of the parameters; 1 if there is none."""
    pins_memory: bool = True
    """True if offloaded tensors are in page-locked memory."""

    @property
    def shard_rank(self) -> int:
        """Position of this rank among those that share its copy of the model."""
        return self.rank % self.shard_ranks

    @property
    def autocasts(self) -> bool:
        """True if fp32 weights are cast where they are used; those of DeepSpeed and FSDP2 are bf16 by then."""
        return self.kind in ("none", "ddp") and self.element_bytes == 2


def engine_settings(
    preset: Preset, *, world_size: int, hidden_size: int, rank: int = 0, mixed_precision: str | None = None
) -> EngineSettings:
    """Return the settings for one rank; `mixed_precision` overrides the preset's own, as `--bf16 false` does."""
    single = preset.engine == "ddp" and world_size == 1
    return EngineSettings(
        kind="none" if single else preset.engine,
        sharding=preset.sharding,
        shards_parameters="parameter" in preset.sharded_parts,
        world_size=world_size,
        shard_ranks=max(1, world_size // preset.replicas),
        rank=rank,
        element_bytes=COMPUTE_BYTES[mixed_precision or preset.mixed_precision],
        offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param,
        **_zero_settings(preset, hidden_size),
    )


@lru_cache(maxsize=256)
def zero_block(preset: Preset) -> dict[str, Any]:
    """Return the `zero_optimization` block of the preset's DeepSpeed file; empty for other engines."""
    return dict((preset.deepspeed_config() or {}).get("zero_optimization") or {})


def _zero_settings(preset: Preset, hidden_size: int) -> dict[str, Any]:
    if preset.engine != "deepspeed":
        return {}
    zero = zero_block(preset)
    full = "parameter" in preset.sharded_parts
    square = hidden_size * hidden_size

    def setting(key: str, auto: int, default: int) -> int:
        value = zero.get(key, default)
        return int(auto if value == "auto" else value)

    overlaps = full if zero.get("overlap_comm") in (None, "auto") else zero["overlap_comm"]
    return {
        "reduce_bucket": setting("reduce_bucket_size", square, REDUCE_BUCKET),
        # ZeRO-3 has a single buffer: the next bucket fills it while the last one is reduced.
        "num_reduce_buckets": 2 if overlaps and not full else 1,
        "prefetch_bucket": setting("stage3_prefetch_bucket_size", int(0.9 * square), PREFETCH_BUCKET),
        "persistence_threshold": setting("stage3_param_persistence_threshold", 10 * hidden_size, PERSISTENCE_THRESHOLD),
        "reuse_distance": setting("stage3_max_reuse_distance", REUSE_DISTANCE, REUSE_DISTANCE),
        "sub_group": setting("sub_group_size", SUB_GROUP, SUB_GROUP),
        "secondary_partition": int(zero.get("zero_hpz_partition_size", 1)),
        "pins_memory": bool((zero.get("offload_optimizer") or {}).get("pin_memory", True)),
    }
