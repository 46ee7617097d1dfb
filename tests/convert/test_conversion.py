"""What holds for the configurations of every tool: refusals, defaults, the documentation's page, hostile files, runs.

A converted configuration trains, and has the losses of the other tool.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_command
from conversions import convert_text
from launching import ROOT, accelerate_launch, cpu_environment, nightly_launch, read, run_warm

from toolkit.convert.conversion import yaml_text
from toolkit.errors import ToolkitError

PAGE = (ROOT / "docs" / "tutorials" / "from-other-tools.md").read_text()
LF = "model_name_or_path: a/b\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "base_model: a/b\nrl: dpo", "preference and reinforcement learning (rl), not supervised"),
        ("a.yaml", "base_model: a/b\nprocessor_type: A", "images or audio (processor_type), and the toolkit on text"),
        ("a.yaml", "base_model: a/b\nadapter: llama-adapter", "adapter 'llama-adapter' has no counterpart"),
        ("a.yaml", "base_model: a/b\nadapter: lora", "without lora_r"),
        ("a.yaml", "base_model: a/b\ndeepspeed: ds.json", "no such DeepSpeed configuration: ds.json"),
        ("l.yaml", f"{LF}stage: dpo\ndataset: x", "for stage 'dpo', not supervised fine-tuning"),
        ("l.yaml", f"{LF}infer_backend: huggingface", "names no dataset to train on"),
        ("l.yaml", f"{LF}finetuning_type: oft\ndataset: x", "type 'oft' has no counterpart"),
        ("l.yaml", f"{LF}finetuning_type: freeze\ndataset: x", "'freeze' counts layers from the"),
        ("l.yaml", f"{LF}stage: sft\ndataset: x\nimage_max_pixels: 1", "images or video"),
        ("t.sh", "trl dpo --model_name_or_path a/b", "is for `trl dpo`, not supervised fine-tuning"),
        ("t.yaml", f"{LF}num_generations: 8\n", "is for `trl grpo`, not supervised fine-tuning"),
        ("t.yaml", f"{LF}train_dataset: x\ntorch_dtype: bfloat16\n", "is not recognised"),
        ("t.sh", "trl sft --dataset_name c/d", "names no model_name_or_path"),
        ("t.sh", "trl sft --config missing.yaml", "names missing.yaml, which does not exist"),
        ("t.sh", "trl sft --model_name_or_path a --accelerate_config mine", "no such accelerate configuration: mine"),
        ("t.sh", "echo hello", "has no `trl`, `axolotl`, `llamafactory-cli` or `swift` command"),
        ("t.sh", "trl x\n" * 1_000_000, "more than 256 KiB, expected at most"),
        ("t.sh", 'A=(--model b)\nswift sft "${A[@]}" --packing', "is a file of ms-swift, which is not read"),
        ("x.yaml", "distributed_type: FSDP", "x.yaml is not recognised"),
        # values of another type
        ("l.yaml", f"{LF}stage: sft\ndataset: five", "dataset_info.json: five is 5, expected keys and values"),
        ("l.yaml", f"{LF}stage: sft\ndataset: file", "dataset_info.json: file: file_name is 5, expected text"),
        ("l.yaml", f"{LF}stage: sft\ndataset: columns", "columns: columns: prompt is [1], expected text"),
        ("l.yaml", f'{LF}stage: sft\ndataset: x\ndataset_dir: "a\\0b"', "path"),
        ("t.yaml", f"{LF}use_peft: true\naccelerate_config: fsdp.yaml", "fsdp_config is ['a'], expected keys and"),
        ("t.yaml", f"{LF}use_peft: true\naccelerate_config: {'x' * 5000}", "path"),
        ("a.yaml", "base_model: m\ndatasets: [{path: a.jsonl, message_property_mappings: true}]",
         "datasets[0]: message_property_mappings is True, expected keys and values"),
        ("a.yaml", "base_model: m\nmicro_batch_size: two", "per_device_train_batch_size is 'two', expected a whole"),
        ("a.yaml", f"base_model: m\ndeepspeed: {'x' * 5000}", "path"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_by_its_name(
    name: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: [a]\n")
    Path("data").mkdir()
    columns = {"hf_hub_url": "a/b", "columns": {"prompt": [1]}}
    Path("data/dataset_info.json").write_text(json.dumps({"five": 5, "file": {"file_name": 5}, "columns": columns}))
    with pytest.raises(ToolkitError) as refused:
        convert_text(tmp_path, f"{text}\n", name=name)
    assert words in refused.value.message
    assert len(refused.value.message) < 600
    assert refused.value.hint or "expected" in words or words == "path"


DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": (
        "base_model: a/b\nlearning_rate: 1e-5\ndatasets: [{path: c/d, type: completion}]\n",
        {"output_dir": "./model-out", "max_seq_length": 512, "per_device_train_batch_size": 1, "num_train_epochs": 1.0,
         "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 10, "save_strategy": "epoch",
         "save_total_limit": 4},
    ),
    "LLaMA-Factory": (
        f"{LF}stage: sft\ndataset: x\n",
        {"lora_r": 8, "output_dir": "trainer_output", "max_seq_length": 2048, "activation_checkpointing": True},
    ),
    "TRL": (
        f"{LF}dataset_name: c/d\nuse_peft: true\noutput_dir: x\n",
        {"lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "loss_on": "all",
         "learning_rate": 2e-5, "activation_checkpointing": True, "logging_steps": 10},
    ),
}  # fmt: skip


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("tool", DEFAULTS)
def test_what_a_tool_does_by_default_is_written_down_and_documented(tool: str, tmp_path: Path) -> None:
    text, defaults = DEFAULTS[tool]
    conversion = convert_text(tmp_path, text)
    assert conversion.tool == tool
    assert {name: conversion.arguments[name] for name in conversion.defaults} == defaults
    (row,) = [line for line in section("Another default").splitlines() if line.startswith(f"| {tool}")]
    named = {"lora_target_modules": "adapters on `q_proj`"}
    assert [name for name in defaults if named.get(name, f"`{name}`") not in row and name != "output_dir"] == []


# -- hostile files


def test_a_key_with_a_line_break_cannot_add_an_argument(tmp_path: Path) -> None:
    breaks = ["\n", "\r", "\x85", "\u2028"]
    settings = {"base_model": "m"} | {f"x{mark}trust_remote_code: true #": mark for mark in breaks}
    conversion = convert_text(tmp_path, yaml.safe_dump(settings), tool="axolotl")
    text = yaml_text(conversion, source="a\ntrust_remote_code: true", file="b\ntrust_remote_code: true")
    assert "trust_remote_code" in text, "the keys are listed in a comment"
    assert "trust_remote_code" not in yaml.safe_load(text)
    assert len(conversion.not_converted) >= len(breaks)


@pytest.mark.parametrize(
    ("output", "message"),
    [("theirs.yaml", "is the input"), ("link.yaml", "is the input"), ("folder", "error: cannot write ")],
)
def test_the_input_and_a_folder_are_never_overwritten(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("base_model: m\n")
    (tmp_path / "link.yaml").symlink_to(theirs)
    (tmp_path / "folder").mkdir()
    words = ["convert-config", str(theirs), "--output", str(tmp_path / output), "--force"]
    code, _, errors = run_command(words, capsys)
    assert (code, len(errors.splitlines()), theirs.read_text()) == (2, 2, "base_model: m\n")
    assert message in errors.splitlines()[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link.yaml", "theirs.yaml"]


# -- runs


AXOLOTL = """
base_model: {model}
datasets: [{{path: {data}, type: alpaca}}]
val_set_size: 4
sequence_len: 64
sample_packing: true
micro_batch_size: 2
max_steps: 2
learning_rate: 2e-4
evals_per_epoch: 2
deepspeed: {{zero_optimization: {{stage: 2}}}}
output_dir: {out}
"""


@nightly_launch
def test_a_converted_configuration_trains(tiny_model: Path, faq_alpaca: Path, tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, AXOLOTL.format(model=tiny_model, data=faq_alpaca, out=tmp_path / "out"))
    assert conversion.preset == "zero2"
    (tmp_path / "ours.yaml").write_text(yaml_text(conversion, source="theirs.yaml", file="ours.yaml"))
    ended = accelerate_launch(ROOT / "accelerate_configs" / "zero2.yaml", str(tmp_path / "ours.yaml"))
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["measured"]["steps"]) == ("completed", 2)


TRL_YAML = """
model_name_or_path: {model}
datasets:
  - path: json
    data_files: {folder}/rows.jsonl
