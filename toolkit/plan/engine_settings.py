"""Settings of an engine at one world size: sharding, buffers and thresholds from a preset's files, `auto` filled in.

transformers 5 fills `auto` from the hidden size (`integrations/deepspeed.py`); settings that a file leaves out have the
library's default (deepspeed 0.19.8, `runtime/zero/config.py`).
"""

from __future__ import annotations

from typing import Any

from toolkit.engines.engine import SUB_GROUP, EngineSettings
from toolkit.engines.registry import ENGINES
from toolkit.engines.zero import bf16_keys
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.spec import PresetSpec

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET, PREFETCH_BUCKET = 500_000_000, 50_000_000
REUSE_DISTANCE = LIVE_PARAMETERS = 1_000_000_000
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "no": 4}


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
