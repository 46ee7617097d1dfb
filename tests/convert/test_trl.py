"""`trl sft`: commands and YAML files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conversions import convert_text, reasons_of, refused_by_our_checks, unaccounted

from toolkit.convert import Conversion

COMMAND = r"""#!/bin/bash
export WANDB_PROJECT=demo  # kept for later
CUDA_VISIBLE_DEVICES=0,1 trl sft --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name trl-lib/Capybara --eval_strategy steps --eval_steps 100 \
    --use_peft --lora_alpha=64 --packing --eos_token '<|im_end|>' --learning-rate 2.0e-4 \
    --accelerate_config zero2 --num_processes 2 --output_dir out
"""


def convert_command(folder: Path, command: str) -> Conversion:
    return convert_text(folder, command, name="train.sh")


def test_a_command_becomes_a_preset_and_arguments(tmp_path: Path) -> None:
    conversion = convert_command(tmp_path, COMMAND)
    assert (conversion.tool, conversion.preset, conversion.num_processes) == ("TRL", "zero2", 2)
    given = {name: value for name, value in conversion.arguments.items() if name not in conversion.defaults}
    assert given == {
        "model_name_or_path": "Qwen/Qwen3-8B", "lora_r": 16, "lora_alpha": 64, "dataset": "trl-lib/Capybara",
        "packing": True, "output_dir": "out", "learning_rate": 2e-4, "eval_strategy": "steps", "eval_steps": 100,
    }  # fmt: skip
    assert {name: conversion.arguments[name] for name in conversion.defaults} == {
        "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "eval_dataset": "trl-lib/Capybara",
        "eval_dataset_split": "test", "loss_on": "all", "activation_checkpointing": True, "logging_steps": 10,
    }  # fmt: skip
    assert set(reasons_of(conversion)) == {"eos_token"}
    assert refused_by_our_checks(conversion, tmp_path) is None


YAML = """
model_name_or_path: Qwen/Qwen3-8B
datasets:
  - path: a/b
    split: train
  - path: json
    data_files: rows.jsonl
test_split_size: 0.1
learning_rate: 1e-5
max_length: 4096
gradient_checkpointing: false
assistant_only_loss: true
dataset_num_proc: 4
bf16: true
env: {NCCL_DEBUG: INFO}
"""


def test_a_yaml_becomes_arguments(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, YAML)
    assert conversion.arguments == {
        "model_name_or_path": "Qwen/Qwen3-8B", "dataset": ["a/b", "rows.jsonl"], "max_seq_length": 4096,
        "loss_on": "assistant", "val_size": 0.1, "preprocessing_num_workers": 4, "output_dir": "trainer_output",
        "learning_rate": 1e-5, "activation_checkpointing": False, "logging_steps": 10,
    }  # fmt: skip
    assert unaccounted(yaml.safe_load(YAML), conversion) == []


def test_shares_become_weights_and_a_configuration_that_all_share_is_kept(tmp_path: Path) -> None:
    entries = "[{path: a/b, name: en, fraction: 0.7}, {path: c/d, name: en, fraction: 0.3}]"
    conversion = convert_text(
        tmp_path, f"model_name_or_path: a/b\nuse_peft: false\nmax_length: 8\ndatasets: {entries}\n"
    )
    assert conversion.arguments["dataset"] == ["a/b", "c/d"]
    assert conversion.arguments["dataset_weights"] == [0.7, 0.3]
    assert conversion.arguments["dataset_config"] == "en"
    assert "are repeated" in conversion.notes["dataset_weights"]
    assert refused_by_our_checks(conversion, tmp_path) is None


def test_flags_win_over_the_yaml_of_config(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-5\n")
    conversion = convert_command(tmp_path, "trl sft --config sft.yaml --learning_rate 3e-4")
    assert (conversion.arguments["dataset"], conversion.arguments["learning_rate"]) == ("c/d", 3e-4)


@pytest.mark.parametrize(
    ("command", "preset", "processes"),
    [
        ("python -m trl.scripts.sft", "ddp", None),
        ("torchrun --nproc_per_node 4 trl/scripts/sft.py", "ddp", 4),
        ("accelerate launch --num_processes 1 trl/scripts/sft.py", "single", 1),
        ("accelerate launch --config_file configs/deepspeed_zero3.yaml trl/scripts/sft.py", "zero3", None),
        ("accelerate launch --use_deepspeed --zero_stage 2 sft.py", "zero2", None),
        ("accelerate launch --use_fsdp --fsdp_offload_params true sft.py", "fsdp2_cpu_offload", None),
    ],
)
def test_every_way_to_launch_has_a_preset(command: str, preset: str, processes: int | None, tmp_path: Path) -> None:
    conversion = convert_command(tmp_path, f"{command} --model_name_or_path a/b --dataset_name c/d")
    assert (conversion.preset, conversion.num_processes) == (preset, processes)
    assert [key for key in reasons_of(conversion) if key.startswith(("fsdp", "use_", "zero"))] == []


@pytest.mark.parametrize(
    ("flags", "loss_on"),
    [("", "all"), ("--assistant_only_loss", "assistant"), ("--completion_only_loss false", "all")],
)
def test_the_loss_is_on_the_same_tokens(flags: str, loss_on: str, tmp_path: Path) -> None:
    conversion = convert_command(tmp_path, f"trl sft --model_name_or_path a/b --dataset_name c/d {flags}")
    assert conversion.arguments["loss_on"] == loss_on
    assert ("loss_on" in conversion.notes) == (flags == "")


def test_lora_flags_without_use_peft_train_no_adapter(tmp_path: Path) -> None:
    conversion = convert_command(tmp_path, "trl sft --model_name_or_path a/b --dataset_name c/d --lora_r 8")
    assert "lora_r" not in conversion.arguments
    assert "`use_peft` is not set" in reasons_of(conversion)["lora_r"]