learning_rate: 1.0e-3
max_length: 64
max_steps: 3
per_device_train_batch_size: 4
logging_steps: 1
save_strategy: "no"
report_to: none
bf16: false
output_dir: {folder}/trl
"""


def conversation(words: str) -> str:
    turns = [f"Say {words}.", f"{words}, gladly.", "And again?", f"{words} {words}"]
    messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return json.dumps({"messages": messages}) + "\n"


@nightly_launch
def test_a_converted_trl_configuration_has_trls_losses(tiny_model: Path, tmp_path: Path) -> None:
    """Each batch is all four conversations, so the order of the rows has no effect."""
    pytest.importorskip("trl")
    (tmp_path / "rows.jsonl").write_text("".join(conversation(words) for words in ("a", "two", "and three", "4")))
    text = TRL_YAML.format(model=tiny_model, folder=tmp_path)
    conversion = convert_text(tmp_path, text)
    command = [sys.executable, "-m", "trl.scripts.sft", "--config", "theirs.yaml"]
    theirs = run_warm(command, cpu_environment(), tmp_path)
    assert theirs.returncode == 0, theirs.stderr[-2000:]
    (tmp_path / "ours.yaml").write_text(yaml_text(conversion, source="theirs.yaml", file="ours.yaml"))
    config = ROOT / "accelerate_configs" / "single.yaml"
    words = [str(tmp_path / "ours.yaml"), "--output_dir", str(tmp_path / "ours")]
    ours = accelerate_launch(config, *words, num_processes=1)
    assert ours.returncode == 0, ours.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "ours" / "ranks" / "rank0.jsonl").read_text().splitlines()]
    printed = re.findall(r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", theirs.stdout + theirs.stderr)
    assert len(steps) == len(printed) == 3
    for step, (loss, grad_norm) in zip(steps, printed, strict=True):  # TRL prints four digits
        assert (step["loss"], step["grad_norm"]) == pytest.approx((float(loss), float(grad_norm)), rel=1e-3)
