"""The parts of the Trainer that a rehearsal replaces."""

from pathlib import Path

import pytest
import torch

from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.parts import ObserverParts
from toolkit.observe.progress import Progress
from toolkit.observe.timer import StepTimer
from toolkit.record.folder import RunFolder
from toolkit.rehearse.stand_ins import RehearsedTimer, fill_at_random


def test_peaks_of_a_step_are_those_over_all_phases_and_a_cpu_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each phase resets the allocator's own peak, so that it only knows the last one."""
    run = ObservedRun(folder=RunFolder(tmp_path), progress=Progress(), rank=3, world_size=4)
    timer = RehearsedTimer(run, ObserverParts(), device=torch.device("cpu"))
    timer.enter_backward()
    assert timer.read_peaks() == {}
    monkeypatch.setattr(StepTimer, "read_memory", lambda _: {"peak_allocated_bytes": 1, "peak_host_bytes": 5})
    assert timer.read_memory() == {"peak_allocated_bytes": 1, "peak_host_bytes": 5}
    timer.phase_peaks = {
        "load": {"peak_allocated_bytes": 2, "peak_reserved_bytes": 9},
        "backward": {"peak_allocated_bytes": 7, "peak_reserved_bytes": 8},
    }
    assert timer.read_memory() == {"peak_allocated_bytes": 7, "peak_reserved_bytes": 9, "peak_host_bytes": 5}


def test_weights_without_a_checkpoint_are_random_whatever_their_layout() -> None:
    first, norm, last = torch.nn.Linear(1500, 1000), torch.nn.LayerNorm(1000), torch.nn.Linear(10, 2000)
    last.weight = torch.nn.Parameter(torch.empty(10, 2000).T)
    fill_at_random(torch.nn.ModuleList([first, norm, last]))
    for matrix in (first.weight, last.weight):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
        assert not torch.equal(matrix[0], matrix[1])
    assert set(norm.weight.tolist()) == {1.0}
