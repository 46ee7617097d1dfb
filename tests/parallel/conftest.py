"""Runs of every layout, each trained once per session, whichever test needs it first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from split_runs import RUNS, build_models, build_rows, launch


@pytest.fixture(scope="session")
def split_models(build_once: Callable[..., Path]) -> Path:
    return build_once("split_models", build_models)


@pytest.fixture(scope="session")
def split_rows(build_once: Callable[..., Path]) -> Path:
    return build_once("split_rows", build_rows) / "rows.jsonl"


@pytest.fixture(scope="session")
def run_folder(build_once: Callable[..., Path], split_models: Path, split_rows: Path) -> Callable[[str], Path]:
    def folder_of(name: str) -> Path:
        run = RUNS[name]
        checkpoint = None
        if run.resumes is not None:
            resumed, step = run.resumes
            checkpoint = folder_of(resumed) / f"checkpoint-{step}"

        def train(folder: Path) -> Any:
            launch(run, models=split_models, rows=split_rows, folder=folder / "run", checkpoint=checkpoint)

        return build_once(f"split_run_{name}", train) / "run"

    return folder_of
