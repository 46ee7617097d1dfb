"""axolotl's settings by what becomes of them: same, renamed, or without a counterpart and why (axolotl 0.19.0)."""

from __future__ import annotations

from toolkit.convert.strategy import FSDP_REASONS
from toolkit.convert.trainer_settings import CHECKPOINTING_REASON, PRESET_REASON, REMOTE_CODE_REASON
from toolkit.job.argument_aliases import HINTS

# Settings of the same name and meaning.
SAME = {
    *("accelerator_config", "adam_beta1", "adam_beta2", "adam_epsilon", "attn_implementation", "auto_find_batch_size"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
    *("ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout"),
    *("eval_strategy", "gradient_accumulation_steps", "greater_is_better", "hub_model_id", "hub_revision"),
    *("hub_strategy", "learning_rate", "load_best_model_at_end", "logging_steps", "lr_scheduler_kwargs"),
    *("max_grad_norm", "max_steps", "metric_for_best_model", "neftune_noise_alpha", "output_dir"),
    *("save_only_model", "save_strategy", "save_total_limit", "seed", "tf32", "torch_compile_backend"),
    *("torch_compile_mode", "torch_empty_cache_steps", "warmup_steps", "weight_decay"),
}
# Those of `toolkit.job.argument_aliases` that axolotl has.
RENAMED = {
    *("base_model", "dataset_num_proc", "evaluation_strategy", "flash_attention", "lr_scheduler", "micro_batch_size"),
    *("num_epochs", "optimizer", "sample_packing", "warmup_ratio"),
}
LORA_CONFIG = {
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "target_parameters",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_lora_weights",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_layer_replication": "layer_replication",
    "peft_trainable_token_indices": "trainable_token_indices",
    "peft_ensure_weight_tying": "ensure_weight_tying",
}
# liger_kernel_config of transformers; what is not named stays off, as in axolotl (integrations/liger/plugin.py).
LIGER = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_swiglu": ("swiglu",),
    "liger_layer_norm": ("layer_norm",),
    "liger_cross_entropy": ("cross_entropy",),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
TRACKERS = {
    **dict.fromkeys(("use_wandb", "wandb_project"), "wandb"),
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
    "use_swanlab": "swanlab",
}
# transformers has no such attention (utils/schemas/enums.py)
OWN_ATTENTION = ("xformers", "sage", "fp8")
# Not the loss of supervised fine-tuning.
OTHER_TRAINING = {
    "rl": "preference and reinforcement learning",
    "reward_model": "a reward model",
    "process_reward_model": "a process reward model",
    "diffusion": "a diffusion language model",
}
ON_BY_DEFAULT = {"bf16", "include_tkps", "pretrain_multipack_attn", "shuffle_merged_datasets", "tokenizer_use_fast"}

_KERNEL = "a kernel of axolotl's, for speed or memory; `use_liger_kernel: true` has fused kernels"
_CHUNKED = "by default the loss is computed in chunks here too (`loss: chunked` requires it)"
_TOKENIZER = "the model's own tokenizer and special tokens are used"
_TRACKER = "set by the tracker's own environment variables"
_OTHER_LOSS = "changes the training: there is no counterpart, the loss is cross-entropy"
_QUANTIZED = "4-bit NF4 is the quantization that is supported: `load_in_4bit: true`"
_SEQUENCES = "`--preset cp` with `--cp`, or `ulysses` with `--sp`, on rows that are not packed"
REASONS = FSDP_REASONS | {
    "bf16": PRESET_REASON,
    "bfloat16": PRESET_REASON,
    "fp16": PRESET_REASON,
    "float16": PRESET_REASON,
    "torch_dtype": PRESET_REASON,
    "fp8*": PRESET_REASON,
    "wandb_*": _TRACKER,
    "swanlab_*": _TRACKER,
    "mlflow_*": _TRACKER,
    "trackio_*": _TRACKER,
    "comet_*": _TRACKER,
    "special_tokens": _TOKENIZER,
    "tokens": _TOKENIZER,
    "eot_tokens": _TOKENIZER,
    "tokenizer_*": _TOKENIZER,
    "resize_token_embeddings_to_32x": _TOKENIZER,
    "lora_mlp_kernel": _KERNEL,
    "lora_qkv_kernel": _KERNEL,
    "lora_o_kernel": _KERNEL,
    "flash_attn_*": _KERNEL,
    "fused_attn_kernel": _KERNEL,
    "cut_cross_entropy": _CHUNKED,
    "chunked_cross_entropy*": _CHUNKED,
    "liger_*": _KERNEL,
    "plugins*": _KERNEL,
    "use_kernels": _KERNEL,
    "tiled_mlp": _KERNEL,
    "qat": _OTHER_LOSS,
    "use_eaft": _OTHER_LOSS,
    "eaft_*": _OTHER_LOSS,
    "relora*": "ReLoRA has no counterpart: plain LoRA is trained",
    "jagged_*": "ReLoRA has no counterpart: plain LoRA is trained",
    "lisa_*": "LISA has no counterpart: all weights are trained",
    "load_in_8bit": _QUANTIZED + "; without it the base model is held in bf16",
    "gptq*": _QUANTIZED,
    "model_quantization_config*": _QUANTIZED,
    "quantize_moe_experts": _QUANTIZED,
    "bnb_config_kwargs": "always NF4 with double quantization",
    "tensor_parallel_size": "`--preset fsdp2_tp`, or `tp` without sharding, with `--tp`",
    "context_parallel_size": _SEQUENCES,
    "sequence_parallel_degree": _SEQUENCES,
    "expert_parallel*": "`--preset ep` with `--ep`",
    "dp_shard_size": "the preset shards over all GPUs; `fsdp2_hybrid` over those of a node",
    "dp_replicate_size": "`--preset fsdp2_hybrid` has two replicas",
    "trust_remote_code": REMOTE_CODE_REASON,
    "lora_model_dir": "training starts with new adapters: merge the old ones into the model first",
    "resume_from_checkpoint": "checkpoints of axolotl cannot be resumed here",
    "auto_resume_from_checkpoints": "`--resume_from_checkpoint latest`",
    "loss_watchdog_*": "`toolkit train` ends a run whose loss is not a number",
    "early_stopping_patience": "runs to the end; `load_best_model_at_end: true` keeps the best checkpoint",
    "pad_to_sequence_len": "batches are padded to their longest row",
    "eval_sample_packing": "evaluation rows are packed if `packing` is on",
    "chat_template": HINTS["template"],
    "chat_template_jinja": "write the template to a file: `chat_template: FILE`",
    "lora_target_modules": "a regular expression: name the modules, `lora_target_modules: [q_proj, v_proj]`; now all"
    " linear layers get an adapter",
    "unfrozen_parameters": "`train_only` takes shell patterns (model.layers.1.*), not regular expressions",
    "dataset_prepared_path": "tokenised rows are cached by their content",
    "skip_prepare_dataset": "rows are always tokenised here",
    "remove_unused_columns": "only the fields of the row format are read",
    "cosine_*": "`lr_scheduler_type: cosine_with_min_lr` with `lr_scheduler_kwargs: {min_lr_rate: 0.1}` is similar",
    "hf_use_auth_token": "`hf auth login`, or the variable HF_TOKEN",
    "secrets": "environment variables: set them where you run",
    "experts_implementation": _KERNEL,
    "train_on_eos": "the end of each trained turn is trained",
    "roles_to_train": "the assistant's turns are trained",
    "ds_type": "the file's suffix decides",
    "drop_system_message": "system messages are kept",
    "gradient_checkpointing_kwargs": CHECKPOINTING_REASON,
    "field_thinking": "the messages go to the model's chat template as they are",
    "template_thinking_key": "the messages go to the model's chat template as they are",
    "data_files": "the whole data set is read, or one file: `dataset: FILE`",
    "model_config": "the values of the model's config.json are used",
    "use_scattermoe": _KERNEL,
    "use_sonicmoe": _KERNEL,
    "reinit_weights": "the model's weights are always loaded",
    "shuffle_merged_datasets": "rows are shuffled; `train_sampling_strategy: sequential` keeps their order",
}
