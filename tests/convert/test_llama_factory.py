"""LLaMA-Factory's YAML, on files of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conversions import convert_text, reasons_of, refused_by_our_checks, unaccounted

LORA = """
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


def write_dataset_info(folder: Path, **entries: object) -> None:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entries))


def test_a_lora_configuration_becomes_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset_info(tmp_path, faq={"file_name": "faq.json"})
    conversion = convert_text(tmp_path, LORA)
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
    assert conversion.defaults == ("lora_r", "activation_checkpointing")
    assert set(reasons_of(conversion)) == {"trust_remote_code", "template", "overwrite_output_dir", "bf16"}
    assert "cut off" in conversion.notes["max_seq_length"]
    assert unaccounted(yaml.safe_load(LORA), conversion) == []
    assert refused_by_our_checks(conversion, tmp_path) is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"file_name": "pages.txt"}, "not a data file"),
        ({"hf_hub_url": "a/b", "columns": {"prompt": "question", "response": "answer"}}, "recognised by their fields"),
        ({"hf_hub_url": "a/b", "formatting": "sharegpt", "columns": {"messages": "chat"}}, "rows of `chat`"),
        ({"hf_hub_url": "a/b", "ranking": True}, "trains on text"),
        ({"ms_hub_url": "a/b"}, "not on the Hugging Face hub"),
        (None, "no such entry"),
    ],
)
def test_a_data_set_that_is_not_read_is_listed(
    entry: dict[str, object] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset_info(tmp_path, **({} if entry is None else {"rows": entry}))
    conversion = convert_text(tmp_path, "model_name_or_path: a/b\nstage: sft\ndataset: rows\n")
    assert "dataset" not in conversion.arguments
    assert words in reasons_of(conversion)["dataset"]


def test_a_data_set_of_the_hub_keeps_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    chat |= {"tags": {"role_tag": "role", "content_tag": "content"}, "hf_hub_url": "a/chat", "split": "train_sft"}
    write_dataset_info(tmp_path, chat=chat)
    conversion = convert_text(tmp_path, "model_name_or_path: a/b\nstage: sft\ndataset: chat\n")
    assert (conversion.arguments["dataset"], conversion.arguments["dataset_split"]) == ("a/chat", "train_sft")


def test_the_format_of_v1_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "per_device_train_batch_size": 2, "use_liger_kernel": True,
    }  # fmt: skip
    assert unaccounted(yaml.safe_load(text), conversion) == []


def test_its_muon_is_ours_where_parameters_stay_matrices(tmp_path: Path) -> None:
    assert convert_text(tmp_path, LORA + "use_muon: true\n").arguments["optim"] == "muon"
    under_zero = convert_text(tmp_path, LORA + "use_muon: true\ndeepspeed: {zero_optimization: {stage: 2}}\n")
    assert "optim" not in under_zero.arguments
    assert "Muon orthogonalises matrices" in reasons_of(under_zero)["use_muon"]
