"""Pages name files that exist, the program names pages that exist, and every benchmark is listed under evidence."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Modules that other benchmarks import or start.
PARTS = {"record", "small_job", "forked_rehearsals"}


def test_every_file_that_a_page_names_exists() -> None:
    """Except for files of another commit: `git show COMMIT:benchmarks/NAME.py`."""
    file = re.compile(r"(?<!:)\b(?:toolkit|tests|benchmarks|examples)/[\w./-]+\.(?:py|jsonl?|yaml|svg|csv)\b")
    named = {(page.name, name) for page in PAGES for name in file.findall(page.read_text())}
    assert len(named) > 10
    assert sorted((page, name) for page, name in named if not (ROOT / name).is_file()) == []


def test_every_benchmark_is_in_the_list_of_evidence() -> None:
    listed = (ROOT / "docs" / "evidence" / "index.md").read_text()
    names = {script.stem for script in (ROOT / "benchmarks").glob("*.py")} - PARTS
    assert sorted(name for name in names if f"`benchmarks/{name}.py`" not in listed) == []


def test_every_page_that_the_program_or_a_test_names_exists() -> None:
    folders = ("toolkit", "tests", "benchmarks", "accelerate_configs", "examples")
    files = [path for folder in folders for kind in ("py", "yaml", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
