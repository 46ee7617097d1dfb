"""Shared by the tests of data."""

from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenise anew in each test: rows that another test has tokenised are in the cache of `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
