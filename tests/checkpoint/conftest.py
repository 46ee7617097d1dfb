"""A checkpoint that a test may damage, from the session's `saved_runs`: six steps of the tiny Llama on two ranks."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(saved_runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_runs["zero2"] / "checkpoint-6", tmp_path / "run" / "checkpoint-6"))
