"""Small files of TRL, axolotl, LLaMA-Factory and ms-swift, for the rules about their settings."""

from __future__ import annotations

TRL_SFT = "model_name_or_path: a/b\ndataset_name: a/rows\noutput_dir: out\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\n"
FULL = FACTORY.replace("lora", "full")
SWIFT = "model: a/b\ndataset: a/rows\ntuner_type: lora\nmax_length: 512\n"
FSDP = "fsdp_version: 2\nfsdp_config:\n  fsdp_offload_params: true\n"
FSDP1 = FSDP.replace("2", "1")

# rule, bad file, good file, line of the finding, the bad file after `--fix`
PROGRAM_CASES = [
    ("unknown-trl-setting", f"{TRL_SFT}max_seq_length: 8\n", f"{TRL_SFT}max_length: 8\n", 4,
     f"{TRL_SFT}max_length: 8\n"),
    ("unknown-trl-setting", f"{TRL_SFT}torch_dtype: auto\n", f"{TRL_SFT}dtype: auto\n", 4, f"{TRL_SFT}dtype: auto\n"),
    ("unknown-trl-setting", f"{TRL_SFT}num_train_epoch: 1\n", f"{TRL_SFT}num_train_epochs: 1\n", 4, None),
    ("unknown-trl-setting", f"{TRL_SFT}max_completion_length: 8\nvllm_device: auto\n",
     f"{TRL_SFT}max_completion_length: 8\nvllm_mode: colocate\n", 5, None),
    ("unknown-trl-setting", f"{TRL_SFT}gradient_checkpointing_kwargs:\nuse_reentrant: false\n",
     f"{TRL_SFT}gradient_checkpointing_kwargs:\n  use_reentrant: false\n", 5, None),
    ("unknown-axolotl-setting", f"{AXOLOTL}gradient_clipping: 1.0\n", f"{AXOLOTL}max_grad_norm: 1.0\n{FSDP}", 4,
     f"{AXOLOTL}max_grad_norm: 1.0\n"),
    ("unknown-axolotl-setting", f"{AXOLOTL}fsdp_config:\n  ofload_params: true\n",
     f"{AXOLOTL}plugins: [mine.Plugin]\nof_my_plugin: 1\n", 5, None),
    ("unknown-llama-factory-setting", f"{FACTORY}max_seq_length: 8\n",
     f"{FACTORY}warmup_ratio: 0.1\noverwrite_output_dir: true\n", 5, None),
    ("unknown-llama-factory-setting", f"{FACTORY}lora_r: 8\n", f"{FACTORY}lora_rank: 8\n", 5,
     f"{FACTORY}lora_rank: 8\n"),
    ("unknown-llama-factory-setting", f"{FACTORY}lora_alfa: 8\n", f"{FACTORY}use_kt: true\nkt_rule: x.yaml\n", 5, None),
    ("unknown-swift-setting", f"{SWIFT}train_type: lora\n", f"{SWIFT}warmup_ratio: 0.1\nlora_rank: 8\n", 5, None),
    ("unknown-swift-setting", f"{SWIFT}lora_r: 8\n", f"{SWIFT}lora_r: 8\nignore_args_error: true\n", 5,
     f"{SWIFT}lora_rank: 8\n"),
    ("refused-by-axolotl", f"{AXOLOTL}load_in_8bit: true\n", f"{AXOLOTL}load_in_8bit: true\nadapter: lora\n", 4, None),
    ("refused-by-axolotl", f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\ngptq: true\n",
     f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\ngptq: false\n", 6, None),
    ("refused-by-peft", f"{AXOLOTL}adapter: lora\nlora_r: 0\n", f"{AXOLOTL}adapter: lora\nlora_r: 8\n", 5, None),
    ("refused-by-peft", f"{AXOLOTL}adapter: lora\npeft_layers_pattern: layers\n",
     f"{AXOLOTL}adapter: lora\npeft_layers_pattern: layers\npeft_layers_to_transform: [0]\n", 5, None),
    ("refused-by-peft", f"{FACTORY}lora_rank: 0\n", f"{FACTORY}lora_rank: 8\n", 5, None),
    ("refused-by-peft", f"{SWIFT}lora_dropout: 5\n", f"{SWIFT}lora_dropout: 0.05\n", 5, None),
    ("refused-by-axolotl", f"{AXOLOTL}rl: dpo_pair\n", f"{AXOLOTL}rl: ipo\n", 4, None),
    ("refused-by-axolotl", f"{AXOLOTL}datasets: {{path: a, type: alpaca}}\ngradient_accumulation_steps: 1\n",
     f"{AXOLOTL}datasets: [{{path: a, type: alpaca}}]\ngradient_accumulation_steps: 1\n", 4, None),
    ("refused-by-axolotl", f"{AXOLOTL}context_parallel_size: 2\n",
     f"{AXOLOTL}context_parallel_size: 2\nflash_attention: true\n", 4, None),
    ("refused-by-axolotl", f"{AXOLOTL}warmup_steps: 5\nwarmup_ratio: 0.1\n",
     f"{AXOLOTL}warmup_steps: 5\nwarmup_ratio: 0\n", 5, None),
    ("refused-by-axolotl", f"{AXOLOTL}rl: dpo\nsample_packing: true\n", f"{AXOLOTL}sample_packing: true\n", 5, None),
    ("refused-by-llama-factory", f"{FACTORY}streaming: true\n", f"{FACTORY}streaming: true\nmax_steps: 5\n", 5, None),
    ("refused-by-llama-factory", f"{FACTORY}streaming: true\nmax_steps: 5\nval_size: 0.1\n",
     f"{FACTORY}streaming: true\nmax_steps: 5\nval_size: 100\n", 7, None),
    ("refused-by-llama-factory", f"{FACTORY}eval_strategy: steps\n",
     f"{FACTORY}eval_strategy: steps\neval_dataset: rows\n", 5, None),
    ("refused-by-llama-factory", f"{FULL}deepspeed: z.json\nuse_galore: true\n", f"{FULL}use_galore: true\n", 6, None),
    ("refused-by-axolotl", f"{AXOLOTL}early_stopping_patience: 3\neval_steps: 5\n",
     f"{AXOLOTL}early_stopping_patience: 3\neval_steps: 5\nsave_steps: 5\n", 4, None),
    ("refused-by-swift", f"{SWIFT}packing: true\nattn_impl: sdpa\n",
     f"{SWIFT}packing: true\nattn_impl: flash_attn\n", 5, None),
    ("refused-by-swift", f"{SWIFT}streaming: true\n", f"{SWIFT}streaming: true\nmax_steps: 5\n", 5, None),
    ("refused-by-axolotl", f"{AXOLOTL}optimizer: adamw_8bit\n{FSDP}", f"{AXOLOTL}optimizer: adamw_8bit\n", 4, None),
    ("eight-bits-under-fsdp1", f"{AXOLOTL}adapter: lora\nload_in_8bit: true\n{FSDP1}",
     f"{AXOLOTL}adapter: lora\nload_in_8bit: true\n{FSDP}", 5, None),
    ("eight-bits-under-fsdp1", "load_in_8bit: true\nbf16: true\nfsdp: true\nfsdp_config: {version: 1}\n",
     "load_in_8bit: true\nbf16: true\nfsdp: true\nfsdp_config: {version: 2}\n", 1, None),
    ("refused-by-axolotl", f"{AXOLOTL}rl: grpo\ngradient_accumulation_steps: 2\ntrl:\n  num_generations: 4\n",
     f"{AXOLOTL}rl: grpo\ngradient_accumulation_steps: 8\ntrl:\n  num_generations: 4\n", 7, None),
    ("refused-by-axolotl", f"{AXOLOTL}datasets: [a]\n", f"{AXOLOTL}datasets: [a]\ngradient_accumulation_steps: 1\n", 2,
     None),
    ("refused-by-llama-factory", f"{FACTORY}do_train: true\n", f"{FACTORY}do_train: true\ndataset: a\n", 5, None),
    ("refused-by-llama-factory", f"{FACTORY}use_galore: true\n",
     f"{FULL}use_galore: true\n", 5, None),
    ("unread-by-llama-factory", f"{FACTORY.replace('sft', 'ppo')}reward_model: a\nreward_model_adapters: b\n",
     f"{FACTORY.replace('sft', 'ppo')}reward_model: a\nreward_model_adapters: b\nreward_model_type: full\n", 6, None),
    ("unread-by-axolotl", f"{AXOLOTL}adapter: lora\nload_in_4bit: true\n",
     f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\n", 5, None),
    ("axolotl-fsdp-with-deepspeed", f"{AXOLOTL}deepspeed: zero3.json\n{FSDP}", f"{AXOLOTL}{FSDP}", 4, None),
]  # fmt: skip
