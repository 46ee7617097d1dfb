"""A preset as transformers' Trainer and accelerate's environment say it: plain values, nothing imported.

>>> trainer_arguments(load_preset("fsdp2_grad_op"), precision="bf16")["fsdp_config"]["reshard_after_forward"]
False
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.presets.preset import Preset

# accelerate's key -> the key of `TrainingArguments.fsdp_config` (transformers 5.23, `_process_fsdp_args`), which
# drops every other one without a word.
FSDP_CONFIG_KEYS = {
    "fsdp_version": "version",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_auto_wrap_policy": "auto_wrap_policy",
    "fsdp_min_num_params": "min_num_params",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_state_dict_type": "state_dict_type",
    "fsdp_activation_checkpointing": "activation_checkpointing",
}
# These the environment alone carries: accelerate's plugin reads them there, whoever makes it.
FSDP_ENVIRONMENT_KEYS = ("fsdp_activation_checkpointing_offload", "fsdp_ignored_modules")
# What a preset may say at the YAML's top level; anything else is the launcher's, which is not there.
YAML_KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "fsdp_config", "deepspeed_config"),
    *("parallelism_config", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("gpu_ids", "rdzv_backend", "same_network", "main_training_function", "use_cpu", "debug"),
}


def chosen_precision(given: Mapping[str, Any], promised: str, *, on_cpu: bool) -> str:
    """`bf16`, `fp16` or `no`: what the user says, else the promised one on a GPU and fp32 on a CPU.

    >>> chosen_precision({"bf16": False}, "bf16", on_cpu=False)
    'no'
    """
    for precision in ("bf16", "fp16"):
        if given.get(precision):
            return precision
    return "no" if on_cpu or "bf16" in given or "fp16" in given else promised


def trainer_arguments(preset: Preset, *, precision: str) -> dict[str, Any]:
    """The arguments of `TrainingArguments` that put the strategy in force.

    Raises ToolkitError for a key that only `accelerate launch --config_file` can put in force.
    """
    refuse_launcher_keys(preset)
    arguments: dict[str, Any] = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    if preset.engine == "deepspeed":
        arguments["deepspeed"] = preset.deepspeed_config()
    if preset.engine == "fsdp2":
        fsdp = preset.accelerate_config()["fsdp_config"]
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            FSDP_CONFIG_KEYS[key]: value for key, value in fsdp.items() if key in FSDP_CONFIG_KEYS
        }
    if preset.engine == "ddp":
        arguments["ddp_find_unused_parameters"] = False  # the Trainer's default walks the graph once more every step
    return arguments


def launcher_environment(preset: Preset, *, precision: str, world_size: int | None = None) -> dict[str, str]:
    """What `accelerate launch --config_file` would put into each rank's environment for the strategy."""
    environment = {"ACCELERATE_MIXED_PRECISION": precision}
    if preset.engine == "deepspeed":
        environment["ACCELERATE_USE_DEEPSPEED"] = "true"
    if preset.engine != "fsdp2":
        return environment
    config = preset.accelerate_config()
    environment["ACCELERATE_USE_FSDP"] = "true"
    for key, value in config["fsdp_config"].items():
        name = key.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
        environment[name] = str(value).lower() if isinstance(value, bool) else str(value)
    mesh = dict(config.get("parallelism_config") or {})
    shard_size = preset.dp_shard_size(world_size) if world_size else None
    if shard_size is not None:
        mesh["parallelism_config_dp_shard_size"] = shard_size
    if mesh:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return environment | {key.upper(): str(value) for key, value in mesh.items()}


def refuse_launcher_keys(preset: Preset) -> None:
    """Keys that only accelerate's launcher reads, and FSDP1's, which have no meaning under FSDP2."""
    config = preset.accelerate_config()
    known = {"fsdp_config": {*FSDP_CONFIG_KEYS, *FSDP_ENVIRONMENT_KEYS}, "deepspeed_config": {"deepspeed_config_file"}}
    lost = [key for key in config if key not in YAML_KEYS]
    lost += [key for block, keys in known.items() for key in config.get(block) or {} if key not in keys]
    if lost:
        raise ToolkitError(
            f"{preset.accelerate_config_path}: training arguments cannot carry {lost[0]!r}",
            hint="start the script with `accelerate launch --config_file`, or remove the key",
        )
