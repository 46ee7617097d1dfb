"""Each tutorial works as it is written: its commands run in their order, with fewer steps, and so does its Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, cpu_environment
from test_readme import Block

TESTED = re.compile(r"<!-- test: (tutorial;?[^\n]*) -->\n```(bash|python)\n(.*?)```", re.DOTALL)
TUTORIALS = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if TESTED.search(page.read_text())]


def script(page: Path) -> str:
    """Return the page's tested blocks as one script for bash."""
    parts = []
    for comment, language, text in TESTED.findall(page.read_text()):
        code = Block(comment, text).substituted()
        parts.append(code if language == "bash" else f"python - <<END\n{code}\nEND\n")
    return "".join(parts)


def test_the_tutorials_of_one_gpu_of_eight_and_of_a_comparison_are_run() -> None:
    names = {"first-fine-tune-1-gpu", "first-fine-tune-8-gpus", "compare-three-presets"}
    assert names <= {page.stem for page in TUTORIALS}


@pytest.mark.launch
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorials_commands_run(page: Path, tiny_model: Path, tmp_path: Path) -> None:
    commands = script(page).replace("$(python -m toolkit.demo --model)", str(tiny_model))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = cpu_environment() | {"PATH": path, "FOLDER": str(tmp_path)}
    command = ["bash", "-euo", "pipefail", "-c", commands]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
