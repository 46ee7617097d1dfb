"""Trainer arguments that a library refuses, each with a text that has the same arguments without the fault."""

from __future__ import annotations

# How those of the rule `refused-alone` begin.
ALONE = (
    *(
        "fp16_full_eval",
        "warmup_steps",
        "dataloader_prefetch_factor",
        "torch_empty_cache_steps",
        "steps_per_generation",
    ),
    *("auto_find_batch_size", "log_completions_hub_repo"),
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
