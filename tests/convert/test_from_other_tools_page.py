"""docs/tutorials/from-other-tools.md says what the conversion does."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversions import convert_text

from toolkit.job.argument_aliases import ALIASES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "from-other-tools.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", ALIASES)
def test_every_name_that_means_the_same_is_in_the_table(name: str) -> None:
    rows = [line for line in section("Same meaning, another name").splitlines() if line.startswith("|")]
    (row,) = [line for line in rows if f"`{name}" in line.split("|")[1]]
    assert f"`{ALIASES[name].name}" in row.split("|")[2]


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("TRL", "model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\noutput_dir: x\n"),
        ("axolotl", "base_model: a/b\nval_set_size: 0.1\nevals_per_epoch: 4\noutput_dir: x\n"),
        ("LLaMA-Factory", "model_name_or_path: a/b\nstage: sft\ndataset: c\noutput_dir: x\n"),
    ],
)
def test_the_page_names_every_default_that_is_written_down(tool: str, text: str, tmp_path: Path) -> None:
    (row,) = [line for line in section("Another default").splitlines() if line.startswith(f"| {tool}")]
    conversion = convert_text(tmp_path, text)
    named = {"lora_target_modules": "adapters on `q_proj`", "per_device_eval_batch_size": "the evaluation batch"}
    for name in (*conversion.defaults, *(["lora_r"] if tool == "TRL" else [])):
        assert named.get(name, f"`{name}`") in row, name
