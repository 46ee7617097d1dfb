"""Presets: found by name or read from a user's own accelerate YAML.

>>> load_preset("zero3").engine
'deepspeed'
>>> "ddp" in preset_names()
True
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engines.zero import SHARDING_OF_STAGE
from toolkit.errors import ToolkitError, nearest, shown
from toolkit.files.documents import read_configuration, read_text, settings_for_path, unexpected
from toolkit.files.paths import is_file, user_path
from toolkit.parallel.layout import DIMENSIONS, PARALLEL_KEY, SAME_ROWS
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, AUTO, DEEPSPEED_BLOCKS, check_keys_and_values
from toolkit.presets.spec import PresetSpec
from toolkit.presets.training_arguments import from_pretrained_arguments, training_arguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
ENGINE_OF_TYPE = {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}
# What each engine can divide beside its own data parallelism: `ddp` is what accelerate calls a model sharded at load,
# and one whose layers form a pipeline.
PARALLEL_DIMENSIONS = {
    "ddp": {"dp_replicate", "dp_shard", "tp", "ep"},
    "pipeline": {"dp_replicate", "pp"},
    "fsdp2": {"dp_shard", "cp"},
    "deepspeed": {"dp_shard", "sp"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset(PresetSpec):
    """A preset, as `load_preset` and `read_preset` return it."""

    def training_arguments(
        self, arguments_class: type[TrainingArguments] | None = None, /, **arguments: Any
    ) -> TrainingArguments:
        """Return a `transformers.TrainingArguments` that puts this strategy in effect, for a Trainer of your own.

        Call it before the model is loaded, in a script started with torchrun or with `accelerate launch` without a
        configuration file. It takes every argument of `TrainingArguments`, at least `output_dir`; `arguments_class` is
        the Trainer's own class of arguments (`preset.training_arguments(SFTConfig, ...)`). The default precision is the
        preset's on a GPU and fp32 on a CPU. Load the model with `dtype=torch.float32`, for fp32 master weights.

        Degrees of parallelism are given by name: `tp`, `cp`, `sp`, `ep` and `dp_replicate`. Where transformers shards
        the model while it loads it, pass `from_pretrained_arguments()` on to `from_pretrained`, and give
        `save_strategy="no"` or `save_only_model=True`: the Trainer cannot resume such a model. Under `cp` and `ulysses`
        load the model with `attn_implementation="sdpa"`, and let the collator pad rows on the right to a multiple of
        `2 * cp`, or of `sp`, and add `position_ids`. `accumulate="whole"` lets FSDP2's gradients wait for the last
        accumulation step unsharded.

        Raises ToolkitError for anything that would silently put another strategy in effect.
        """
        return training_arguments(self, arguments, arguments_class)

    def from_pretrained_arguments(self, **degrees: int) -> dict[str, Any]:
        """Return transformers' `distributed_config` for a preset that shards the model at load, nothing for another.

            how = preset.from_pretrained_arguments()
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **how)

        It is for the ranks and the precision of `training_arguments`. Degrees may be repeated here.

        Raises ToolkitError without `training_arguments` before, or for another degree.
        """
        return from_pretrained_arguments(self, degrees)


def presets_root() -> Path:
    """Return the folder of `accelerate_configs/` and `ds_configs/`: inside the wheel, or the checkout."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_presets"
    return packed if packed.is_dir() else package.parent


def preset_names() -> list[str]:
    """Return the names of all presets that ship with the toolkit, sorted."""
    return sorted(path.stem for path in (presets_root() / "accelerate_configs").glob("*.yaml"))


def list_presets() -> list[Preset]:
    """Return all presets that ship with the toolkit, sorted by name."""
    return [load_preset(name) for name in preset_names()]


def load_preset(name: str) -> Preset:
    """Load a preset by name, or by the path of an accelerate YAML.

    Raises ToolkitError for an unknown name, with all names and the nearest one.
    """
    if name.endswith((".yaml", ".yml")):
        return read_preset(user_path(name))
    names = preset_names()
    if name not in names:
        close = nearest(name, names)
        raise ToolkitError(
            f"unknown preset {shown(name)}; available: {', '.join(names)}",
            hint=f"did you mean `{close}`?" if close else "see `toolkit presets`",
        )
    return read_preset(presets_root() / "accelerate_configs" / f"{name}.yaml")


