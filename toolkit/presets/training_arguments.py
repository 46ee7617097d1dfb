"""A preset for transformers' Trainer: its arguments, the environment beside them, and both put in effect.

    args = load_preset("zero3").training_arguments(output_dir="out")     # first
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    Trainer(model=model, args=args, train_dataset=rows).train()

The variables that `accelerate launch --config_file` would have set are set in the process itself, so this must happen
before the model is loaded and before anything else starts a process group. `Preset` says how to call it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engines import sharded_at_load, split_sequences
from toolkit.engines.compiled_ops import check_extensions_folder, path_with_ninja, use_cached_extensions
from toolkit.engines.engine import ENGINE_VARIABLES
from toolkit.engines.fsdp2 import enable_fsdp_on_cpu
from toolkit.engines.registry import ENGINES
from toolkit.engines.zero_process import join_group_on_cpu
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json_object
from toolkit.job.accumulation import chosen_accumulate, with_accumulate
from toolkit.job.job import Job
from toolkit.models.optimizers import DEFAULT_OPTIMIZER
from toolkit.parallel.layout import DEGREES, PARALLEL_KEY, ParallelLayout
from toolkit.presets.compatibility import CPU
from toolkit.presets.spec import STRATEGY_ARGUMENTS, PresetSpec, default_accumulate
from toolkit.presets.support import check_degrees_given, check_supported

if TYPE_CHECKING:
    from transformers import TrainingArguments

# What a preset may set at the YAML's top level beside its engine's block; anything else is read by the launcher only.
YAML_KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "parallelism_config", "num_processes"),
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "rdzv_backend"),
    *("same_network", "main_training_function", "use_cpu", "debug"),
}
SDPA = "sdpa"

# The preset of this process, once one is in effect, and how it divides the ranks.
_presets_in_effect: dict[Path, ParallelLayout | None] = {}


def resolve_precision(given: Mapping[str, Any], preset_precision: str, *, on_cpu: bool) -> str:
    """Return `bf16`, `fp16` or `no`: the user's choice, else the preset's on a GPU and fp32 on a CPU.

    >>> resolve_precision({"bf16": False}, "bf16", on_cpu=False)
    'no'
    """
    for precision in ("bf16", "fp16"):
        if given.get(precision):
            return precision
    return "no" if on_cpu or "bf16" in given or "fp16" in given else preset_precision


def trainer_arguments(preset: PresetSpec, *, precision: str) -> dict[str, Any]:
    """Return the arguments of `TrainingArguments` that put the strategy in effect.

    Raises ToolkitError for a key that only `accelerate launch --config_file` can put in effect.

    >>> from toolkit.presets import load_preset
    >>> trainer_arguments(load_preset("fsdp2_grad_op"), precision="bf16")["fsdp_config"]["reshard_after_forward"]
    False
    """
    config = preset.accelerate_config()
    known = {block: {*keys, PARALLEL_KEY} for engine in ENGINES.values() for block, keys in engine.script_keys.items()}
    lost = [key for key in config if key not in YAML_KEYS and key not in known]
    lost += [key for block, keys in known.items() for key in config.get(block) or {} if key not in keys]
    if lost:
        what = f"{preset.accelerate_config_path}: training arguments cannot carry {lost[0]!r}"
        raise ToolkitError(what, hint="start the script with `accelerate launch --config_file`, or remove the key")
    arguments: dict[str, Any] = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    arguments |= preset.traits.training_arguments(config, preset.settings)
    if preset.traits.chooses_accumulation:
        arguments["accelerator_config"] = with_accumulate({}, default_accumulate(preset))
    return arguments


def strategy_variables(preset: PresetSpec, *, precision: str, world_size: int | None = None) -> dict[str, str]:
    """Return the part of the launcher's environment that `TrainingArguments` cannot carry, without accelerate.

    A test compares it with `launcher_environment`, which derives everything with accelerate's own functions.
    """
    config = preset.accelerate_config()
    environment = {"ACCELERATE_MIXED_PRECISION": precision} | preset.traits.variables(config)
    if not preset.traits.uses_fsdp_plugin:
        return environment
    mesh = dict(config.get("parallelism_config") or {})
    shard_size = preset.dp_shard_size(world_size) if world_size else None
    if shard_size is not None:
        mesh["parallelism_config_dp_shard_size"] = shard_size
    if mesh:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return environment | {key.upper(): str(value) for key, value in mesh.items()}


def training_arguments(
    preset: PresetSpec, given: dict[str, Any], arguments_class: type[TrainingArguments] | None = None
) -> TrainingArguments:
    """Put the preset in effect in this process, and return the arguments for its Trainer (`Preset`)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    degrees = {name: given[name] for name in DEGREES if given.get(name) is not None}
    given = {name: value for name, value in given.items() if name not in DEGREES}
    _check_given(preset, given, degrees, world_size=world_size)
    if preset.accelerate_config_path not in _presets_in_effect:
        _refuse_late_call(preset)
    import torch

    on_cpu = bool(given.get("use_cpu")) or not torch.cuda.is_available()
    precision = resolve_precision(given, preset.mixed_precision, on_cpu=on_cpu)
    decided = trainer_arguments(preset, precision=precision)
    os.environ.update(strategy_variables(preset, precision=precision, world_size=world_size))
    if on_cpu:
        _prepare_cpu(preset)
        decided["use_cpu"] = True
    layout = preset.layout(world_size, degrees)
    decided |= parallelism_arguments(preset, layout, on_cpu=on_cpu)
    from transformers import TrainingArguments  # after the variables are set

    arguments = (arguments_class or TrainingArguments)(**{**decided, **accumulation_arguments(preset, given)})
    if not preset.traits.needs_launcher:
        arguments._n_gpu = min(arguments._n_gpu, 1)  # with several visible GPUs the Trainer would run DataParallel
    _presets_in_effect[preset.accelerate_config_path] = layout
    return arguments


