"""The type of each value in a preset's files, checked once when a preset is loaded.

>>> FSDP_TYPES["fsdp_offload_params"].expected
'true or false'

What passes here can be read without a guard: by the planner, the launcher, accelerate and DeepSpeed.
`tests/presets/test_value_types.py` compares the types with those of the installed libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.files.value_limits import unexpected
from toolkit.parallel.layout import DIMENSIONS

AUTO = "auto"
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
PRECISIONS = ("no", "fp16", "bf16")
MAX_TEXT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueType:
    """A kind of value: which values it accepts, and how a message calls them."""

    expected: str
    accepts: Callable[[Any], bool]
    hint: str | None = None


def _is_whole(value: Any) -> bool:
    """Return True for 5 and for 5e8, which JSON and YAML read as a float."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


SWITCH = ValueType(expected="true or false", accepts=lambda value: type(value) is bool, hint="without quotes")
TEXT = ValueType(expected="text in one line", accepts=_is_text, hint="put a number or a word like `no` in quotes")
COUNT = ValueType(expected="a whole number of 0 or more", accepts=lambda value: _is_whole(value) and value >= 0)
DEGREE = ValueType(expected="a whole number of 1 or more", accepts=lambda value: _is_whole(value) and value >= 1)
WHOLE = ValueType(expected="a whole number", accepts=_is_whole)
NUMBER = ValueType(
    expected="a number of 0 or more", accepts=lambda value: type(value) in (int, float) and float(value) >= 0
)
BLOCK = ValueType(expected="keys and values", accepts=lambda value: isinstance(value, dict))
NAMES = ValueType(
    expected="a list of names", accepts=lambda value: isinstance(value, list) and all(map(_is_text, value))
)
NOTHING = ValueType(expected="nothing: no preset uses it", accepts=lambda value: not value, hint="remove the key")


def one_of(*choices: object) -> ValueType:
    """Return the type of a value that is one of a few, of the same type as that one."""
    words = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
    return ValueType(
        expected=words, accepts=lambda value: any(type(value) is type(each) and value == each for each in choices)
    )


def either(first: ValueType, second: ValueType) -> ValueType:
    """Return the type of a value that may be of two types."""
    return ValueType(
        expected=f"{first.expected}, or {second.expected}",
        accepts=lambda value: first.accepts(value) or second.accepts(value),
    )


def or_auto(kind: ValueType) -> ValueType:
    """Return the type with `auto`, which the Trainer fills in or DeepSpeed replaces by its default."""
    return ValueType(expected=f'{kind.expected}, or "auto"', accepts=lambda value: value == AUTO or kind.accepts(value))


def or_null(kind: ValueType) -> ValueType:
    """Return the type with null, which stands for the library's default."""
    return ValueType(expected=kind.expected, accepts=lambda value: value is None or kind.accepts(value), hint=kind.hint)


def _each(kind: ValueType, keys: str) -> dict[str, ValueType]:
    return dict.fromkeys(keys.split(), kind)


Types = Mapping[str, ValueType]

