"""Fixtures of the checkpoint tests, from the session's `saved_runs`: six steps of the tiny Llama on two ranks."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(saved_runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_runs["zero3"] / "checkpoint-6", tmp_path / "run" / "checkpoint-6"))


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limit files to 4 MB, beyond which writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
