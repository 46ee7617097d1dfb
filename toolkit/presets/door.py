"""The Python door: `TrainingArguments` with a preset's strategy in force, in a script of the user's own.

    args = load_preset("zero3").training_arguments(output_dir="out")     # first
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    Trainer(model=model, args=args, train_dataset=rows).train()

Started with `torchrun --nproc_per_node 2 script.py`, or with `accelerate launch` and no configuration file. What
`accelerate launch --config_file` would have put into the environment is put there now, so it must come before the
model is loaded and before anything else starts a process group.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cache import path_with_ninja, use_cached_extensions
from toolkit.errors import ToolkitError
from toolkit.presets.cpu_fsdp import enable_fsdp_on_cpu
from toolkit.presets.preset import Preset
from toolkit.presets.trainer import chosen_precision, launcher_environment, trainer_arguments
from toolkit.presets.world import next_world_size, why_not

if TYPE_CHECKING:
    from transformers import TrainingArguments

OWN_ARGUMENTS = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
# accelerate's launcher sets one of them when its configuration file names an engine.
ENGINE_VARIABLES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")

_in_force: list[Path] = []  # the preset of this process, once one is in force


def training_arguments(preset: Preset, given: dict[str, Any]) -> TrainingArguments:
    """Put the preset in force in this process, and give the arguments for its Trainer.

    Raises ToolkitError for what would silently put something else in force.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    refuse_own_arguments(preset, given)
    refuse_world_size(preset, world_size)
    if preset.accelerate_config_path not in _in_force:
        refuse_late_call(preset)
    on_cpu = _on_cpu(given)
    precision = chosen_precision(given, preset.mixed_precision, on_cpu=on_cpu)
    decided = trainer_arguments(preset, precision=precision)
    os.environ.update(launcher_environment(preset, precision=precision, world_size=world_size))
    if on_cpu:
        _prepare_cpu(preset)
        decided["use_cpu"] = True
    from transformers import TrainingArguments

    arguments = TrainingArguments(**{**decided, **given})
    if preset.engine == "none":
        arguments._n_gpu = min(arguments._n_gpu, 1)  # with several visible GPUs the Trainer would run DataParallel
    _in_force.append(preset.accelerate_config_path)
    return arguments


def refuse_own_arguments(preset: Preset, given: dict[str, Any]) -> None:
    """Arguments that say how to shard: the preset does."""
    for name in OWN_ARGUMENTS:
        if given.get(name) is not None:
            raise ToolkitError(
                f"{name} is the preset's to decide: {preset.name!r} puts {preset.engine} in force",
                hint="`toolkit preset export DIR` copies the files, to change there and load by path",
            )


def refuse_world_size(preset: Preset, world_size: int) -> None:
    """A number of processes that the preset cannot train in, or no launcher where it needs one."""
    if "LOCAL_RANK" not in os.environ and preset.engine != "none":
        raise ToolkitError(
            f"preset {preset.name!r} needs a launcher: no LOCAL_RANK is in the environment",
            hint=f"`torchrun --nproc_per_node {preset.min_world_size} script.py`, or `accelerate launch`",
        )
    reason = why_not(preset, world_size)
    if reason is not None:
        raise ToolkitError(
            f"preset {preset.name!r} {reason}, this script was started in {world_size}",
            hint=f"`torchrun --nproc_per_node {next_world_size(preset, world_size)} script.py`",
        )


def refuse_late_call(preset: Preset) -> None:
    """Whatever is there already was made for something else: a launcher's engine, a process group, a whole model."""
    first = "call `training_arguments` first, before a model is loaded or an Accelerator made"
    if _in_force:
        raise ToolkitError(f"{_in_force[0].stem!r} is in force in this process, {preset.name!r} cannot be as well")
    for name in ENGINE_VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            raise ToolkitError(
                f"{name} is set: this script was started by `accelerate launch` with an engine of its own",
                hint="leave out `--config_file` and its like; the preset brings its engine",
            )
    torch, state = sys.modules.get("torch"), sys.modules.get("accelerate.state")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ToolkitError("a process group is there already, made without the preset", hint=first)
    if state is not None and (state.AcceleratorState._shared_state or state.PartialState._shared_state):
        raise ToolkitError("an Accelerator is there already, made without the preset", hint=first)
    if "parameter" in preset.sharded_parts and _a_model_is_loaded():
        raise ToolkitError(
            f"a model is loaded already, whole in every process; {preset.name!r} shards it while it is loaded",
            hint=first,
        )


def _a_model_is_loaded() -> bool:
    modelling = sys.modules.get("transformers.modeling_utils")
    if modelling is None:
        return False
    gc.collect()  # one that nothing holds any more is no harm
    return any(issubclass(type(thing), modelling.PreTrainedModel) for thing in gc.get_objects())


def _on_cpu(given: dict[str, Any]) -> bool:
    import torch

    return bool(given.get("use_cpu")) or not torch.cuda.is_available()


def _prepare_cpu(preset: Preset) -> None:
    """What makes each engine real without a GPU; each is otherwise replaced by DDP without a word."""
    if preset.needs_gpu is not None:
        raise ToolkitError(f"preset {preset.name!r} does not run on a CPU: {preset.needs_gpu}")
    # With ACCELERATE_USE_CPU, accelerate turns a DeepSpeed run into DDP.
    os.environ["ACCELERATE_USE_CPU"] = "false" if preset.engine == "deepspeed" else "true"
    if preset.engine == "fsdp2":
        enable_fsdp_on_cpu()
    if preset.engine == "deepspeed":
        _start_deepspeed_on_cpu()


def _start_deepspeed_on_cpu() -> None:
    """DeepSpeed's own group first: `zero.Init` would otherwise read a world size of 1 inside `from_pretrained`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    use_cached_extensions()
    os.environ["PATH"] = path_with_ninja()
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo")
