"""The keys that accelerate 1.15 and DeepSpeed 0.19 understand, and the check of a preset's files against them.

>>> "fsdp_version" in FSDP_KEYS
True

accelerate rejects an unknown top-level key but silently accepts an unknown nested one; DeepSpeed silently accepts an
unknown top-level key (its `zero_optimization` block is strict). `tests/presets/test_known_keys.py` checks these lists
against the installed libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.value_limits import shown, unexpected


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCELERATE_KEYS = _words("""
    command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16
    dynamo_config enable_cpu_affinity fp8_config fsdp_config gpu_ids machine_rank main_process_ip
    main_process_port main_training_function megatron_lm_config mixed_precision mpirun_config num_machines
    num_processes parallelism_config rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo
    tpu_vm tpu_zone use_cpu
""")
FSDP_KEYS = _words("""
    fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy
    fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_ignored_modules
    fsdp_min_num_params fsdp_offload_params fsdp_reshard_after_forward fsdp_sharding_strategy
    fsdp_state_dict_type fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params
    fsdp_version
""")
DEEPSPEED_BLOCK_KEYS = _words("""
    deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
    offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path
    zero3_init_flag zero3_save_16bit_model zero_stage
""")
PARALLELISM_KEYS = _words("""
    parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_cp_size
    parallelism_config_dp_replicate_size parallelism_config_dp_shard_size
    parallelism_config_sp_attn_implementation parallelism_config_sp_backend parallelism_config_sp_seq_length
    parallelism_config_sp_seq_length_is_variable parallelism_config_sp_size parallelism_config_tp_size
""")
# Deprecated spellings (`cpu_offload`, ...) are left out: the toolkit reads only the current ones.
ZERO_KEYS = _words("""
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear offload_optimizer offload_param overlap_comm
    override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter
    round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
""")
OFFLOAD_KEYS = {
    "offload_optimizer": _words(
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio"
        " super_offload"
    ),
    "offload_param": _words("buffer_count buffer_size device max_in_cpu nvme_path pin_memory"),
}
# Strict blocks too: `auto_cast` and the loss scale exist for fp16 only.
PRECISION_KEYS = {
    "bf16": _words(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update"
    ),
    "fp16": _words(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power"
        " loss_scale loss_scale_window min_loss_scale"
    ),
}
# Without the keys that DeepSpeed 0.19.8 removed and rejects (`elasticity`, `amp`, ...).
DEEPSPEED_KEYS = _words("""
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers torch_autocast
    train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
""")


def check_accelerate_keys(config: Mapping[str, Any], path: Path) -> None:
    """Raise ToolkitError for an unknown key of an accelerate YAML, nested blocks included."""
    _check_keys(config, ACCELERATE_KEYS, block="the top level", path=path)
    blocks = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": DEEPSPEED_BLOCK_KEYS,
        "parallelism_config": PARALLELISM_KEYS,
    }
    for block, known in blocks.items():
        _check_keys(config.get(block), known, block=block, path=path)


def check_deepspeed_keys(config: Mapping[str, Any], path: Path) -> None:
    """Raise ToolkitError for an unknown key of a DeepSpeed JSON, at the top level or in `zero_optimization`."""
    _check_keys(config, DEEPSPEED_KEYS, block="the top level", path=path)
    _check_keys(config.get("zero_optimization"), ZERO_KEYS, block="zero_optimization", path=path)
    zero = config.get("zero_optimization") or {}
    for block, known in OFFLOAD_KEYS.items():
        _check_keys(zero.get(block), known, block=f"zero_optimization.{block}", path=path)


def _examples(known: frozenset[str]) -> str:
    return ", ".join(sorted(known)[:8])


def _check_keys(found: object, known: frozenset[str], *, block: str, path: Path) -> None:
    if found is not None and not isinstance(found, Mapping):
        raise unexpected(path, block, found, "keys and values")
    for key in map(str, found or ()):
        if key not in known:
            raise ToolkitError(
                f"{path}: unknown key {shown(key)} in {block}; engines silently ignore such a key",
                hint=did_you_mean(key[:200], known, otherwise=f"remove it; {block} has keys like {_examples(known)}"),
            )
