"""axolotl's YAML, on files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conversions import convert_text, reasons_of, refused_by_our_checks, unaccounted

from toolkit.errors import ToolkitError

QLORA = """
base_model: Qwen/Qwen3-8B
model_type: AutoModelForCausalLM
load_in_4bit: true
strict: false
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
val_set_size: 0.05
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
evals_per_epoch: 2
saves_per_epoch: 1
loss_watchdog_threshold: 5.0
wandb_project:
output_dir: ./out
"""


def test_a_qlora_configuration_becomes_arguments(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, QLORA)
    assert (conversion.tool, conversion.preset, conversion.num_processes) == ("axolotl", "ddp", None)
    given = {name: value for name, value in conversion.arguments.items() if name not in conversion.defaults}
    assert given == {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "load_in_4bit": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_modules": ["all-linear"],
        "lora_config": {"modules_to_save": ["embed_tokens"]},
        "dataset": "rows.jsonl",
        "val_size": 0.05,
        "max_seq_length": 4096,
        "packing": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 3,
        "optim": "paged_adamw_8bit",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "warmup_steps": 0.1,
        "activation_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 0.166667,  # twice in each of three epochs
        "save_strategy": "steps",
        "save_steps": 0.333333,
        "output_dir": "./out",
    }
    assert set(reasons_of(conversion)) == {"bf16", "loss_watchdog_threshold"}
    assert {"strict", "wandb_project", "datasets[0].roles_to_train"} <= set(conversion.redundant)
    assert unaccounted(yaml.safe_load(QLORA), conversion) == []
    assert refused_by_our_checks(conversion, tmp_path) is None


def test_what_axolotl_does_by_default_is_written_down(tmp_path: Path) -> None:
    conversion = convert_text(
        tmp_path, "base_model: a/b\nlearning_rate: 1e-5\ndatasets: [{path: c/d, type: completion}]"
    )
    assert {name: conversion.arguments[name] for name in conversion.defaults} == {
        "output_dir": "./model-out",
        "max_seq_length": 512,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "logging_steps": 10,
        "save_strategy": "epoch",
        "save_total_limit": 4,
    }


def test_a_length_that_drops_rows_there_has_a_note(tmp_path: Path) -> None:
    text = "base_model: a/b\nsequence_len: 2048\n"
    assert "drops longer rows" in convert_text(tmp_path, text).notes["max_seq_length"]
    truncating = convert_text(tmp_path, f"{text}excess_length_strategy: truncate\n")
    assert "max_seq_length" not in truncating.notes


@pytest.mark.parametrize(
    ("lines", "preset"),
    [
        ("", "ddp"),
        ("deepspeed: {zero_optimization: {stage: 1}}", "zero1"),
        ("deepspeed: deepspeed_configs/zero2.json", "zero2"),
        ("deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}", "zero2_cpu_offload"),
        ("deepspeed: conf/zero3_bf16_cpuoffload_all.json", "zero3_cpu_offload"),
        ("deepspeed: {zero_optimization: {stage: 3, offload_param: {device: nvme}}}", "zero3_nvme_offload"),
        ("deepspeed: {zero_optimization: {stage: 3, zero_hpz_partition_size: 8}}", "zeropp"),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", "fsdp2"),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", "fsdp2_grad_op"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}", "fsdp2_cpu_offload"),
        ("fsdp_config: {fsdp_version: 2}\ndp_replicate_size: 2", "fsdp2_hybrid"),
        ("fsdp: [shard_grad_op]", "fsdp2_grad_op"),
    ],
)
def test_the_preset_follows_from_the_sharding_settings(lines: str, preset: str, tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, f"base_model: a/b\n{lines}\n")
    assert conversion.preset == preset
    assert unaccounted(yaml.safe_load(f"base_model: a/b\n{lines}\n"), conversion) == []


def test_the_deepspeed_json_decides_and_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert convert_text(tmp_path, "base_model: a/b\ndeepspeed: zero2.json\n").preset == "zero3"
    by_name = convert_text(tmp_path, "base_model: a/b\ndeepspeed: elsewhere/zero2.json\n")
    assert (by_name.preset, "chosen by the name" in by_name.notes["--preset"]) == ("zero2", True)


def test_four_bit_weights_are_sharded_where_they_are_in_the_configuration(tmp_path: Path) -> None:
    lora = "base_model: a/b\nadapter: qlora\nlora_r: 8\nload_in_4bit: true\n"
    under_fsdp = convert_text(tmp_path, f"{lora}fsdp_version: 2\nfsdp_config: {{offload_params: true}}\n")
    assert under_fsdp.preset == "fsdp2_cpu_offload"
    assert convert_text(tmp_path, f"{lora}deepspeed: zero3.json\n").preset == "zero3"
    offload = "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}\n"
    offloaded = convert_text(tmp_path, lora + offload)
    assert offloaded.preset == "zero2"
    assert "too small to offload" in offloaded.notes["--preset"]
    assert "not with load_in_4bit" in reasons_of(offloaded)["deepspeed"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rl: dpo", "preference and reinforcement learning (rl), not supervised"),
        ("reward_model: true", "a reward model (reward_model), not supervised"),
        ("processor_type: AutoProcessor", "on images or audio (processor_type), and the toolkit on text"),
        ("adapter: llama-adapter", "adapter 'llama-adapter' has no counterpart"),
        ("adapter: lora", "without lora_r"),
        ("deepspeed: ds.json", "no such DeepSpeed configuration: ds.json"),
        ("micro_batch_size: two", "per_device_train_batch_size is 'two', expected a number"),
    ],
)
def test_what_cannot_be_converted_is_refused(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as refused:
        convert_text(tmp_path, f"base_model: a/b\n{line}\n")
    assert words in refused.value.message


def test_four_bit_weights_need_an_adapter(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, "base_model: a/b\nload_in_4bit: true\n")
    assert "load_in_4bit" not in conversion.arguments
    assert "needs `adapter: qlora`" in reasons_of(conversion)["load_in_4bit"]


def test_an_offloaded_optimizer_is_deepspeeds(tmp_path: Path) -> None:
    text = "base_model: a/b\noptimizer: adamw_bnb_8bit\ndeepspeed: {zero_optimization: {stage: 3%s}}\n"
    on_gpu = convert_text(tmp_path, text % "")
    assert on_gpu.arguments["optim"] == "adamw_bnb_8bit"
    offloaded = convert_text(tmp_path, text % ", offload_optimizer: {device: cpu}")
    assert "optim" not in offloaded.arguments
    assert "DeepSpeed's CPU Adam" in reasons_of(offloaded)["optimizer"]


def test_code_from_the_models_repository_is_never_switched_on(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, "base_model: a/b\ntrust_remote_code: true\n")
    assert "trust_remote_code" not in conversion.arguments
    assert "if you trust that" in reasons_of(conversion)["trust_remote_code"]


def test_liger_kernels_that_are_not_named_stay_off(tmp_path: Path) -> None:
    plugin = "plugins: [axolotl.integrations.liger.LigerPlugin, other.Plugin]\n"
    conversion = convert_text(tmp_path, f"base_model: a/b\n{plugin}liger_rope: true\nliger_glu_activation: true\n")
    assert conversion.arguments["use_liger_kernel"] is True
    assert conversion.arguments["liger_kernel_config"] == {
        "rope": True,
        "rms_norm": False,
        "swiglu": True,
        "geglu": True,
        "layer_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    assert "plugins[1]" in reasons_of(conversion)


def test_rows_of_other_fields_are_listed(tmp_path: Path) -> None:
    text = "base_model: a/b\ndatasets: [{path: c/d, type: chat_template, field_messages: dialogue}]\n"
    reason = reasons_of(convert_text(tmp_path, text))["datasets[0].field_messages"]
    assert "rows of `dialogue` with role and content: rename them" in reason


def test_several_data_sets_become_a_list(tmp_path: Path) -> None:
    text = "base_model: a/b\ndatasets: [{path: a/b, type: alpaca}, {path: c.jsonl, type: alpaca, split: train}]\n"
    conversion = convert_text(tmp_path, text)
    assert conversion.arguments["dataset"] == ["a/b", "c.jsonl"]
    assert "datasets[1].split" in conversion.redundant


def test_unfrozen_parameters_become_shell_patterns_where_they_can(tmp_path: Path) -> None:
    patterns = "unfrozen_parameters: ['^lm_head.weight$', 'model.layers.[0-7].']\n"
    assert convert_text(tmp_path, f"base_model: a/b\n{patterns}").arguments["train_only"] == [
        "lm_head.weight",
        "model.layers.[0-7].*",
    ]
    listed = convert_text(tmp_path, "base_model: a/b\nunfrozen_parameters: ['layers.4[4-9]+.gate']\n")
    assert "unfrozen_parameters" in reasons_of(listed)


def test_saving_as_often_as_axolotl_does(tmp_path: Path) -> None:
    base = "base_model: a/b\nnum_epochs: 1\n"
    # once in one epoch is no interval there: it then saves at the end of each epoch
    assert convert_text(tmp_path, f"{base}saves_per_epoch: 1\n").arguments["save_strategy"] == "epoch"
    four = convert_text(tmp_path, f"{base}saves_per_epoch: 4\n").arguments
    assert (four["save_strategy"], four["save_steps"]) == ("steps", 0.25)
    steps = convert_text(tmp_path, f"{base}save_steps: 50\nsave_strategy: steps\n").arguments
    assert (steps["save_strategy"], steps["save_steps"]) == ("steps", 50)


def test_an_optimizer_that_the_preset_cannot_run_is_left_out_with_what_can(tmp_path: Path) -> None:
    text = "base_model: a/b\noptimizer: %s\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    assert convert_text(tmp_path, text % "muon").arguments["optim"] == "muon"
    assert convert_text(tmp_path, text % "adamw_torch_8bit").arguments["optim"] == "adamw_torch_8bit"
    bitsandbytes = convert_text(tmp_path, text % "adamw_bnb_8bit")
    assert "optim" not in bitsandbytes.arguments
    assert "take no DTensors" in reasons_of(bitsandbytes)["optimizer"]
