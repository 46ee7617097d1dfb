"""The keys of a preset's files and the type of each value, checked once when a preset is loaded.

>>> ACCELERATE_BLOCKS["fsdp_config"]["fsdp_offload_params"].expected
'true or false'

accelerate 1.15 rejects an unknown top-level key but silently accepts an unknown nested one; DeepSpeed 0.19 silently
accepts an unknown top-level key (its blocks are strict). What passes here can be read without a guard: by the planner,
the launcher, accelerate and DeepSpeed. `tests/presets/test_known_keys.py` compares keys and types with those of the
installed libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.files.documents import unexpected
from toolkit.parallel.layout import DIMENSIONS, PARALLEL_KEY

AUTO = "auto"
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class ValueType:
    """A kind of value: how a message calls the values that it accepts, and which they are."""

    expected: str
    accepts: Callable[[Any], bool]
    hint: str | None = None


def _is_whole(value: Any) -> bool:
    """Return True for 5 and for 5e8, which JSON and YAML read as a float."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def one_of(*choices: object) -> ValueType:
    """Return the type of a value that is one of a few, of the same type as that one."""
    words = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
    return ValueType(words, lambda value: any(type(value) is type(each) and value == each for each in choices))


def either(first: ValueType, second: ValueType) -> ValueType:
    """Return the type of a value that may be of two types."""
    expected = f"{first.expected}, or {second.expected}"
    return ValueType(expected, lambda value: first.accepts(value) or second.accepts(value))


def or_auto(kind: ValueType) -> ValueType:
    """Return the type with `auto`, which the Trainer fills in or DeepSpeed replaces by its default."""
    return ValueType(f'{kind.expected}, or "auto"', lambda value: value == AUTO or kind.accepts(value))


def or_null(kind: ValueType) -> ValueType:
    """Return the type with null, which stands for the library's default."""
    return ValueType(kind.expected, lambda value: value is None or kind.accepts(value), kind.hint)