def read_preset(path: Path) -> Preset:
    """Read an accelerate YAML, ours or a user's, and the DeepSpeed JSON that it names.

    Raises ToolkitError for what cannot be read or is not known: a key, a type, FSDP1, an engine.
    """
    config = read_configuration(path)
    check_keys_and_values(config, ACCELERATE_BLOCKS, path)
    engine = _engine(config, path)
    json_path, text = _deepspeed_source(config, path)
    parallel = _parallel(config, engine, path)
    first = read_text(path).split("\n", 1)[0]
    is_deepspeed = engine == "deepspeed"
    fields = _deepspeed_fields(json_path, text, path) if is_deepspeed else _torch_fields(config, engine, parallel)
    if parallel:
        fields |= {"min_world_size": _smallest_layout(parallel), "world_size_multiple": 1}
    return Preset(
        name=path.stem,
        summary=first.lstrip("# ").strip() if first.startswith("#") else "",
        max_world_size=1 if engine == "none" else None,
        parallel=parallel,
        accelerate_config_path=path.resolve(),
        deepspeed_config_path=json_path,
        deepspeed_text=text,
        **fields,
    )


def _engine(config: dict[str, Any], path: Path) -> str:
    distributed_type = config.get("distributed_type")
    if distributed_type not in ENGINE_OF_TYPE:
        raise unexpected(path, "distributed_type", distributed_type, f"one of {', '.join(ENGINE_OF_TYPE)}")
    if distributed_type == "FSDP" and str((config.get("fsdp_config") or {}).get("fsdp_version")) != "2":
        raise ToolkitError(f"{path}: this is FSDP1, which presets do not use", hint="add `fsdp_version: 2`")
    return ENGINE_OF_TYPE[distributed_type]


def _parallel(config: dict[str, Any], engine: str, path: Path) -> tuple[str, ...]:
    """The dimensions that the engine's block lists under `parallel`: accelerate passes over that key."""
    for block in ("fsdp_config", "deepspeed_config"):
        names = (config.get(block) or {}).get(PARALLEL_KEY)
        if not names:
            continue
        if sorted(set(names), key=DIMENSIONS.index) != names:
            raise unexpected(path, f"{block}.parallel", names, f"names in this order: {', '.join(DIMENSIONS)}")
        if not set(names) <= PARALLEL_DIMENSIONS.get(
            "pipeline" if engine == "ddp" and "pp" in names else engine, set()
        ):
            possible = " or ".join(f"{kind} ({', '.join(sorted(dims))})" for kind, dims in PARALLEL_DIMENSIONS.items())
            raise unexpected(path, f"{block}.parallel", names, f"dimensions of the engine: {possible}")
        return tuple(names)
    return ()


def _deepspeed_source(config: dict[str, Any], path: Path) -> tuple[Path | None, str | None]:
    """The JSON, and the settings that a YAML has itself; its JSON is then the one of its name.

    Without one, it is a JSON that says the same: `ulysses` has the settings of `zero3`.
    """
    named: str | None = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    settings = None if named is None else settings_for_path(named, f"{path}: deepspeed_config_file")
    if settings is None:
        return (None if named is None else _deepspeed_path(named, path)), None
    folder = path.resolve().parent
    tried = [each / f"{path.stem}.json" for each in (folder, folder.parent / "ds_configs")]
    beside = next(filter(is_file, tried), None)
    if beside is not None and read_configuration(beside) != settings:
        raise ToolkitError(
            f"{beside} differs from the settings in {path}, which are those that accelerate reads",
            hint=f"change both, remove the JSON, or let the YAML name it: `deepspeed_config_file: {beside}`",
        )
    if beside is None:
        others = sorted((folder.parent / "ds_configs").glob("*.json"))
        beside = next((each for each in others if read_configuration(each) == settings), None)
    return beside, json.dumps(settings)


