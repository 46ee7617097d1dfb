"""Keys that libraries have removed or renamed, and what to write instead.

`tests/lint/test_library_behaviour.py` checks that the installed libraries refuse them.
"""

from __future__ import annotations

# DeepSpeed 0.19.8 refuses each, even when it is disabled.
DEEPSPEED_REMOVED: dict[str, str | None] = {
    "amp": "bf16",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning",
    **dict.fromkeys(("compression_training", "eigenvalue", "elasticity", "graph_harvesting", "nebula")),
    **dict.fromkeys(("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients")),
}
ZERO_REMOVED = ("mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param")
# Old spellings that DeepSpeed still accepts, with a warning in the log.
ZERO_DEPRECATED = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "pin_memory in the offload blocks",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
# Fields of transformers 4 under their new names, with the same value.
TRAINING_ARGUMENTS_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
}
# Every removed field of transformers 4, and its replacement; None where nothing replaces it.
TRAINING_ARGUMENTS_REMOVED: dict[str, str | None] = {
    **TRAINING_ARGUMENTS_RENAMED,
    **dict.fromkeys(("fp16_backend", "fp16_opt_level", "half_precision_backend", "jit_mode_eval", "mp_parameters")),
    **dict.fromkeys(("overwrite_output_dir", "past_index", "ray_scope", "save_safetensors", "tpu_num_cores")),
    **dict.fromkeys(("use_ipex", "use_legacy_prediction_loop", "use_mps_device")),
    "adafactor": "optim: adafactor",
    "dispatch_batches": "accelerator_config: {dispatch_batches: ...}",
    "fsdp_min_num_params": "fsdp_config: {min_num_params: ...}",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config: {transformer_layer_cls_to_wrap: ...}",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "include_inputs_for_metrics": "include_for_metrics: [inputs]",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id: organization/name",
    "sharded_ddp": "fsdp: true",
    "split_batches": "accelerator_config: {split_batches: ...}",
    "tpu_metrics_debug": "debug: tpu_metrics_debug",
    "warmup_ratio": "warmup_steps: a number below 1 is a fraction of all steps",
    "xpu_backend": "ddp_backend",
}
# Old names that still work and are removed in transformers 6.
TRAINING_ARGUMENTS_DEPRECATED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Keys of the Trainer's `fsdp_config`, without the prefix that it strips.
TRAINER_FSDP_KEYS = {
    *("version", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading"),
    *("state_dict_type", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2"),
    *("xla_fsdp_grad_ckpt", "xla_fsdp_settings", "forward_prefetch", "backward_prefetch", "use_orig_params"),
    *("sync_module_states", "limit_all_gathers"),
}
