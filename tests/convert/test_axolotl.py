"""axolotl's YAML, on files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conversions import convert_text, reasons_of, refused_by_our_checks, unaccounted

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
        "model_name_or_path": "Qwen/Qwen3-8B", "load_in_4bit": True, "lora_r": 16, "lora_alpha": 32,
        "lora_target_modules": ["all-linear"], "lora_config": {"modules_to_save": ["embed_tokens"]},
        "dataset": "rows.jsonl", "val_size": 0.05, "max_seq_length": 4096, "packing": True,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 3,
        "optim": "paged_adamw_8bit", "lr_scheduler_type": "cosine", "learning_rate": 2e-4, "warmup_steps": 0.1,
        "activation_checkpointing": True, "eval_strategy": "steps", "eval_steps": 0.166667, "save_strategy": "steps",
        "save_steps": 0.333333, "output_dir": "./out",
    }  # fmt: skip
    assert set(reasons_of(conversion)) == {"bf16", "loss_watchdog_threshold"}
    assert {"strict", "wandb_project", "datasets[0].roles_to_train"} <= set(conversion.redundant)
    assert unaccounted(yaml.safe_load(QLORA), conversion) == []
    assert refused_by_our_checks(conversion, tmp_path) is None


def test_a_length_that_drops_rows_there_has_a_note(tmp_path: Path) -> None:
    text = "base_model: a/b\nsequence_len: 2048\n"
    assert "drops longer rows" in convert_text(tmp_path, text).notes["max_seq_length"]
    assert "max_seq_length" not in convert_text(tmp_path, f"{text}excess_length_strategy: truncate\n").notes


@pytest.mark.parametrize(
    ("lines", "preset"),
    [
        ("", "ddp"),
        ("deepspeed: deepspeed_configs/zero2.json", "zero2"),
        ("deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}", "zero2_cpu_offload"),
        ("deepspeed: conf/zero3_bf16_cpuoffload_all.json", "zero3_cpu_offload"),
        ("deepspeed: {zero_optimization: {stage: 3, offload_param: {device: nvme}}}", "zero3_nvme_offload"),
        ("deepspeed: {zero_optimization: {stage: 3, zero_hpz_partition_size: 8}}", "zeropp"),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", "fsdp2_grad_op"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}", "fsdp2_cpu_offload"),
        ("fsdp_config: {fsdp_version: 2}\ndp_replicate_size: 2", "fsdp2_hybrid"),
        ("adapter: qlora\nlora_r: 8\nload_in_4bit: true\ndeepspeed: zero3.json", "zero3"),
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


def test_four_bit_weights_are_not_offloaded_where_that_does_not_work(tmp_path: Path) -> None:
    lora = "base_model: a/b\nadapter: qlora\nlora_r: 8\nload_in_4bit: true\n"
    offload = "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}\n"
    offloaded = convert_text(tmp_path, lora + offload)
    assert offloaded.preset == "zero2"
    assert "too small to offload" in offloaded.notes["--preset"]
    assert "not with load_in_4bit" in reasons_of(offloaded)["deepspeed"]


ZERO3_OFFLOADED = "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}"


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("load_in_4bit: true", "load_in_4bit", "needs `adapter: qlora`"),
        (f"optimizer: adamw_bnb_8bit\n{ZERO3_OFFLOADED}", "optimizer", "DeepSpeed's CPU Adam"),
        ("optimizer: adamw_bnb_8bit\nfsdp_version: 2\nfsdp_config: {x: 1}", "optimizer", "take no DTensors"),
        ("trust_remote_code: true", "trust_remote_code", "if you trust that"),
        ("unfrozen_parameters: ['layers.4[4-9]+.gate']", "unfrozen_parameters", "not regular expressions"),
        (
            "datasets: [{path: c/d, type: chat_template, field_messages: dialogue}]",
            "datasets[0].field_messages",
            "rows of `dialogue` with role and content: rename them",
        ),
    ],
)
def test_a_setting_without_a_counterpart_is_listed_with_the_reason(
    lines: str, key: str, words: str, tmp_path: Path
) -> None:
    conversion = convert_text(tmp_path, f"base_model: a/b\n{lines}\n")
    assert words in reasons_of(conversion)[key]
    assert not {"load_in_4bit", "optim", "trust_remote_code", "train_only"} & conversion.arguments.keys()


@pytest.mark.parametrize(
    ("lines", "arguments"),
    [
        ("optimizer: muon\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", {"optim": "muon"}),
        (
            "datasets: [{path: a/b, type: alpaca}, {path: c.jsonl, type: alpaca, split: train}]",
            {"dataset": ["a/b", "c.jsonl"]},
        ),
        (
            "unfrozen_parameters: ['^lm_head.weight$', 'model.layers.[0-7].']",
            {"train_only": ["lm_head.weight", "model.layers.[0-7].*"]},
        ),
        # once in one epoch is no interval there: it then saves at the end of each epoch
        ("num_epochs: 1\nsaves_per_epoch: 1", {"save_strategy": "epoch"}),
        ("num_epochs: 1\nsaves_per_epoch: 4", {"save_strategy": "steps", "save_steps": 0.25}),
        ("num_epochs: 1\nsave_steps: 50\nsave_strategy: steps", {"save_strategy": "steps", "save_steps": 50}),
    ],
)
def test_a_rule_of_several_settings_becomes_arguments(lines: str, arguments: dict[str, object], tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, f"base_model: a/b\n{lines}\n")
    assert {name: conversion.arguments[name] for name in arguments} == arguments


def test_liger_kernels_that_are_not_named_stay_off(tmp_path: Path) -> None:
    plugin = "plugins: [axolotl.integrations.liger.LigerPlugin, other.Plugin]\n"
    conversion = convert_text(tmp_path, f"base_model: a/b\n{plugin}liger_rope: true\nliger_glu_activation: true\n")
    assert conversion.arguments["use_liger_kernel"] is True
    kernels = conversion.arguments["liger_kernel_config"]
    assert [name for name, is_on in kernels.items() if is_on] == ["rope", "swiglu", "geglu"]
    assert kernels["fused_linear_cross_entropy"] is False
    assert "plugins[1]" in reasons_of(conversion)