def _deepspeed_path(named: str, path: Path) -> Path:
    """accelerate resolves the JSON against the working directory; here a path relative to the YAML works as well."""
    relative = user_path(named)
    tried = [folder / relative for folder in (path.resolve().parent.parent, path.resolve().parent, Path.cwd())]
    found = next(filter(is_file, tried), None) or next(filter(os.path.lexists, tried), None)
    if found is None:
        raise ToolkitError(
            f"{path}: deepspeed_config_file {shown(named)} does not exist", hint=f"tried {tried[0]} first"
        )
    return Path(os.path.realpath(found))


def _deepspeed_fields(json_path: Path | None, text: str | None, path: Path) -> dict[str, Any]:
    if json_path is None and text is None:
        raise ToolkitError(
            f"{path}: deepspeed_config names no deepspeed_config_file",
            hint="put the DeepSpeed settings, as JSON, below `deepspeed_config_file: |`",
        )
    deepspeed = read_configuration(json_path) if text is None and json_path is not None else json.loads(text or "")
    check_keys_and_values(deepspeed, DEEPSPEED_BLOCKS, path if json_path is None else json_path)
    zero = deepspeed.get("zero_optimization", {})
    # ZeRO++ keeps a second copy of the parameters within groups of this many ranks; 1 means none.
    hpz = int(zero.get("zero_hpz_partition_size", 1))
    quantized = [key for key in QUANTIZED_KEYS if zero.get(key)]
    devices = {block: (zero.get(block) or {}).get("device", "none") for block in ("offload_optimizer", "offload_param")}
    # `auto` in a precision block leaves the value to `TrainingArguments`, but still names the precision.
    enabled = [name for name in ("bf16", "fp16") if deepspeed.get(name, {}).get("enabled") in (True, AUTO)]
    return {
        "engine": "deepspeed",
        "sharding": "hybrid_shard" if hpz > 1 else SHARDING_OF_STAGE[zero.get("stage", 0)],
        "min_world_size": hpz,
        "world_size_multiple": hpz,
        "needs_gpu": f"{quantized[0]} runs CUDA kernels of DeepSpeed's" if quantized else None,
        "mixed_precision": enabled[0] if enabled else "no",
        **{block: None if device == "none" else device for block, device in devices.items()},
    }


def _torch_fields(config: dict[str, Any], engine: str, parallel: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a preset without DeepSpeed, whose YAML specifies everything.

    With `parallel` under MULTI_GPU, accelerate only starts the ranks: the toolkit's own loop runs the stages of a
    pipeline, and transformers shards any other model while it loads it.
    """
    fsdp = (config.get("fsdp_config") or {}) if engine == "fsdp2" else {}
    replicas = 1
    if engine == "fsdp2":
        replicas = int((config.get("parallelism_config") or {}).get("parallelism_config_dp_replicate_size", 1))
    at_load = engine == "ddp" and bool(parallel) and "pp" not in parallel
    sharding = "replicate"
    if replicas > 1 or (at_load and {"dp_replicate", "dp_shard"} <= set(parallel)):
        sharding = "hybrid_shard"
    elif engine == "fsdp2" or (at_load and "dp_shard" in parallel):
        sharding = "full_shard" if fsdp.get("fsdp_reshard_after_forward", True) else "shard_grad_op"
    offload = "cpu" if fsdp.get("fsdp_offload_params") else None
    return {
        "engine": "fsdp2" if at_load else "pipeline" if "pp" in parallel else engine,
        "sharding": sharding,
        "sharded_at_load": at_load,
        "replicas": replicas,
        "min_world_size": 2 * replicas if engine == "fsdp2" else 1,
        "world_size_multiple": replicas,
        "offload_optimizer": offload,
        "offload_param": offload,
        "mixed_precision": config.get("mixed_precision") or "no",
    }


def _smallest_layout(parallel: tuple[str, ...]) -> int:
    """The smallest world size: two ranks for each dimension that must be there, and experts on those of the others."""
    needed = [name for name in parallel if name in SAME_ROWS]
    if {"dp_shard", "tp"} <= set(parallel) or {"dp_shard", "dp_replicate"} <= set(parallel):
        needed.append("dp_shard")
    if {"dp_shard", "dp_replicate"} <= set(parallel):
        needed.append("dp_replicate")
    return int(2 ** max(1, len(needed)))
