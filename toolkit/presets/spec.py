"""The strategy that a preset's files specify: engine, sharding, offload, precision and world size.

The files stay the only source of truth: `toolkit.presets.preset.read_preset` derives a spec from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.files.yaml_files import read_configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetSpec:
    """An accelerate YAML and its DeepSpeed JSON, read."""

    name: str
    """The stem of the accelerate YAML."""
    summary: str
    """When to choose it: the first comment line of the YAML."""
    engine: str
    """`none`, `ddp`, `deepspeed` or `fsdp2`."""
    sharding: str
    """`replicate`, `shard_optimizer`, `shard_grad_op`, `full_shard` or `hybrid_shard`."""
    offload_optimizer: str | None
    """`cpu`, `nvme` or None."""
    offload_param: str | None
    """`cpu`, `nvme` or None."""
    mixed_precision: str
    """Compute dtype on a GPU: `bf16`, `fp16` or `no` (fp32)."""
    min_world_size: int
    max_world_size: int | None = None
    """1 for a single-process preset; None where there is no limit."""
    world_size_multiple: int = 1
    """The world size must be a multiple of it: the replicas of a hybrid mesh, or the GPUs per node of ZeRO++."""
    replicas: int = 1
    """Copies of the model in a hybrid mesh, unless the launcher's flags override it."""
    needs_gpu: str | None = None
    """Why the preset cannot run on a CPU, or None where it can."""
    accelerate_config_path: Path
    deepspeed_config_path: Path | None

    @property
    def sharded_parts(self) -> tuple[str, ...]:
        """The model states of which each rank holds only a shard between steps."""
        if self.sharding == "shard_grad_op" and self.engine == "fsdp2":
            return ("parameter", "gradient", "optimizer")  # gathered parameters live from forward to backward only
        return {
            "replicate": (),
            "shard_optimizer": ("optimizer",),
            "shard_grad_op": ("gradient", "optimizer"),
        }.get(self.sharding, ("parameter", "gradient", "optimizer"))

    @property
    def shards_parameters(self) -> bool:
        """True if each rank holds only a shard of the parameters between steps."""
        return "parameter" in self.sharded_parts

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
        """Return the YAML as accelerate reads it, with the DeepSpeed JSON as an absolute path."""
        config = read_configuration(self.accelerate_config_path)
        if self.deepspeed_config_path is not None:
            config["deepspeed_config"]["deepspeed_config_file"] = str(self.deepspeed_config_path)
        return config

    def deepspeed_config(self) -> dict[str, Any] | None:
        """Return the DeepSpeed JSON, or None for another engine."""
        return None if self.deepspeed_config_path is None else read_configuration(self.deepspeed_config_path)
