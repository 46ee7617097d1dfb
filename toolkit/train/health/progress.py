"""Where a rank is in its run: read by the heartbeat, by the failure report and by signal handling."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from toolkit.train.metrics.device_readings import PhaseMemoryRecorder


@dataclass(slots=True)
class Progress:
    """The current phase and step of this rank, and when each phase of the run began.

    One object per process, updated by the script and the Trainer, read by other threads.
    """

    phase: str = "start"
    """`start`, `arguments`, `data`, `load`, `engine`, `attest`, `train`, `forward`, `backward`, `step`,
    `evaluate`, `save`, `end`."""
    step: int = 0
    """Optimizer steps finished."""
    micro_steps: int = 0
    """Forward passes started in this process."""
    output_dir: Path | None = None
    """The run folder; None before it is open."""
    attempt_id: str | None = None
    """What the ranks of this attempt call it; None before the run folder is open."""
    datasets: tuple[str, ...] = ()
    """The files and hub ids of `--dataset`."""
    swap_folder: Path | None = None
    """This run's own folder on an NVMe disk, removed at the end of the run."""
    memory_by_phase: PhaseMemoryRecorder | None = None
    """Bytes after each phase of the first step; None before training begins."""
    phases: list[tuple[str, float]] = field(default_factory=lambda: [("start", psutil.Process().create_time())])
    """Each phase of the run and the Unix time when it began; `start` is the start of this process."""

    def enter(self, phase: str) -> None:
        """Begin a phase and record the time. Phases that repeat in every step only set `phase`."""
        self.phase = phase
        self.phases.append((phase, time.time()))
