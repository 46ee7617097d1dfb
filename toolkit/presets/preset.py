"""One preset: an accelerate YAML, its DeepSpeed JSON if it names one, and what the pair promises.

>>> read_preset(Path("accelerate_configs/zero3.yaml")).engine
'deepspeed'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from toolkit.errors import ToolkitError
from toolkit.presets.keys import check_accelerate_keys, check_deepspeed_keys

if TYPE_CHECKING:
    from transformers import TrainingArguments

SHARDING_OF_STAGE = {0: "replicate", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
ENGINE_OF_TYPE = {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What a pair of files promises; the files themselves stay the only truth."""

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
    """1 where there is nobody to share with; None: as many as there are."""
    world_size_multiple: int = 1
    """The number of processes must be a multiple of it: replicas of a hybrid mesh, GPUs of a ZeRO++ machine."""
    replicas: int = 1
    """Copies of the whole model that a hybrid mesh keeps, unless the launcher's flags say otherwise."""
    needs_gpu: str | None = None
    """Why a CPU cannot run it, or None where it can."""
    accelerate_config_path: Path
    deepspeed_config_path: Path | None

    @property
    def sharded_parts(self) -> tuple[str, ...]:
        """The model states that each rank holds only a share of between steps."""
        if self.sharding == "shard_grad_op" and self.engine == "fsdp2":
            return ("parameter", "gradient", "optimizer")  # parameters are whole from forward to backward only
        return {
            "replicate": (),
            "shard_optimizer": ("optimizer",),
            "shard_grad_op": ("gradient", "optimizer"),
        }.get(self.sharding, ("parameter", "gradient", "optimizer"))

    @property
    def processes(self) -> str:
        """How many processes it trains in, for people: `1`, `2+`, `8+, by 8`."""
        if self.max_world_size == self.min_world_size:
            return str(self.min_world_size)
        step = f", by {self.world_size_multiple}" if self.world_size_multiple > 1 else ""
        return f"{self.min_world_size}+{step}"

    def dp_shard_size(self, world_size: int) -> int | None:
        """Ranks that share one copy of the model in a hybrid mesh; None where the launcher needs no such degree."""
        return world_size // self.replicas if self.replicas > 1 else None

    def accelerate_config(self) -> dict[str, Any]:
        """The YAML as accelerate reads it, its DeepSpeed JSON as an absolute path."""
        config = _read_mapping(self.accelerate_config_path)
        if self.deepspeed_config_path is not None:
            config["deepspeed_config"]["deepspeed_config_file"] = str(self.deepspeed_config_path)
        return config

    def deepspeed_config(self) -> dict[str, Any] | None:
        """The DeepSpeed JSON as a dict, or None for another engine."""
        return None if self.deepspeed_config_path is None else _read_mapping(self.deepspeed_config_path)

    def training_arguments(self, **training_arguments: Any) -> TrainingArguments:
        """A `transformers.TrainingArguments` with this strategy in force, for a Trainer of your own.

        Call it before the model is loaded, in a script started with torchrun or with `accelerate launch` without a
        configuration file. Takes all of `TrainingArguments`' own, at least `output_dir`. bf16 on a GPU and fp32 on a
        CPU unless given; load the model with `dtype=torch.float32`, so that there are fp32 masters.

        Raises ToolkitError for what would silently put something else in force.
        """
        from toolkit.presets import door

        return door.training_arguments(self, training_arguments)

    def texts(self) -> dict[str, str]:
        """File name to text of each file of the pair, for a run folder."""
        paths = [self.accelerate_config_path, self.deepspeed_config_path]
        return {f"{path.parent.name}/{path.name}": path.read_text() for path in paths if path is not None}

    def as_row(self) -> dict[str, Any]:
        """The preset as `toolkit presets --json` gives it."""
        json_path = self.deepspeed_config_path
        return {
            "name": self.name,
            "engine": self.engine,
            "sharding": self.sharding,
            "offload_optimizer": self.offload_optimizer,
            "offload_param": self.offload_param,
            "mixed_precision": self.mixed_precision,
            "min_world_size": self.min_world_size,
            "accelerate_config": str(self.accelerate_config_path),
            "deepspeed_config": None if json_path is None else str(json_path),
            "summary": self.summary,
        }