def from_pretrained_arguments(preset: PresetSpec, degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that shard the model while it is loaded; none for other presets."""
    if preset.accelerate_config_path not in _presets_in_effect:
        what = f"preset {preset.name!r} is not in effect yet in this process"
        raise ToolkitError(what, hint=f'`load_preset("{preset.name}").training_arguments(...)` comes first')
    layout = _presets_in_effect[preset.accelerate_config_path]
    for name, degree in degrees.items():
        if layout is None or degree != getattr(layout, name):
            in_effect = "none" if layout is None else getattr(layout, name)
            what = f"{name} is {degree} here and {in_effect} in `training_arguments`"
            raise ToolkitError(what, hint="leave it out here: the degrees in effect are taken")
    if layout is None or not preset.sharded_at_load:
        return {}
    half = os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    return {"distributed_config": sharded_at_load.distributed_config(layout, half=half)}


def parallelism_arguments(
    preset: PresetSpec, layout: ParallelLayout | None, *, on_cpu: bool, attention: str = SDPA
) -> dict[str, Any]:
    """Put the libraries right for a layout in this process, and return the arguments that divide the sequences.

    `attention` is the model's implementation, which DeepSpeed's sequence parallelism must be told.
    """
    if layout is None or layout.pp > 1:
        return {}
    if preset.sharded_at_load:
        sharded_at_load.apply_fixes(on_cpu=on_cpu)
        return {}
    if "cp" not in preset.parallel:
        split_sequences.apply_ulysses_fixes(on_cpu=on_cpu)
    elif on_cpu:
        split_sequences.ring_attention_on_cpu()
    return {"parallelism_config": split_sequences.parallelism_config(layout, attention=attention)}


def accumulation_arguments(preset: PresetSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with `accumulate` carried out by `accelerator_config`, whose other keys stay.

    Raises ToolkitError where the two contradict each other, and for what the preset cannot do.

    >>> from toolkit.presets import load_preset
    >>> accumulation_arguments(load_preset("fsdp2"), {"accumulate": "whole"})
    {'accelerator_config': {'gradient_accumulation_kwargs': {'sync_each_batch': False}}}
    """
    config = given.get("accelerator_config") or {}
    if isinstance(config, str):
        config = read_json_object(Path(config))
    configured = dict(config if isinstance(config, Mapping) else config.to_dict())
    chosen = chosen_accumulate(given.get("accumulate"), configured)
    check_supported(preset, Job(accumulate=chosen), purpose="script")
    others = {name: value for name, value in given.items() if name != "accumulate"}
    if not preset.traits.chooses_accumulation:
        return others
    return {**others, "accelerator_config": with_accumulate(configured, chosen or default_accumulate(preset))}


def _check_given(preset: PresetSpec, given: Mapping[str, Any], degrees: Mapping[str, int], *, world_size: int) -> None:
    for name in STRATEGY_ARGUMENTS:
        if given.get(name) is not None:
            what = f"{name} is set by the preset: {preset.name!r} uses {preset.engine}"
            hint = "`toolkit preset export DIR` copies the files, to change there and load by path"
            raise ToolkitError(what, hint=hint)
    if "LOCAL_RANK" not in os.environ and preset.traits.needs_launcher:
        what = f"preset {preset.name!r} needs a launcher: no LOCAL_RANK is in the environment"
        hint = f"`torchrun --nproc_per_node {preset.min_world_size} script.py`, or `accelerate launch`"
        raise ToolkitError(what, hint=hint)
    check_degrees_given(preset, degrees, purpose="script")
    check_supported(preset, Job().with_values(**degrees), world_size=world_size, purpose="script")
    strategy, optim = given.get("save_strategy", "steps"), given.get("optim") or DEFAULT_OPTIMIZER
    saves = str(getattr(strategy, "value", strategy)) != "no"
    if preset.sharded_at_load and saves and not given.get("save_only_model"):  # the Trainer raises when it is built
        raise ToolkitError(
            f"preset {preset.name!r} shards the model while it is loaded, and the Trainer cannot resume such a model:"
            " it saves no optimizer states of it",
            hint='`save_strategy="no"`, or `save_only_model=True`; runs of `toolkit train` resume',
        )
    check_supported(preset, Job(optim=str(getattr(optim, "value", optim))), purpose="script")


def _refuse_late_call(preset: PresetSpec) -> None:
    first = "call `training_arguments` first, before a model is loaded or an Accelerator is made"
    if _presets_in_effect:
        active = next(iter(_presets_in_effect)).stem
        raise ToolkitError(f"preset {active!r} is in effect in this process, so {preset.name!r} cannot be")
    for name in ENGINE_VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            what = f"{name} is set: this script was started by `accelerate launch` with an engine of its own"
            hint = "leave out `--config_file` and similar flags; the preset configures its engine"
            raise ToolkitError(what, hint=hint)
    torch, state = sys.modules.get("torch"), sys.modules.get("accelerate.state")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ToolkitError("a process group exists already, made without the preset", hint=first)
    if state is not None and (state.AcceleratorState._shared_state or state.PartialState._shared_state):
        raise ToolkitError("an Accelerator exists already, made without the preset", hint=first)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None and (preset.shards_parameters or preset.sharded_at_load):
        gc.collect()  # a model that nothing references any more does no harm
        if any(issubclass(type(thing), modeling.PreTrainedModel) for thing in gc.get_objects()):
            what = f"a complete model is loaded already in every process; {preset.name!r} shards it while it is loaded"
            raise ToolkitError(what, hint=first)


def _prepare_cpu(preset: PresetSpec) -> None:
    """Make each engine run without a GPU, where accelerate would silently fall back to DDP."""
    check_supported(preset, device=CPU, purpose="script")
    os.environ["ACCELERATE_USE_CPU"] = preset.traits.accelerate_uses_cpu
    enable_fsdp_on_cpu()
    if preset.traits.compiles_ops:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        use_cached_extensions()
        check_extensions_folder()
        os.environ["PATH"] = path_with_ninja()
        join_group_on_cpu()
