"""Runs that several tests of a module look at."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import accelerate_launch, succeeded

Start = Callable[..., Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_job: list[str]) -> Start:
    """Return a function that trains three steps under a preset, once with the same words; it returns the run folder."""

    @cache
    def run(preset: str, *words: str, gpu: bool = False, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("run") / preset
        job = [*tiny_job, "--max_steps", "3", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
        job += ["--save_strategy", "no", "--output_dir", str(folder), *words]
        if gpu:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            options |= {"variables": {"CUDA_VISIBLE_DEVICES": seen}, "num_processes": 1}
        succeeded(accelerate_launch(preset, *job, **options))
        return folder

    return run
