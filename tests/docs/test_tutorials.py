"""Each tutorial works as it is written: its commands run in their order, with fewer steps, and so does its Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import ROOT
from test_readme import Block, run_launching_bash

TESTED = re.compile(r"<!-- test: (tutorial;?[^\n]*) -->\n```(bash|python)\n(.*?)```", re.DOTALL)
TUTORIALS = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if TESTED.search(page.read_text())]


def script(page: Path) -> str:
    """Return the page's tested blocks as one script for bash."""
    parts = []
    for comment, language, text in TESTED.findall(page.read_text()):
        code = Block(comment, text).substituted()
        example = f'cat > "$FOLDER/example.py" <<END\n{code}\nEND\nforked "$FOLDER/example.py"\n'
        parts.append(code if language == "bash" else example)
    return "".join(parts)


def test_the_tutorials_of_one_gpu_of_eight_and_of_a_comparison_are_run() -> None:
    names = {"first-fine-tune-1-gpu", "first-fine-tune-8-gpus", "compare-three-presets"}
    assert names <= {page.stem for page in TUTORIALS}


@pytest.mark.launch
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorials_commands_run(page: Path, tiny_model: Path, tmp_path: Path) -> None:
    commands = script(page).replace("$(python -m toolkit.demo --model)", str(tiny_model))
    ended = run_launching_bash(commands, FOLDER=str(tmp_path))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
