"""Jobs for `toolkit cluster` without weights: the commands are given a model's configuration and a few rows."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import run_command


def write_inputs(folder: Path) -> list[str]:
    """Write a model without weights and 512 rows, and return the training arguments of a job on them."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "rows.jsonl").write_text('{"text": "a row"}\n' * 512)
    model, rows, out = (str(folder / name) for name in ("model", "rows.jsonl", "out"))
    return ["--model_name_or_path", model, "--dataset", rows, "--output_dir", out]


def run_cluster(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    return run_command(["cluster", *words], capsys)


def check_shell(text: str) -> None:
    """Let bash parse a script."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def node_script_of(sbatch: str) -> str:
    found = re.search(r"<<'END_OF_NODE_SCRIPT'\n(.*?)\nEND_OF_NODE_SCRIPT\n", sbatch, re.DOTALL)
    assert found is not None
    return found[1]