def read_preset(path: Path) -> Preset:
    """Read an accelerate YAML, ours or a user's, and say what it promises.

    Raises ToolkitError for a file that cannot be read, an unknown key, FSDP1, or an unknown engine.
    """
    config = _read_mapping(path)
    check_accelerate_keys(config, path)
    engine = _engine(config, path)
    json_path = _deepspeed_path(config, path)
    promise = _deepspeed_promise(json_path, path) if engine == "deepspeed" else _torch_promise(config, path)
    return Preset(
        name=path.stem,
        summary=_first_comment(path),
        engine=engine,
        max_world_size=1 if engine == "none" else None,
        accelerate_config_path=path.resolve(),
        deepspeed_config_path=json_path,
        **promise,
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ToolkitError(f"no such file: {path}") from None
    except (ValueError, yaml.YAMLError, OSError) as error:
        raise ToolkitError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ToolkitError(f"{path} holds {type(content).__name__}, expected keys and values")
    return content


def _first_comment(path: Path) -> str:
    first = path.read_text().split("\n", 1)[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _engine(config: dict[str, Any], path: Path) -> str:
    distributed_type = str(config.get("distributed_type", "NO"))
    if distributed_type not in ENGINE_OF_TYPE:
        raise ToolkitError(
            f"{path}: distributed_type {distributed_type!r} is not one of {', '.join(ENGINE_OF_TYPE)}",
        )
    if distributed_type == "FSDP" and (config.get("fsdp_config") or {}).get("fsdp_version", 1) != 2:
        raise ToolkitError(f"{path}: this is FSDP1, which presets do not use", hint="add `fsdp_version: 2`")
    return ENGINE_OF_TYPE[distributed_type]


def _deepspeed_path(config: dict[str, Any], path: Path) -> Path | None:
    """accelerate resolves the JSON against the working directory; beside the YAML's folder any directory will do."""
    named: str | None = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if named is None:
        return None
    tried = [path.resolve().parent.parent / named, path.resolve().parent / named, Path.cwd() / named]
    found = next((candidate for candidate in tried if candidate.is_file()), None)
    if found is None:
        raise ToolkitError(f"{path}: deepspeed_config_file {named!r} is not there", hint=f"looked in {tried[0]}")
    return found.resolve()


def _deepspeed_promise(json_path: Path | None, path: Path) -> dict[str, Any]:
    if json_path is None:
        raise ToolkitError(
            f"{path}: deepspeed_config names no deepspeed_config_file",
            hint="put the DeepSpeed settings into a JSON file and name it there",
        )
    deepspeed = _read_mapping(json_path)
    check_deepspeed_keys(deepspeed, json_path)
    zero = deepspeed.get("zero_optimization") or {}
    hpz = _machine_size(zero, json_path)
    quantized = [key for key in QUANTIZED_KEYS if zero.get(key)]
    return {
        "sharding": "hybrid_shard" if hpz > 1 else SHARDING_OF_STAGE[_stage(zero, json_path)],
        "min_world_size": hpz,
        "world_size_multiple": hpz,
        "needs_gpu": f"{quantized[0]} runs CUDA kernels of DeepSpeed's" if quantized else None,
        "offload_optimizer": _offload_device(zero, "offload_optimizer"),
        "offload_param": _offload_device(zero, "offload_param"),
        "mixed_precision": _deepspeed_precision(deepspeed),
    }


def _stage(zero: dict[str, Any], path: Path) -> int:
    stage = zero.get("stage", 0)
    if stage not in SHARDING_OF_STAGE:
        raise ToolkitError(f"{path}: zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3")
    return int(stage)


def _machine_size(zero: dict[str, Any], path: Path) -> int:
    """ZeRO++ keeps a second copy of the parameters within groups of this many ranks; 1 where there is none."""
    size = zero.get("zero_hpz_partition_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ToolkitError(f"{path}: zero_hpz_partition_size is {size!r}, expected the number of GPUs of a machine")
    return size


def _offload_device(zero: dict[str, Any], block: str) -> str | None:
    device = (zero.get(block) or {}).get("device", "none")
    return None if device == "none" else str(device)


def _deepspeed_precision(deepspeed: dict[str, Any]) -> str:
    """A block that is `auto` leaves the value to `TrainingArguments`, and names the precision that it is for."""
    for precision in ("bf16", "fp16"):
        if (deepspeed.get(precision) or {}).get("enabled") in (True, "auto"):
            return precision
    return "no"


def _torch_promise(config: dict[str, Any], path: Path) -> dict[str, Any]:
    fsdp = config.get("fsdp_config") or {}
    offload = "cpu" if fsdp.get("fsdp_offload_params") else None
    replicas = _replicas(config, path)
    sharded = 2 if config.get("distributed_type") == "FSDP" else 1
    return {
        "sharding": _fsdp_sharding(config, fsdp, path),
        "min_world_size": sharded * replicas,
        "world_size_multiple": replicas,
        "replicas": replicas,
        "offload_optimizer": offload,
        "offload_param": offload,
        "mixed_precision": str(config.get("mixed_precision") or "no"),
    }


def _replicas(config: dict[str, Any], path: Path) -> int:
    """The replicate degree of a hybrid mesh; 1 where there is none."""
    replicas = (config.get("parallelism_config") or {}).get("parallelism_config_dp_replicate_size", 1)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise ToolkitError(f"{path}: parallelism_config_dp_replicate_size is {replicas!r}, expected 1 or more")
    return replicas if config.get("distributed_type") == "FSDP" else 1


def _fsdp_sharding(config: dict[str, Any], fsdp: dict[str, Any], path: Path) -> str:
    if config.get("distributed_type") != "FSDP":
        return "replicate"
    if _replicas(config, path) > 1:
        return "hybrid_shard"
    reshard = fsdp.get("fsdp_reshard_after_forward", True)
    if not isinstance(reshard, bool):
        raise ToolkitError(
            f"{path}: fsdp_reshard_after_forward is {reshard!r}, expected true or false under FSDP2",
            hint="true is full_shard, false is shard_grad_op",
        )
    return "full_shard" if reshard else "shard_grad_op"
