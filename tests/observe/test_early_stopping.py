"""When a run's median step time is known, and on which step all ranks stop."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.observe.early_stopping import EarlyStopping
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.parts import ObserverParts
from toolkit.observe.progress import Progress
from toolkit.observe.timer import StepTimer
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import median_interval


def test_the_interval_of_a_median_covers_it_in_at_least_95_of_100_samples() -> None:
    rng = random.Random(0)
    samples = [median_interval([rng.expovariate(1) for _ in range(41)]) or (0, 0) for _ in range(4_000)]
    covering = sum(low <= math.log(2) <= high for low, high in samples)  # the median of the distribution
    assert 0.95 <= covering / len(samples) < 0.98


# The earliest decision is after 10 timed steps, and it is read two steps later.
STOPPED = {"step": 12, "why": "median step known to 3.0%"}


@pytest.mark.parametrize(("seconds", "expected"), [([1.0] * 20, STOPPED), ([1.0, 1.2] * 10, None)])
def test_training_stops_two_steps_later(tmp_path: Path, seconds: list[float], expected: dict[str, Any] | None) -> None:
    run = ObservedRun(folder=RunFolder(tmp_path), progress=Progress(), rank=0, world_size=1)
    timer = StepTimer(run, ObserverParts(), device=torch.device("cpu"))
    stopping = EarlyStopping(run, timer, within=0.03, minutes=None, evaluates=False)
    stopping.on_train_begin(SimpleNamespace(world_size=1))
    for step, took in enumerate(seconds, start=1):
        timer.timed_seconds.append(took)
        control = SimpleNamespace(should_training_stop=False, should_evaluate=False)
        stopping.on_step_end(None, SimpleNamespace(global_step=step), control)
        assert control.should_training_stop == (expected is not None and step == expected["step"])
        if control.should_training_stop:
            break
    assert (run.folder.read_run() or {}).get("stopped_after") == expected
