"""The strategy that a preset's files specify: engine, sharding, offload, precision and world size.

The files stay the only source of truth: `toolkit.presets.preset.read_preset` derives a spec from them.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.engines.engine import Engine
from toolkit.engines.registry import engine_named
from toolkit.files.documents import read_text
from toolkit.job.accumulation import SHARDED, WHOLE
from toolkit.parallel.layout import DEGREES, ParallelLayout, divide_ranks

# What a preset sets, and a job therefore may not.
STRATEGY_ARGUMENTS = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetSpec:
    """An accelerate YAML and its DeepSpeed JSON, read."""

    name: str  # the stem of the accelerate YAML
    summary: str  # when to choose it: the first comment line of the YAML
    engine: str  # `none`, `ddp`, `deepspeed`, `fsdp2` or `pipeline`
    sharding: str  # `replicate`, `shard_optimizer`, `shard_grad_op`, `full_shard` or `hybrid_shard`
    offload_optimizer: str | None  # `cpu`, `nvme` or None
    offload_param: str | None  # `cpu`, `nvme` or None
    mixed_precision: str  # compute dtype on a GPU: `bf16`, `fp16` or `no` (fp32)
    min_world_size: int
    max_world_size: int | None = None  # 1 for a single-process preset; None where there is no limit
    world_size_multiple: int = 1  # of the world size: the replicas of a hybrid mesh, or the GPUs per node of ZeRO++
    replicas: int = 1  # copies of the model in a hybrid mesh, unless the launcher's flags override it
    needs_gpu: str | None = None  # why the preset cannot run on a CPU, or None where it can
    parallel: tuple[str, ...] = ()  # dimensions of parallelism, the outermost first; empty for data parallelism alone
    sharded_at_load: bool = False
    """True if transformers shards the model while it loads it (`DistributedConfig`), instead of accelerate later."""
    accelerate_config_path: Path
    deepspeed_config_path: Path | None  # the JSON that the YAML names, or that of its name with the same settings
    deepspeed_text: str | None = None  # the settings that the YAML has itself, as JSON
    config: Mapping[str, Any] = field(compare=False, repr=False)  # what is in the YAML
    settings: Mapping[str, Any] | None = field(compare=False, repr=False)  # DeepSpeed's; None for another engine

    @property
    def traits(self) -> Engine:
        """What is true of its engine."""
        return engine_named(self.engine, sharded_at_load=self.sharded_at_load)

    @property
    def sharded_parts(self) -> tuple[str, ...]:
        """The model states of which each rank holds only a shard between steps."""
        return self.traits.sharded_parts(self.sharding)

    @property
    def offloads(self) -> bool:
        """True if something is kept in host memory or on a disk."""
        return bool(self.offload_optimizer or self.offload_param)

    @property
    def shards_parameters(self) -> bool:
        """True if each rank holds only a shard of the parameters between steps."""
        return "parameter" in self.sharded_parts

    @property
    def degrees(self) -> tuple[str, ...]:
        """The dimensions whose degree a run must name: `pp`, `tp`, `cp`, `sp` or `ep`."""
        return tuple(name for name in self.parallel if name in DEGREES and name != "dp_replicate")

    def layout(self, world_size: int, degrees: Mapping[str, int | None]) -> ParallelLayout | None:
        """Return how a run divides its ranks; None for data parallelism alone."""
        return divide_ranks(self.parallel, degrees, world_size=world_size) if self.parallel else None

    @property
    def uses_nvme(self) -> bool:
        """True if model states are offloaded to a local NVMe disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def processes(self) -> str:
        """The supported world sizes, for a table: `1`, `2+`, `8+, by 8`."""
        if self.max_world_size == self.min_world_size:
            return str(self.min_world_size)
        step = f", by {self.world_size_multiple}" if self.world_size_multiple > 1 else ""
        return f"{self.min_world_size}+{step}"

    def dp_shard_size(self, world_size: int) -> int | None:
        """Return how many ranks share one copy of the model in a hybrid mesh; None for any other preset."""
        return world_size // self.replicas if self.replicas > 1 else None

    def accelerate_config(self) -> dict[str, Any]:
        """Return the YAML as accelerate reads it, with the DeepSpeed JSON that it names as an absolute path."""
        config = copy.deepcopy(dict(self.config))
        if self.deepspeed_config_path is not None and self.deepspeed_text is None:
            config["deepspeed_config"]["deepspeed_config_file"] = str(self.deepspeed_config_path)
        return config

    def deepspeed_config(self) -> dict[str, Any] | None:
        """Return DeepSpeed's settings, or None for another engine."""
        return None if self.settings is None else copy.deepcopy(dict(self.settings))

    @property
    def zero_block(self) -> dict[str, Any]:
        """The `zero_optimization` block of DeepSpeed's settings; empty for other engines."""
        return dict((self.settings or {}).get("zero_optimization") or {})

    def persistence_threshold(self, *, hidden_size: int | None) -> int:
        """Return the elements up to which ZeRO-3 never releases a gathered parameter; 0 for any other preset.

        `auto` is 10 x the hidden size, which the libraries read from the model's configuration (transformers 5,
        `integrations/deepspeed.py`).
        """
        return self.traits.persistence_threshold(self.zero_block, self.sharding, hidden_size=hidden_size)

    def shard_byte_limits(
        self, part: str, shapes: Sequence[tuple[int, ...]], element_bytes: int, *, ranks: int, hidden_size: int | None
    ) -> tuple[int, int]:
        """Return the lowest and highest bytes of a model state on one rank, with padding, if `ranks` share it.

        Beside its shards, a ZeRO-3 rank holds each parameter up to the persistence threshold whole.
        """
        unsharded = sum(math.prod(shape) for shape in shapes) * element_bytes
        if part not in self.sharded_parts:
            return unsharded, unsharded
        highest = self.traits.largest_shard(shapes, ranks=ranks) * element_bytes
        if part == "parameter":
            threshold = self.persistence_threshold(hidden_size=hidden_size)
            highest += element_bytes * sum(size for size in map(math.prod, shapes) if size <= threshold)
        return (unsharded if ranks == 1 else 0), highest

    @property
    def settings_argument(self) -> str | None:
        """The settings as accelerate's launcher takes them in any working directory: their path, or the text."""
        return self.deepspeed_text if self.deepspeed_config_path is None else str(self.deepspeed_config_path)

    def texts(self) -> dict[str, str]:
        """Return file name to text for each of the preset's files, as a run folder records them."""
        paths = [self.accelerate_config_path, self.deepspeed_config_path]
        return {f"{path.parent.name}/{path.name}": read_text(path) for path in paths if path is not None}

    def as_row(self) -> dict[str, Any]:
        """Return the preset as `toolkit presets --json` prints it."""
        names = ("name", "engine", "sharding", "parallel", "offload_optimizer", "offload_param", "mixed_precision")
        row = {name: getattr(self, name) for name in (*names, "min_world_size")}
        json_path = self.deepspeed_config_path
        return row | {
            "parallel": list(self.parallel),
            "accelerate_config": str(self.accelerate_config_path),
            "deepspeed_config": None if json_path is None else str(json_path),
            "summary": self.summary,
        }


def default_accumulate(preset: PresetSpec) -> str:
    """Return how gradients wait for the last accumulation step unless the user decides: as the preset shards them.

    FSDP2 reduces them in every accumulation step, also where it shards over one rank, beside tensor parallelism.
    """
    return SHARDED if "gradient" in preset.sharded_parts or preset.traits.chooses_accumulation else WHOLE
