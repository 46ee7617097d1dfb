"""A converted configuration trains, and has the losses of the other tool."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from conversions import convert_text
from launching import ROOT, accelerate_launch, cpu_environment, read, run_warm

from toolkit.convert.conversion import yaml_text

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


@pytest.mark.launch
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
    """A line of several turns, whose length depends on the words."""
    turns = [f"Say {words}.", f"{words}, gladly.", "And again?", f"{words} {words}"]
    messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return json.dumps({"messages": messages}) + "\n"


@pytest.mark.launch
@pytest.mark.nightly
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
