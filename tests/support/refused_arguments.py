"""Trainer arguments that a library refuses, each with a text that has the same arguments without the fault."""

# How those of the rule `refused-alone` begin.
ALONE = (
    *(
        "fp16_full_eval",
        "warmup_steps",
        "dataloader_prefetch_factor",
        "torch_empty_cache_steps",
    ),
)
# Arguments that TrainingArguments refuses, and the same without the fault; the finding is on the second line.
REFUSED = [
    ("load_best_model_at_end: true\nsave_steps: 5\n", "load_best_model_at_end: true\nsave_strategy: best\n"),
    ("save_steps: 500\neval_steps: 300\neval_strategy: steps\nload_best_model_at_end: true\n",
     "save_steps: 600\neval_steps: 300\neval_strategy: steps\nload_best_model_at_end: true\n"),
    ("save_steps: 500\neval_steps: 0.1\neval_strategy: steps\nload_best_model_at_end: true\n",
     "save_steps: 0.2\neval_steps: 0.1\neval_strategy: steps\nload_best_model_at_end: true\n"),
    ("lr_scheduler_type: reduce_lr_on_plateau\n", "lr_scheduler_type: reduce_lr_on_plateau\neval_strategy: epoch\n"),
    ("logging_steps: 0\n", "logging_steps: 0\nlogging_strategy: epoch\n"),
    ("save_steps: 1.5\n", "save_steps: 0.5\n"),
    ("fp16_full_eval: true\nbf16_full_eval: true\n", "fp16_full_eval: true\n"),
    ("warmup_steps: -1\n", "warmup_steps: 0.1\n"),
    ("dataloader_prefetch_factor: 2\n", "dataloader_prefetch_factor: 2\ndataloader_num_workers: 1\n"),
    ("torch_empty_cache_steps: 0\n", "torch_empty_cache_steps: 5\n"),
    ("fsdp: hybrid_shard\n", "fsdp: hybrid_shard\nfsdp_config: {version: 1}\n"),
    ("fsdp: full_shards\n", "fsdp: full_shard auto_wrap\n"),
]  # fmt: skip
ALONE_BY_TRL = ("steps_per_generation", "auto_find_batch_size", "log_completions_hub_repo")
REFUSED_BY_GRPO = [
    ("num_generations: 1\n", "num_generations: 2\n"),
    ("num_generations: 3\nper_device_train_batch_size: 4\n", "num_generations: 3\nper_device_train_batch_size: 6\n"),
    ("steps_per_generation: 2\ngeneration_batch_size: 8\n", "steps_per_generation: 2\n"),
    ("generation_batch_size: 9\n", "generation_batch_size: 16\n"),
    ("auto_find_batch_size: true\n", "auto_find_batch_size: false\n"),
    ("log_completions_hub_repo: a/b\n", "log_completions_hub_repo: a/b\nlog_completions: true\n"),
    ("vllm_importance_sampling_clip_min: 2\nvllm_importance_sampling_clip_max: 1\n",
     "vllm_importance_sampling_clip_min: 1\nvllm_importance_sampling_clip_max: 2\n"),
]  # fmt: skip


def _json(*settings: str) -> str:
    return '{"train_batch_size": 1,\n' + ", ".join(settings) + "}"


def _zero(stage: int, *settings: str) -> str:
    return '"zero_optimization": {' + ", ".join([f'"stage": {stage}', *settings]) + "}"


