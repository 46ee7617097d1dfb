"""TRL's commands and YAML, axolotl's and LLaMA-Factory's YAML, on files of our own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from conversions import convert_text, reasons_of, refused_by_our_checks, unaccounted

AX, LF = "base_model: a/b\n", "model_name_or_path: a/b\nstage: sft\ndataset: rows\n"
AXOLOTL = """
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


def test_an_axolotl_configuration_becomes_arguments(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, AXOLOTL)
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
    assert unaccounted(yaml.safe_load(AXOLOTL), conversion) == []
    assert refused_by_our_checks(conversion, tmp_path) is None


LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj, v_proj
use_dora: true
dataset: faq
template: qwen3
cutoff_len: 4096
neat_packing: true
preprocessing_num_workers: 16
output_dir: saves/lora
logging_steps: 10
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
flash_attn: fa2
enable_liger_kernel: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
resume_from_checkpoint: null
"""


def write_dataset_info(folder: Path, entries: Mapping[str, object]) -> None:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entries))


def test_a_llama_factory_configuration_becomes_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset_info(tmp_path, {"faq": {"file_name": "faq.json"}})
    conversion = convert_text(tmp_path, LLAMA_FACTORY)
    assert (conversion.tool, conversion.preset) == ("LLaMA-Factory", "ddp")
    assert conversion.arguments == {
        "model_name_or_path": "Qwen/Qwen3-8B", "attn_implementation": "flash_attention_2", "lora_r": 8,
        "lora_target_modules": ["q_proj", "v_proj"], "lora_config": {"use_dora": True}, "dataset": "data/faq.json",
        "max_seq_length": 4096, "packing": True, "val_size": 0.1, "preprocessing_num_workers": 16,
        "output_dir": "saves/lora", "per_device_train_batch_size": 1, "num_train_epochs": 3.0, "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "gradient_accumulation_steps": 8,
        "activation_checkpointing": True, "use_liger_kernel": True, "logging_steps": 10, "eval_strategy": "steps",
        "eval_steps": 500,
    }  # fmt: skip
    assert conversion.defaults == ["lora_r", "activation_checkpointing"]
    assert set(reasons_of(conversion)) == {"trust_remote_code", "template", "overwrite_output_dir", "bf16"}
    assert "cut off" in conversion.notes["max_seq_length"]
    assert unaccounted(yaml.safe_load(LLAMA_FACTORY), conversion) == []
    assert refused_by_our_checks(conversion, tmp_path) is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"file_name": "pages.txt"}, "not a data file"),
        ({"hf_hub_url": "a/b", "columns": {"prompt": "a", "response": "b", "history": "c"}}, "turns of `history`"),
        ({"hf_hub_url": "a/b", "formatting": "sharegpt", "tags": {"role_tag": "who"}}, "rows of `conversations`"),
        ({"hf_hub_url": "a/b", "ranking": True}, "trains on text"),
        ({"ms_hub_url": "a/b"}, "not on the Hugging Face hub"),
        (None, "no such entry"),
        ({"formatting": "sharegpt", "columns": {"messages": "messages"}, "hf_hub_url": "a/chat", "split": "train_sft",
          "tags": {"role_tag": "role", "content_tag": "content"}}, None),
    ],
)  # fmt: skip
def test_a_data_set_of_llama_factory_keeps_its_split_or_is_listed(
    entry: dict[str, object] | None, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset_info(tmp_path, {} if entry is None else {"rows": entry})
    conversion = convert_text(tmp_path, LF)
    if words is None:
        assert (conversion.arguments["dataset"], conversion.arguments["dataset_split"]) == ("a/chat", "train_sft")
    else:
        assert "dataset" not in conversion.arguments
        assert words in reasons_of(conversion)["dataset"]


@pytest.mark.parametrize(
    ("entry", "column"),
    [
        ({"columns": {"prompt": "question", "query": "input", "response": "answer"}},
         {"instruction": "question", "output": "answer"}),
        ({"columns": {"prompt": "content"}}, {"text": "content"}),
        ({}, None),
        ({"formatting": "sharegpt", "columns": {"messages": "chat"}}, {"conversations": "chat"}),
        ({"formatting": "sharegpt", "columns": {"messages": "chat"},
          "tags": {"role_tag": "role", "content_tag": "content"}}, {"messages": "chat"}),
    ],
)  # fmt: skip
def test_columns_of_llama_factory_become_ours(
    entry: dict[str, object], column: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset_info(tmp_path, {"rows": {"hf_hub_url": "a/b", **entry}})
    assert convert_text(tmp_path, LF).arguments.get("column") == column


def test_the_v1_format_of_llama_factory_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text("faq:\n  path: data/faq.json\n  source: local\n")
    text = (
        "model: a/b\nmodel_class: llm\ntemplate: qwen3\ntrain_dataset: rows.yaml\nmicro_batch_size: 2\n"
        "cutoff_len: 1024\npeft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}\n"
        "dist_config: {name: fsdp2, dcp_path: null}\nkernel_config: {name: liger_kernel, include_kernels: auto}\n"
    )
    conversion = convert_text(tmp_path, text)
    assert conversion.preset == "fsdp2"
    assert conversion.arguments == {
        "model_name_or_path": "a/b", "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"],
        "dataset": "data/faq.json", "max_seq_length": 1024, "output_dir": "trainer_output",
        "per_device_train_batch_size": 2, "use_liger_kernel": True, "activation_checkpointing": True,
    }  # fmt: skip
    assert unaccounted(yaml.safe_load(text), conversion) == []


COMMAND = r"""#!/bin/bash
export WANDB_PROJECT=demo  # kept for later
CUDA_VISIBLE_DEVICES=0,1 trl sft --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name trl-lib/Capybara --eval_strategy steps --eval_steps 100 \
    --use_peft --lora_alpha=64 --packing --eos_token '<|im_end|>' --learning-rate 2.0e-4 \
    --accelerate_config zero2 --num_processes 2 --output_dir out
