"""Pages name files that exist, the program names pages that exist, every tutorial works.

A tutorial's commands run in their order, with fewer steps and another folder than `runs/`, and so does its Python.
"""

import re
from pathlib import Path

import pytest
from launching import ROOT, nightly
from test_readme import Block, run_launching_bash

from toolkit.observe.failure_report import COLLECTIVE_TIMEOUT_MESSAGES
from toolkit.record import status

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TESTED = re.compile(r"<!-- test: (tutorial;?[^\n]*) -->\n```(bash|python)\n(.*?)```", re.DOTALL)
TUTORIALS = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if TESTED.search(page.read_text())]
SLOW = ("first-fine-tune", "from-other-tools", "compare-three-presets", "your-dpo-script")


def test_every_file_that_a_page_names_exists() -> None:
    """Except for files of another commit: `git show COMMIT:benchmarks/NAME.py`."""
    file = re.compile(r"(?<!:)\b(?:toolkit|tests|benchmarks|examples)/[\w./-]+\.(?:py|jsonl?|yaml|svg|csv)\b")
    named = {(page.name, name) for page in PAGES for name in file.findall(page.read_text())}
    assert len(named) > 10
    assert sorted((page, name) for page, name in named if not (ROOT / name).is_file()) == []


def test_every_page_that_the_program_or_a_test_names_exists() -> None:
    folders = ("toolkit", "tests", "benchmarks", "accelerate_configs", "examples")
    files = [path for folder in folders for kind in ("py", "yaml", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_page_of_failures_has_every_status_and_every_message_that_a_run_is_judged_by() -> None:
    page = (ROOT / "docs" / "how-to" / "my-run-failed.md").read_text()
    endings = set(status.STATUSES) - {status.PLANNED, status.RUNNING, status.COMPLETED}
    assert sorted(name for name in endings if not re.search(rf'id="{name}"|^## {name}$', page, re.MULTILINE)) == []
    messages = (*COLLECTIVE_TIMEOUT_MESSAGES, *status.HOST_MEMORY_WORDS, *status.DISK_FULL_WORDS)
    assert [text for text in messages if text not in page] == []


def script(page: Path) -> str:
    parts = []
    for comment, language, text in TESTED.findall(page.read_text()):
        code = Block(comment, text).substituted().replace("runs/", "$FOLDER/")
        example = f'cat > "$FOLDER/example.py" <<END\n{code}\nEND\nforked "$FOLDER/example.py"\n'
        parts.append(code if language == "bash" else example)
    return "".join(parts)


@pytest.mark.launch
@pytest.mark.parametrize(
    "page",
    [
        *nightly(*(page for page in TUTORIALS if page.stem in SLOW)),
        *(page for page in TUTORIALS if page.stem not in SLOW),
    ],
    ids=lambda page: page.stem,
)
def test_a_tutorials_commands_run(page: Path, tiny_model: Path, tmp_path: Path) -> None:
    commands = script(page).replace("$(python -m toolkit.demo --model)", str(tiny_model))
    ended = run_launching_bash(commands, FOLDER=str(tmp_path))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
