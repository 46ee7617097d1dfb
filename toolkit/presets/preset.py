"""Presets: found by name or read from a user's own accelerate YAML.

>>> load_preset("zero3").engine
'deepspeed'
>>> "ddp" in preset_names()
True
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engines.engine import Engine
from toolkit.engines.registry import ENGINES
from toolkit.errors import ToolkitError, nearest, shown
from toolkit.files.documents import read_configuration, read_text, settings_for_path, unexpected
from toolkit.files.paths import is_file, user_path
from toolkit.parallel.layout import DIMENSIONS, PARALLEL_KEY, SAME_ROWS
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS, check_keys_and_values
from toolkit.presets.spec import PresetSpec
from toolkit.presets.training_arguments import from_pretrained_arguments, training_arguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

ENGINE_OF_TYPE = {
    "NO": ENGINES["none"],
    "MULTI_GPU": ENGINES["ddp"],
    "MULTI_CPU": ENGINES["ddp"],
    "DEEPSPEED": ENGINES["deepspeed"],
    "FSDP": ENGINES["fsdp2"],
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


# What people type for a preset, and what to type; the start of a name is enough.
OTHER_NAMES = {
    "qlora": "`--lora-r 16 --load-in-4bit`, with preset `ddp` or `fsdp2`",
    "lora": "`--lora-r 16`, with any preset",
    "deepspeed": "`zero2` or `zero3`",
    "auto": "leave `--preset` out: all are planned",
}
IN_FP16 = "fp16 is no preset: it is automatic on GPUs without bf16 (T4, V100)"


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
    return [_shipped(name) for name in preset_names()]


def _shipped(name: str) -> Preset:
    return read_preset(presets_root() / "accelerate_configs" / f"{name}.yaml")


def load_preset(name: str) -> Preset:
    """Load a preset by name, or by the path of an accelerate YAML.

    Raises ToolkitError for an unknown name, with all names and the nearest one.
    """
    if name.endswith((".yaml", ".yml")):
        return read_preset(user_path(name))
    names = preset_names()
    if name not in names:
        stem = name.lower().rpartition("/")[2].removesuffix(".json")  # of ds_configs too
        plain = re.sub("[-_]?(fp16|deepspeed(?=.)[-_]?)", "", stem.replace("-", "_"))
        close = plain if plain in names else nearest(plain, names)
        other = next((what for each, what in OTHER_NAMES.items() if plain.startswith(each)), None)
        hint = other or (f"did you mean `{close}`?" if close else "see `toolkit presets`")
        hint = f"{hint}{'' if hint[-1] == '?' else ';'} {IN_FP16}" if "fp16" in name.lower() else hint
        raise ToolkitError(f"unknown preset {shown(name)}; available: {', '.join(names)}", hint=hint)
    return _shipped(name)


def read_preset(path: Path) -> Preset:
    """Read an accelerate YAML, ours or a user's, and the DeepSpeed JSON that it names.

    Raises ToolkitError for what cannot be read or is not known: a key, a type, FSDP1, an engine.
    """
    config = read_configuration(path)
    check_keys_and_values(config, ACCELERATE_BLOCKS, path)
    engine, parallel = _engine(config, path)
    first = read_text(path).split("\n", 1)[0]
    settings, json_path, text = _read_settings(config, path) if engine.has_settings_file else (None, None, None)
    fields = engine.preset_fields(config, settings or {}, parallel)
    if parallel:
        fields |= {"min_world_size": _smallest_layout(parallel), "world_size_multiple": 1}
    return Preset(
        name=path.stem,
        summary=first.lstrip("# ").strip() if first.startswith("#") else "",
        engine=engine.name,
        max_world_size=engine.max_world_size,
        parallel=parallel,
        accelerate_config_path=path.resolve(),
        deepspeed_config_path=json_path,
        deepspeed_text=text,
        config=config,
        settings=settings,
        **fields,
    )


def _engine(config: dict[str, Any], path: Path) -> tuple[Engine, tuple[str, ...]]:
    """The engine, and the dimensions that its block lists under `parallel`: accelerate passes over that key."""
    distributed_type = config.get("distributed_type")
    if distributed_type not in ENGINE_OF_TYPE:
        raise unexpected(path, "distributed_type", distributed_type, f"one of {', '.join(ENGINE_OF_TYPE)}")
    if distributed_type == "FSDP" and str((config.get("fsdp_config") or {}).get("fsdp_version")) != "2":
        raise ToolkitError(f"{path}: this is FSDP1, which presets do not use", hint="add `fsdp_version: 2`")
    blocks = {block: (config.get(block) or {}).get(PARALLEL_KEY) for block in ("fsdp_config", "deepspeed_config")}
    block, names = next(((block, names) for block, names in blocks.items() if names), ("", []))
    engine = ENGINE_OF_TYPE[distributed_type].with_dimensions(names)
    if sorted(set(names), key=DIMENSIONS.index) != names:
        raise unexpected(path, f"{block}.parallel", names, f"names in this order: {', '.join(DIMENSIONS)}")
    if not set(names) <= set(engine.dimensions):
        engines = [each for each in ENGINES.values() if each.dimensions]
        possible = (f"{each.name} ({', '.join(sorted(each.dimensions))})" for each in engines)
        raise unexpected(path, f"{block}.parallel", names, f"dimensions of the engine: {' or '.join(possible)}")
    return engine, tuple(names)


def _read_settings(config: dict[str, Any], path: Path) -> tuple[dict[str, Any], Path | None, str | None]:
    named: str | None = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if named is None:
        what = f"{path}: deepspeed_config names no deepspeed_config_file"
        raise ToolkitError(what, hint="put the DeepSpeed settings, as JSON, below `deepspeed_config_file: |`")
    settings = settings_for_path(named, f"{path}: deepspeed_config_file")
    if settings is None:
        json_path = _named_json(named, path)
        settings = read_configuration(json_path)
        check_keys_and_values(settings, DEEPSPEED_BLOCKS, json_path)
        return settings, json_path, None
    check_keys_and_values(settings, DEEPSPEED_BLOCKS, path)
    return settings, _json_beside(settings, path), json.dumps(settings)


def _named_json(named: str, path: Path) -> Path:
    """accelerate resolves the JSON against the working directory; here a path relative to the YAML works as well."""
    relative = user_path(named)
    tried = [folder / relative for folder in (path.resolve().parent.parent, path.resolve().parent, Path.cwd())]
    found = next(filter(is_file, tried), None) or next(filter(os.path.lexists, tried), None)
    if found is None:
        what = f"{path}: deepspeed_config_file {shown(named)} does not exist"
        raise ToolkitError(what, hint=f"tried {tried[0]} first")
    return Path(os.path.realpath(found))


def _json_beside(settings: dict[str, Any], path: Path) -> Path | None:
    """The JSON of the YAML's name, or else one that says the same: `ulysses` has the settings of `zero3`."""
    folder = path.resolve().parent
    tried = [each / f"{path.stem}.json" for each in (folder, folder.parent / "ds_configs")]
    beside = next(filter(is_file, tried), None)
    if beside is None:
        others = sorted((folder.parent / "ds_configs").glob("*.json"))
        return next((each for each in others if read_configuration(each) == settings), None)
    if read_configuration(beside) != settings:
        what = f"{beside} differs from the settings in {path}, which are those that accelerate reads"
        hint = f"change both, remove the JSON, or let the YAML name it: `deepspeed_config_file: {beside}`"
        raise ToolkitError(what, hint=hint)
    return beside


def _smallest_layout(parallel: tuple[str, ...]) -> int:
    """The smallest world size: two ranks for each dimension that must be there, and experts on those of the others."""
    needed = [name for name in parallel if name in SAME_ROWS]
    if {"dp_shard", "tp"} <= set(parallel) or {"dp_shard", "dp_replicate"} <= set(parallel):
        needed.append("dp_shard")
    if {"dp_shard", "dp_replicate"} <= set(parallel):
        needed.append("dp_replicate")
    return int(2 ** max(1, len(needed)))