ACCELERATE_TYPES: Types = {
    "compute_environment": or_null(one_of("LOCAL_MACHINE")),
    "distributed_type": TEXT,
    "mixed_precision": or_null(one_of(*PRECISIONS)),
    **_each(or_null(BLOCK), "deepspeed_config dynamo_config fsdp_config parallelism_config"),
    **_each(or_null(COUNT), "machine_rank main_process_port num_machines num_processes"),
    **_each(or_null(SWITCH), "debug enable_cpu_affinity same_network use_cpu"),
    **_each(or_null(TEXT), "gpu_ids main_process_ip main_training_function rdzv_backend"),
    # `accelerate config` writes these for every engine, empty or off; `'no'` is off.
    **_each(or_null(either(SWITCH, TEXT)), "downcast_bf16"),
    **_each(NOTHING, "command_file commands fp8_config megatron_lm_config mpirun_config"),
    **_each(NOTHING, "tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone"),
}
# Read by the toolkit alone: the launcher of accelerate passes over a key that it does not know in these blocks.
PARALLEL = {
    "parallel": ValueType(
        expected=f"a list of {', '.join(DIMENSIONS)}",
        accepts=lambda value: isinstance(value, list) and all(name in DIMENSIONS for name in value),
    )
}
FSDP_TYPES: Types = {
    **PARALLEL,
    **_each(
        SWITCH,
        "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_cpu_ram_efficient_loading"
        " fsdp_forward_prefetch fsdp_offload_params fsdp_sync_module_states fsdp_use_orig_params",
    ),
    **_each(or_null(TEXT), "fsdp_ignored_modules fsdp_transformer_layer_cls_to_wrap"),
    # For FSDP1, which presets do not use, these are numbers or a strategy.
    "fsdp_backward_prefetch": or_null(TEXT),
    "fsdp_sharding_strategy": either(TEXT, COUNT),
    "fsdp_reshard_after_forward": ValueType(
        expected="true or false under FSDP2", accepts=SWITCH.accepts, hint="true is full_shard, false is shard_grad_op"
    ),
    "fsdp_auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_state_dict_type": one_of("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
    "fsdp_min_num_params": COUNT,
    "fsdp_version": or_null(one_of(2, 1, "2", "1")),
}
DEEPSPEED_BLOCK_TYPES: Types = {
    **PARALLEL,
    **_each(
        or_null(TEXT),
        "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter"
        " deepspeed_moe_layer_cls_names deepspeed_multinode_launcher offload_optimizer_nvme_path"
        " offload_param_nvme_path",
    ),
    **_each(or_null(one_of(*OFFLOAD_DEVICES)), "offload_optimizer_device offload_param_device"),
    **_each(or_null(SWITCH), "zero3_init_flag zero3_save_16bit_model"),
    "gradient_accumulation_steps": or_auto(DEGREE),
    "gradient_clipping": or_auto(NUMBER),
    "zero_stage": one_of(*STAGES),
}
PARALLELISM_TYPES: Types = {
    **_each(
        TEXT,
        "parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_attn_implementation"
        " parallelism_config_sp_backend",
    ),
    **_each(
        DEGREE,
        "parallelism_config_cp_size parallelism_config_dp_replicate_size parallelism_config_dp_shard_size"
        " parallelism_config_sp_size parallelism_config_tp_size",
    ),
    "parallelism_config_sp_seq_length": or_null(either(COUNT, TEXT)),
    "parallelism_config_sp_seq_length_is_variable": SWITCH,
}
ZERO_TYPES: Types = {
    **_each(
        or_auto(SWITCH),
        "allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint enable_sanity_checks"
        " ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings"
        " memory_efficient_linear override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_scatter"
        " round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential"
        " stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"
        " use_multi_rank_bucket_allreduce",
    ),
    "overlap_comm": or_null(or_auto(SWITCH)),
    # Not `auto`: they decide which preset this is.
    **_each(SWITCH, "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"),
    "zero_hpz_partition_size": DEGREE,
    "stage": ValueType(expected="0, 1, 2 or 3", accepts=lambda value: type(value) in (int, float) and value in STAGES),
    "reduce_bucket_size": or_auto(DEGREE),
    **_each(
        or_auto(COUNT),
        "allgather_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold"
        " stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size",
    ),
    "stage3_module_granularity_threshold": or_auto(WHOLE),
    **_each(or_null(BLOCK), "offload_optimizer offload_param zenflow"),
    "leaf_module": BLOCK,
}
_OFFLOAD_TYPES: Types = {
    "device": one_of(*OFFLOAD_DEVICES),
    "nvme_path": or_null(TEXT),
    "buffer_count": or_auto(COUNT),
    "pin_memory": or_auto(SWITCH),
}
OFFLOAD_OPTIMIZER_TYPES: Types = {
    **_OFFLOAD_TYPES,
    **_each(or_auto(SWITCH), "fast_init pipeline_read pipeline_write super_offload"),
    **_each(or_auto(NUMBER), "cpuadam_cores_perc ratio"),
}
OFFLOAD_PARAM_TYPES: Types = {**_OFFLOAD_TYPES, **_each(or_auto(COUNT), "buffer_size max_in_cpu")}
_PRECISION_TYPES: Types = {"enabled": or_auto(SWITCH)}
DEEPSPEED_TYPES: Types = {
    **_each(
        BLOCK,
        "activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger compile csv_monitor data_efficiency"
        " data_types flops_profiler fp16 hybrid_engine optimizer pipeline scheduler tensor_parallel tensorboard timers"
        " torch_autocast wandb zero_optimization",
    ),
    **_each(
        SWITCH,
        "dataloader_drop_last disable_allgather dump_state memory_breakdown prescale_gradients"
        " use_data_before_expert_parallelism wall_clock_breakdown zero_allow_untested_optimizer"
        " zero_force_ds_cpu_optimizer",
    ),
    **_each(or_auto(DEGREE), "gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu"),
    "gradient_clipping": or_auto(NUMBER),
    "gradient_predivide_factor": NUMBER,
    "steps_per_print": or_null(NUMBER),
    **_each(or_null(TEXT), "communication_data_type seq_parallel_communication_data_type"),
}
ACCELERATE_BLOCKS: Mapping[str, Types] = {
    "": ACCELERATE_TYPES,
    "deepspeed_config": DEEPSPEED_BLOCK_TYPES,
    "fsdp_config": FSDP_TYPES,
    "parallelism_config": PARALLELISM_TYPES,
}
DEEPSPEED_BLOCKS: Mapping[str, Types] = {
    "": DEEPSPEED_TYPES,
    "bf16": _PRECISION_TYPES,
    "fp16": _PRECISION_TYPES,
    "zero_optimization": ZERO_TYPES,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER_TYPES,
    "zero_optimization.offload_param": OFFLOAD_PARAM_TYPES,
}


def check_values(config: Mapping[str, Any], blocks: Mapping[str, Types], path: Path) -> None:
    """Raise ToolkitError for a value of another type than its key has, block by block, outer ones first."""
    for block, types in blocks.items():
        values: Any = config
        for part in block.split(".") if block else ():
            values = values.get(part) or {}
        for key, kind in types.items():
            if key in values and not kind.accepts(values[key]):
                name = f"{block}.{key}" if block else key
                raise unexpected(path, name, values[key], kind.expected, hint=kind.hint)
