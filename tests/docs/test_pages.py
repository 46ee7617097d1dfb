"""Pages name files that exist, the program names pages that exist, and every benchmark is listed under evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Modules that other benchmarks import or start.
PARTS = {"record", "small_job", "forked_rehearsals", "bare_trainer"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Except for files of another commit: `git show COMMIT:benchmarks/NAME.py`."""
    named = set(
        re.findall(
            r"(?<!:)\b(?:toolkit|tests|benchmarks|examples)/[\w./-]+\.(?:py|jsonl?|yaml|svg|csv)\b", page.read_text()
        )
    )
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda script: script.stem)
def test_every_benchmark_is_in_the_list_of_evidence(script: Path) -> None:
    listed = (ROOT / "docs" / "evidence" / "index.md").read_text()
    assert script.stem in PARTS or f"`benchmarks/{script.name}`" in listed


def test_every_page_that_the_program_or_a_test_names_exists() -> None:
    folders = ("toolkit", "tests", "benchmarks", "accelerate_configs", "examples")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".md")
    ]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