"""


def test_a_command_of_trl_becomes_a_preset_and_arguments(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, COMMAND, name="train.sh")
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


TRL = """
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


def test_a_yaml_of_trl_becomes_arguments(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, TRL)
    assert conversion.arguments == {
        "model_name_or_path": "Qwen/Qwen3-8B", "dataset": ["a/b", "rows.jsonl"], "max_seq_length": 4096,
        "loss_on": "assistant", "val_size": 0.1, "preprocessing_num_workers": 4, "output_dir": "trainer_output",
        "learning_rate": 1e-5, "activation_checkpointing": False, "logging_steps": 10,
    }  # fmt: skip
    assert unaccounted(yaml.safe_load(TRL), conversion) == []


@dataclass(frozen=True)
class Case:
    """A file, or a command, and some of what it becomes."""

    text: str
    preset: str = "ddp"
    processes: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    absent: str = "trust_remote_code"  # an argument that is not set
    reasons: dict[str, str] = field(default_factory=dict)  # key to words in the reason why it is not converted
    notes: dict[str, str] = field(default_factory=dict)
    without_note: str = ""


SFT = "--model_name_or_path a/b --dataset_name c/d"
STAGE2 = "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}\n"
STAGE3 = "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}\n"
FSDP2 = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
QLORA = f"{AX}adapter: qlora\nlora_r: 8\nload_in_4bit: true\n"
CASES = [
    # the preset follows from the sharding settings; a JSON decides, and without it its name
    Case(AX),
    Case(f"{AX}deepspeed: deepspeed_configs/zero2.json", "zero2", notes={"--preset": "chosen by the name"}),
    Case(f"{AX}deepspeed: named-zero2.json", "zero3"),
    Case(f"{AX}{STAGE2}", "zero2_cpu_offload"),
    Case(f"{AX}deepspeed: conf/zero3_bf16_cpuoffload_all.json", "zero3_cpu_offload"),
    Case(f"{AX}deepspeed: {{zero_optimization: {{stage: 3, offload_param: {{device: nvme}}}}}}", "zero3_nvme_offload"),
    Case(f"{AX}deepspeed: {{zero_optimization: {{stage: 3, zero_hpz_partition_size: 8}}}}", "zeropp"),
    Case(f"{AX}fsdp_version: 2\nfsdp_config: {{reshard_after_forward: false}}", "fsdp2_grad_op"),
    Case(f"{AX}fsdp: [full_shard, auto_wrap]\nfsdp_config: {{fsdp_offload_params: true}}", "fsdp2_cpu_offload"),
    Case(f"{AX}fsdp_config: {{fsdp_version: 2}}\ndp_replicate_size: 2", "fsdp2_hybrid"),
    Case(f"{QLORA}deepspeed: zero3.json", "zero3"),
    Case(f"{QLORA}{STAGE2}", "zero2", notes={"--preset": "too small to offload"},
         reasons={"deepspeed": "not with load_in_4bit"}),
    # ways to launch TRL
    Case(f"python -m trl.scripts.sft {SFT}"),
    Case(f"torchrun --nproc_per_node 4 trl/scripts/sft.py {SFT}", "ddp", 4),
    Case(f"accelerate launch --num_processes 1 --module trl sft {SFT}", "single", 1),
    Case(f"accelerate launch --config_file configs/deepspeed_zero3.yaml trl/scripts/sft.py {SFT}", "zero3"),
    Case(f"accelerate launch --use_deepspeed --zero_stage 2 $(which trl) sft {SFT}", "zero2"),
    Case(f"accelerate launch --use_fsdp --fsdp_offload_params true sft.py {SFT}", "fsdp2_cpu_offload"),
    Case("trl sft --config sft.yaml --learning_rate 3e-4",
         arguments={"dataset": "of/yaml", "learning_rate": 3e-4}),  # flags win over the YAML
    Case(f"# sft, with words in an array\nA=({SFT})\nA+=(--learning_rate 3e-4)\ntrl sft \"${{A[@]}}\" | tee log",
         arguments={"dataset": "c/d", "learning_rate": 3e-4}),
    # the loss is on the same tokens
    Case(f"trl sft {SFT}", arguments={"loss_on": "all"}, notes={"loss_on": "TRL's default for conversations"}),
    Case(f"trl sft {SFT} --assistant_only_loss", arguments={"loss_on": "assistant"}),
    Case(f"trl sft {SFT} --completion_only_loss false", arguments={"loss_on": "all"}),
    # settings without a counterpart
    Case(f"trl sft {SFT} --lora_r 8", absent="lora_r", reasons={"lora_r": "`use_peft` is not set"}),
    Case(f"{AX}load_in_4bit: true", absent="load_in_4bit", reasons={"load_in_4bit": "needs `adapter: qlora`"}),
    Case(f"{AX}optimizer: adamw_bnb_8bit\n{STAGE3}", "zero3_cpu_offload", absent="optim",
         reasons={"optimizer": "DeepSpeed's CPU Adam"}),
    Case(f"{AX}optimizer: adamw_bnb_8bit\n{FSDP2}", "fsdp2", absent="optim",
         reasons={"optimizer": "take no DTensors"}),
    Case(f"{AX}trust_remote_code: true", reasons={"trust_remote_code": "if you trust that"}),
    Case(f"{AX}unfrozen_parameters: ['layers.4[4-9]+.gate']", absent="train_only",
         reasons={"unfrozen_parameters": "not regular expressions"}),
    Case(f"{AX}datasets: [{{path: c/d, type: chat_template, field_messages: dialogue}}]",
         reasons={"datasets[0].field_messages": "rows of `dialogue` with role and content: rename them"}),
    # rules of several settings
    Case(f"{AX}optimizer: muon\n{FSDP2}", "fsdp2", arguments={"optim": "muon"}),
    Case(f"{LF}use_muon: true", arguments={"optim": "muon"}),
    Case(f"{LF}use_muon: true\ndeepspeed: {{zero_optimization: {{stage: 2}}}}", "zero2", absent="optim",
         reasons={"use_muon": "Muon orthogonalises matrices"}),
    Case(f"{AX}datasets: [{{path: a/b, type: alpaca}}, {{path: c.jsonl, type: alpaca, split: train}}]",
         arguments={"dataset": ["a/b", "c.jsonl"]}),
    Case("model_name_or_path: a/b\nuse_peft: false\nmax_length: 8\n"
         "datasets: [{path: a/b, name: en, fraction: 0.7}, {path: c/d, name: en, fraction: 0.3}]",
         arguments={"dataset": ["a/b", "c/d"], "dataset_weights": [0.7, 0.3], "dataset_config": "en"},
         notes={"dataset_weights": "are repeated"}),
    Case(f"{AX}unfrozen_parameters: ['^lm_head.weight$', 'model.layers.[0-7].']",
         arguments={"train_only": ["lm_head.weight", "model.layers.[0-7].*"]}),
    Case(f"{AX}sequence_len: 2048", notes={"max_seq_length": "drops longer rows"}),
    Case(f"{AX}sequence_len: 2048\nexcess_length_strategy: truncate", without_note="max_seq_length"),
    # once in one epoch is no interval in axolotl: it then saves at the end of each epoch
    Case(f"{AX}num_epochs: 1\nsaves_per_epoch: 1", arguments={"save_strategy": "epoch"}),
    Case(f"{AX}num_epochs: 1\nsaves_per_epoch: 4", arguments={"save_strategy": "steps", "save_steps": 0.25}),
    Case(f"{AX}save_steps: 50\nsave_strategy: steps", arguments={"save_strategy": "steps", "save_steps": 50}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text.removeprefix(AX).partition("\n")[0])
def test_settings_become_a_preset_arguments_notes_and_reasons(case: Case, tmp_path: Path) -> None:
    (tmp_path / "named-zero2.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: of/yaml\nlearning_rate: 1e-5\n")
    is_command = "sft" in case.text.partition("\n")[0]
    conversion = convert_text(tmp_path, f"{case.text}\n", name="train.sh" if is_command else "theirs.yaml")
    assert (conversion.preset, conversion.num_processes) == (case.preset, case.processes)
    assert {name: conversion.arguments[name] for name in case.arguments} == case.arguments
    assert case.absent not in conversion.arguments
    assert case.without_note not in conversion.notes
    reasons = reasons_of(conversion)
    assert [key for key, words in case.reasons.items() if words not in reasons[key]] == []
    assert [name for name, words in case.notes.items() if words not in conversion.notes[name]] == []
    assert [key for key in reasons if key.startswith(("fsdp", "use_f", "use_d", "zero"))] == []
    if not is_command:
        assert unaccounted(yaml.safe_load(case.text), conversion) == []


def test_liger_kernels_that_are_not_named_stay_off(tmp_path: Path) -> None:
    plugin = "plugins: [axolotl.integrations.liger.LigerPlugin, other.Plugin]\n"
    conversion = convert_text(tmp_path, f"{AX}{plugin}liger_rope: true\nliger_glu_activation: true\n")
    assert conversion.arguments["use_liger_kernel"] is True
    kernels = conversion.arguments["liger_kernel_config"]
    assert [name for name, is_on in kernels.items() if is_on] == ["rope", "swiglu", "geglu"]
    assert kernels["fused_linear_cross_entropy"] is False
    assert "plugins[1]" in reasons_of(conversion)
