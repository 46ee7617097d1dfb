"""The order in which a run's callbacks are called."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.job.job import Job
from toolkit.observe.parts import ObserverParts
from toolkit.observe.progress import Progress
from toolkit.observe.signals import StopOnSignal
from toolkit.observe.timer import StepTimer
from toolkit.record.folder import RunFolder
from toolkit.train.active_run import ActiveRun
from toolkit.train.arguments import Arguments
from toolkit.train.launch_context import LaunchContext
from toolkit.train.trainer import callbacks


@pytest.fixture
def training() -> Any:
    """The training arguments that callbacks read when they are built."""
    return SimpleNamespace(process_index=0, deepspeed_plugin=None, neftune_noise_alpha=None, mixed_precision="no")


def callback_names(folder: Path, training: Any, **arguments: Any) -> list[str]:
    progress = Progress()
    run = ActiveRun(
        arguments=Arguments(job=Job(**arguments), training=training, argv=[]),
        launch=LaunchContext(preset=None, world_size=2),
        progress=progress,
        folder=RunFolder(folder),
        checkpoint=None,
        stop_on_signal=StopOnSignal(progress, rank=0, world_size=2),
        rank=0,
        world_size=2,
    )
    timer = StepTimer(run, ObserverParts(), device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(args=training, eval_dataset=None)
    return [type(callback).__name__ for callback in callbacks(run, trainer, SimpleNamespace(timer=timer))]  # type: ignore


def test_what_decides_about_the_next_step_comes_after_the_timer(tmp_path: Path, training: Any) -> None:
    names = callback_names(
        tmp_path, training, profile_steps="2:3", ddp_comm_hook="bf16", stop_after_minutes=1.0, memory_snapshot=True
    )
    assert names == ["CommunicationHook", "Profiler", "MemorySnapshot", "EarlyStopping"]
