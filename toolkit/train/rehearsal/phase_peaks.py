"""The allocator's peak of each phase on a GPU: the statistics are the host's, so nothing waits for the device.

peaks = PhasePeaks(torch.device("cuda"))
peaks.enter("forward")
...
peaks.told()["forward"]["peak_allocated_bytes"]
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.train.trainer import MeasuredTrainer

Peaks = dict[str, int]


class PhasePeaks:
    """Highest bytes of `load`, `forward`, `backward` and `step` so far; empty on a CPU, which has no allocator."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.phase = "load"
        self.peaks: dict[str, Peaks] = {}

    def enter(self, phase: str) -> None:
        """Close the phase before, and begin this one with what is allocated now."""
        if self.cuda:
            self._note()
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def told(self) -> dict[str, Peaks]:
        """Every phase, the one under way included."""
        if self.cuda:
            self._note()
        return {phase: dict(peaks) for phase, peaks in self.peaks.items()}

    def highest(self) -> Peaks:
        """Over all phases."""
        told = self.told().values()
        names = ("peak_allocated_bytes", "peak_reserved_bytes")
        return {name: max(peaks[name] for peaks in told) for name in names} if told else {}

    def _note(self) -> None:
        now = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        before = self.peaks.get(self.phase, {})
        self.peaks[self.phase] = {name: max(size, before.get(name, 0)) for name, size in now.items()}


class RehearsedTrainer(MeasuredTrainer):
    """The Trainer of a run, telling its phases apart."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.meter.peaks.enter("forward")
        loss = super().training_step(*args, **kwargs)
        self.meter.peaks.enter("step")
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.meter.peaks.enter("backward")
        return loss