SWITCH = ValueType("true or false", lambda value: type(value) is bool, "without quotes")
TEXT = ValueType("text in one line", _is_text, "put a number or a word like `no` in quotes")
SETTINGS = ValueType(
    "text: a path, or JSON", lambda value: isinstance(value, str) and _is_text(value.replace("\n", ""))
)
COUNT = ValueType("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
DEGREE = ValueType("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1)
WHOLE = ValueType("a whole number", _is_whole)
NUMBER = ValueType("a number of 0 or more", lambda value: type(value) in (int, float) and float(value) >= 0)
BLOCK = ValueType("keys and values", lambda value: isinstance(value, dict))
NOTHING = ValueType("nothing: no preset uses it", lambda value: not value, "remove the key")
ANYTHING = ValueType("a value that DeepSpeed checks", lambda _: True)
STAGE = ValueType("0, 1, 2 or 3", lambda value: type(value) in (int, float) and value in STAGES)
RESHARD = ValueType("true or false under FSDP2", SWITCH.accepts, "true is full_shard, false is shard_grad_op")
PARALLEL = ValueType(
    f"a list of {', '.join(DIMENSIONS)}",
    lambda value: isinstance(value, list) and all(name in DIMENSIONS for name in value),
)

Types = Mapping[str, ValueType]
PRECISIONS = ("no", "fp16", "bf16")
FP8_HINT = "presets have no `fp8`: `toolkit plan --fp8` plans torchao's beside a bf16 preset"


def _blocks(tables: Mapping[str, Mapping[ValueType, str]]) -> dict[str, Types]:
    """Return block to key to type, from block to type to keys."""
    return {
        block: {key: kind for kind, keys in table.items() for key in keys.split()} for block, table in tables.items()
    }


_OFFLOAD = {
    one_of(*OFFLOAD_DEVICES): "device",
    or_null(TEXT): "nvme_path",
    or_auto(COUNT): "buffer_count",
    or_auto(SWITCH): "pin_memory",
}
# Dotted name of each block that is checked to its keys, outer blocks first.
ACCELERATE_BLOCKS = _blocks(
    {
        "": {
            or_null(one_of("LOCAL_MACHINE")): "compute_environment",
            TEXT: "distributed_type",
            or_null(ValueType("no, fp16 or bf16", PRECISIONS.__contains__, FP8_HINT)): "mixed_precision",
            or_null(BLOCK): "deepspeed_config dynamo_config fsdp_config parallelism_config",
            or_null(COUNT): "machine_rank main_process_port num_machines num_processes",
            or_null(SWITCH): "debug enable_cpu_affinity same_network use_cpu",
            or_null(TEXT): "gpu_ids main_training_function rdzv_backend",
            or_null(either(TEXT, COUNT)): "main_process_ip",  # 0 is the node itself
            # `accelerate config` writes the rest for every engine, empty or off; `'no'` is off.
            or_null(either(SWITCH, TEXT)): "downcast_bf16",
            NOTHING: "command_file commands fp8_config megatron_lm_config mpirun_config tpu_env tpu_name"
            " tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone",
        },
        "deepspeed_config": {
            PARALLEL: PARALLEL_KEY,
            or_null(SETTINGS): "deepspeed_config_file",
            or_null(TEXT): "deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter"
            " deepspeed_moe_layer_cls_names deepspeed_multinode_launcher offload_optimizer_nvme_path"
            " offload_param_nvme_path",
            or_null(one_of(*OFFLOAD_DEVICES)): "offload_optimizer_device offload_param_device",
            or_null(SWITCH): "zero3_init_flag zero3_save_16bit_model",
            or_auto(DEGREE): "gradient_accumulation_steps",
            or_auto(NUMBER): "gradient_clipping",
            one_of(*STAGES): "zero_stage",
        },
        "fsdp_config": {
            PARALLEL: PARALLEL_KEY,
            SWITCH: "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"
            " fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_offload_params fsdp_sync_module_states"
            " fsdp_use_orig_params",
            # For FSDP1, which presets do not use, the last of these and the next are numbers or a strategy.
            or_null(TEXT): "fsdp_ignored_modules fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch",
            either(TEXT, COUNT): "fsdp_sharding_strategy",
            RESHARD: "fsdp_reshard_after_forward",
            one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"): "fsdp_auto_wrap_policy",
            one_of("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"): "fsdp_state_dict_type",
            COUNT: "fsdp_min_num_params",
            or_null(one_of(2, 1, "2", "1")): "fsdp_version",
        },
        "parallelism_config": {
            TEXT: "parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_backend"
            " parallelism_config_sp_attn_implementation",
            DEGREE: "parallelism_config_cp_size parallelism_config_dp_replicate_size parallelism_config_dp_shard_size"
            " parallelism_config_sp_size parallelism_config_tp_size",
            or_null(either(COUNT, TEXT)): "parallelism_config_sp_seq_length",
            SWITCH: "parallelism_config_sp_seq_length_is_variable",
        },
    }
)
DEEPSPEED_BLOCKS = _blocks(
    {
        # Without the keys that DeepSpeed 0.19.8 removed and rejects (`elasticity`, `amp`, ...).
        "": {
            BLOCK: "activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger compile csv_monitor"
            " data_efficiency data_types flops_profiler fp16 hybrid_engine optimizer pipeline scheduler"
            " tensor_parallel tensorboard timers torch_autocast wandb zero_optimization",
            SWITCH: "dataloader_drop_last disable_allgather dump_state memory_breakdown prescale_gradients"
            " use_data_before_expert_parallelism wall_clock_breakdown zero_allow_untested_optimizer"
            " zero_force_ds_cpu_optimizer",
            or_auto(DEGREE): "gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu",
            or_auto(NUMBER): "gradient_clipping",
            NUMBER: "gradient_predivide_factor",
            or_null(NUMBER): "steps_per_print",
            or_null(TEXT): "communication_data_type seq_parallel_communication_data_type",
            ANYTHING: "datastates_ckpt disable_python_gc expert_parallel gradient_allreduce_op log_level"
            " managed_gradient_accumulation vocabulary_size weight_quantization",
        },
        # Deprecated spellings (`cpu_offload`, ...) are left out: the toolkit reads only the current ones.
        "zero_optimization": {
            or_auto(SWITCH): "allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint"
            " enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights"
            " log_trace_cache_warnings memory_efficient_linear override_module_apply parameter_alignment"
            " pipeline_loading_checkpoint reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory"
            " stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save"
            " stage3_use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce",
            or_null(or_auto(SWITCH)): "overlap_comm",
            # Not `auto`: they decide which preset this is.
            SWITCH: "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights",
            DEGREE: "zero_hpz_partition_size",
            STAGE: "stage",
            or_auto(DEGREE): "reduce_bucket_size",
            or_auto(COUNT): "allgather_bucket_size stage3_max_live_parameters stage3_max_reuse_distance"
            " stage3_model_persistence_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size"
            " sub_group_size",
            or_auto(WHOLE): "stage3_module_granularity_threshold",
            or_null(BLOCK): "offload_optimizer offload_param zenflow",
            BLOCK: "leaf_module",
        },
        "zero_optimization.offload_optimizer": {
            **_OFFLOAD,
            or_auto(SWITCH): "fast_init pipeline_read pipeline_write super_offload",
            or_auto(NUMBER): "cpuadam_cores_perc ratio",
        },
        "zero_optimization.offload_param": {**_OFFLOAD, or_auto(COUNT): "buffer_size max_in_cpu"},
        # `auto_cast` and the loss scale exist for fp16 only.
        "bf16": {
            or_auto(SWITCH): "enabled",
            SWITCH: "bf16_master_weights_and_grads bf16_optimizer_states",
            ANYTHING: "check_grad_overflow immediate_grad_update",
        },
        "fp16": {
            or_auto(SWITCH): "enabled",
            ANYTHING: "auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis initial_scale_power"
            " loss_scale loss_scale_window min_loss_scale",
        },
    }
)


def check_keys_and_values(config: Mapping[str, Any], blocks: Mapping[str, Types], path: Path) -> None:
    """Raise ToolkitError for an unknown key, and for a value of another type than its key has."""
    found = {block: _block(config, block, path) for block in blocks}
    for block, values in found.items():
        known, where = blocks[block], block or "the top level"
        for key in map(str, values):
            if key not in known:
                examples = f"remove it; {where} has keys like {', '.join(sorted(known)[:8])}"
                raise ToolkitError(
                    f"{path}: unknown key {shown(key)} in {where}; engines silently ignore such a key",
                    hint=did_you_mean(key[:200], known, otherwise=examples),
                )
    for block, values in found.items():
        for key, kind in blocks[block].items():
            if key in values and not kind.accepts(values[key]):
                name = f"{block}.{key}" if block else key
                raise unexpected(path, name, values[key], kind.expected, hint=kind.hint)


def _block(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """Return a block by its dotted name; empty where it, or a block around it, is absent or null."""
    for part in name.split(".") if name else ():
        value = config.get(part)
        if value is not None and not isinstance(value, Mapping):
            raise unexpected(path, name, value, "keys and values")
        config = value or {}
    return config