# DeepSpeed's JSON: what DeepSpeedConfig refuses, and the same without the fault; the finding is on the second line.
RATIO, CORES = '"offload_optimizer": {"device": "cpu", "ratio": %s}', '"offload_optimizer": {"cpuadam_cores_perc": %s}'
SUM, NO_NORM = '"gradient_allreduce_op": "%s"', '"compute_grad_norm": %s'
FP16 = '"fp16": {"enabled": true, %s}'
MASTERS_16, STATES = '"fp16_master_weights_and_grads": true', '"bf16_optimizer_states": true'
MASTERS = '"bf16_master_weights_and_grads": true'
ZENFLOW = '"zenflow": {"topk_ratio": 0.1, "select_strategy": "auto", "select_interval": "auto", "update_interval": 4}'
REFUSED_BY_DEEPSPEED = [
    (_json(SUM % "SUM", _zero(3)), _json(SUM % "sum", _zero(2))),
    (_json(SUM % "sum", _zero(2, '"offload_optimizer": {"device": "cpu"}', ZENFLOW)),
     _json(SUM % "mean", _zero(2, '"offload_optimizer": {"device": "cpu"}', ZENFLOW))),
    (_json(SUM % "sum", _zero(1), '"compile": {"deepcompile": true}'),
     _json(SUM % "sum", _zero(1), '"compile": {"deepcompile": false}')),
    (_json(_zero(3, NO_NORM % "false")), _json(_zero(2, NO_NORM % "false"))),
    (_json(_zero(0, NO_NORM % "false")), _json(_zero(0, NO_NORM % "true"))),
    (_json(_zero(2, RATIO % 0.5)), _json(_zero(3, RATIO % 0.5))),
    (_json(_zero(3, RATIO % 1.5)), _json(_zero(3, RATIO % 1.0))),
    (_json(_zero(3, CORES % 8)), _json(_zero(3, CORES % 0.8))),
    (_json(_zero(2, '"cpu_offload": false', '"offload_optimizer": {"device": "cpu"}')),
     _json(_zero(2, '"cpu_offload": true'))),
    (_json(_zero(3, '"cpu_offload_param": true', '"offload_param": {"device": "cpu"}')),
     _json(_zero(3, '"offload_param": {"device": "cpu"}'))),
    (_json(_zero(3, *(f'"stage3_gather_{word}_weights_on_model_save": true' for word in ("fp16", "16bit")))),
     _json(_zero(3, '"stage3_gather_16bit_weights_on_model_save": true'))),
    (_json(FP16 % '"loss_scale": -1', _zero(1)), _json(FP16 % '"loss_scale": 128', _zero(1))),
    (_json(FP16 % '"loss_scale_window": 0', _zero(1)),
     _json(FP16 % '"loss_scale": 128, "loss_scale_window": 0', _zero(1))),
    (_json(FP16 % '"min_loss_scale": 0', _zero(1)), _json(FP16 % '"min_loss_scale": 1', _zero(1))),
    (_json(FP16 % MASTERS_16, _zero(0)), _json(FP16 % MASTERS_16, _zero(1))),
]  # fmt: skip
BF16_STATES = [
    (_json(f'"bf16": {{"enabled": true, {MASTERS}, {STATES}}}', _zero(0)),
     _json(f'"bf16": {{"enabled": true, {MASTERS}, {STATES}}}', _zero(1))),
    (_json(f'"bf16": {{"enabled": true, {STATES}}}', _zero(1)),
     _json(f'"bf16": {{{STATES}, {MASTERS}}}', _zero(1))),
]  # fmt: skip
# Of these the words, and where nothing fills `auto` in; DeepSpeed alone refuses the words.
WORDS_OF_TRL = [
    ("packing_strategy: bfd2\npacking: true", "packing_strategy: bfd2"),  # nobody reads it
    ("loss_type: ntl", "loss_type: nll"),
    ("truncation_mode: keep_strat", "truncation_mode: keep_start"),
    ("attn_implementation: flash", "attn_implementation: sdpa"),
    ("bnb_4bit_quant_type: nf5\nload_in_4bit: true", "bnb_4bit_quant_type: nf4\nload_in_4bit: true"),
    ("vllm_mode: colocated\nuse_vllm: true\nnum_generations: 1", "vllm_mode: colocate\nuse_vllm: true"),
    ("loss_type: drgrpo\nnum_generations: 1", "loss_type: dr_grpo\nnum_generations: 1"),
    ("scale_rewards: groups\nnum_generations: 1", "scale_rewards: false\nnum_generations: 1"),
]
WORDS_OF_DEEPSPEED = [
    (_json('"communication_data_type": "float16"'), _json('"communication_data_type": "FP16"')),
    (_json('"gradient_allreduce_op": "avg"'), _json('"gradient_allreduce_op": "Mean"')),
    (_json('"checkpoint": {"tag_validation": "none"}'), _json('"checkpoint": {"tag_validation": "ignore"}')),
    (_json('"checkpoint": {"tag_validation": false}'), _json('"checkpoint": {"tag_validation": "Fail"}')),
    (_json('"communication_data_type": false'), _json('"communication_data_type": null')),
    (_json(_zero(2, '"offload_optimizer": {"device": null}')), _json(_zero(2, '"offload_optimizer": null'))),
    (_json('"checkpoint": {"parallel_write": {"pipeline_stage": "yes"}}'),
     _json('"checkpoint": {"parallel_write": {"pipeline_stage": true}}')),
    (_json('"torch_autocast": {"enabled": true, "dtype": "bf"}'),
     _json('"torch_autocast": {"enabled": true, "dtype": "bfloat16"}')),
    (_json(_zero(2, ZENFLOW.replace('strategy": "auto', 'strategy": "steps'))), _json(_zero(2, ZENFLOW))),
]  # fmt: skip
# Values of another type in a block, and keys that it lacks.
WRONG_IN_BLOCKS = [
    (_json('"fp16": {"enabled": true, "min_loss_scale": 1e-10}'), _json('"fp16": {"min_loss_scale": 1}')),
    (_json('"fp16": {"enabled": true, "hysteresis": null}'), _json('"fp16": {"hysteresis": 2}')),
    (_json('"fp16": null'), _json('"bf16": null')),
    (_json(_zero(3, '"overlap_comm": []')), _json(_zero(3, '"overlap_comm": null'))),
    (_json(_zero(3, '"reduce_bucket_size": null')), _json(_zero(3, '"leaf_module": {"names": "a"}'))),
    (_json('"wandb": {"enabled": true, "project": null}'), _json('"wandb": {"enabled": true, "group": null}')),
    (_json('"comms_logger": {"prof_ops": "all"}'), _json('"comms_logger": {"prof_ops": []}')),
]  # fmt: skip
REFUSED_IN_BLOCKS = [
    (_json('"tensorboard": {"log_dir": "a"}'), _json('"tensorboard": {"output_path": ""}')),
    (_json('"compile": {"enabled": false}'), _json('"compile": {"deepcompile": false}')),
    (_json(_zero(2, ZENFLOW.replace("topk", "top_k"))), _json('"aio": {"queue_depth": 8}, "timers": {}')),
]
# Keys of nested arguments; the Trainer refuses those of a scheduler and of accumulation later.
REFUSED_NESTED = [
    ("accelerator_config: {split_batch: true}\n", "accelerator_config: {split_batches: true}\n"),
    ("accelerator_config: '{split_batches: true}'\n", "accelerator_config: '{\"split_batches\": true}'\n"),
    ("lr_scheduler_kwargs: \"{'power': 2}\"\n", "lr_scheduler_kwargs: {power: 2}\n"),
]
REFUSED_LATER = [
    ("accelerator_config: {gradient_accumulation_kwargs: {sync: true}}\n",
     "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"),
    ("lr_scheduler_kwargs: {min_lr: 0}\nlr_scheduler_type: cosine\n",
     "lr_scheduler_kwargs: {min_lr: 0}\nlr_scheduler_type: cosine_with_min_lr\n"),
    ("gradient_checkpointing_kwargs: {reentrant: false}\n", "gradient_checkpointing_kwargs: {use_reentrant: false}\n"),
    ("lr_scheduler_kwargs: scheduler.json\n", "accelerator_config: accelerator.json\n"),
    ("parallelism_config: {tp_size: 2}\n", "parallelism_config: null\n"),
]  # fmt: skip
# What peft refuses where a layer gets its adapter: the rank and the share of dropout.
REFUSED_BY_PEFT = [
    ("lora_r: 0\n", "lora_r: 1\n"),
    ("lora_dropout: 5\n", "lora_dropout: 0.05\n"),
    ("lora_target_modules: all_linear\n", 'lora_target_modules: ["0"]\n'),
]
