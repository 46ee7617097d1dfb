"""Each tutorial works as it is written: its commands run in their order, with fewer steps, and so does its Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_readme import Block, run_bash

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
TESTED = re.compile(r"<!-- test: (tutorial;?[^\n]*) -->\n```(bash|python)\n(.*?)```", re.DOTALL)
TUTORIALS = [page for page in sorted(FOLDER.glob("*.md")) if TESTED.search(page.read_text())]


def script(page: Path) -> str:
    """Return the page's tested blocks as one script. It prints `PYTHON:` before the output of the Python."""
    parts = []
    for comment, language, text in TESTED.findall(page.read_text()):
        code = Block(comment, text).substituted()
        parts.append(code if language == "bash" else f"echo PYTHON:\npython - <<END\n{code}\nEND\n")
    return "".join(parts)


def test_the_tutorials_of_one_gpu_of_eight_and_of_a_comparison_are_run() -> None:
    names = {"first-fine-tune-1-gpu", "first-fine-tune-8-gpus", "compare-three-presets"}
    assert names <= {page.stem for page in TUTORIALS}


@pytest.mark.launch
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorials_commands_run(page: Path, tiny_model: Path, tmp_path: Path) -> None:
    commands = script(page).replace("$(python -m toolkit.demo --model)", str(tiny_model))
    ended = run_bash(commands, FOLDER=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    _, mark, printed = ended.stdout.partition("PYTHON:\n")
    assert printed.strip() or not mark, "the trained model says nothing"
