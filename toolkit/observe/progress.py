"""Where a rank is in its run, and its memory by phase: read by the heartbeat, failure report and signal handling."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from toolkit.record.measurements import MemoryByPhase
from toolkit.record.timeline import add_moment

STEP_PHASES = ("train", "forward", "backward", "step")


@dataclass(slots=True)
class Progress:
    """The current phase and step of this rank, and when each phase of the run began.

    One object per process, updated by the script and the Trainer, read by other threads.
    """

    phase: str = "start"
    """`start`, `arguments`, `data`, `load`, `engine`, `attest`, `train`, `forward`, `backward`, `step`,
    `evaluate`, `save`, `end`."""
    step: int = 0  # optimizer steps finished
    micro_steps: int = 0  # forward passes started in this process
    output_dir: Path | None = None  # the run folder; None before it is open
    attempt_id: str | None = None  # what the ranks of this attempt call it; None before the run folder is open
    describe_rows: Callable[[tuple[int, ...]], dict[str, Any]] = lambda _: {}
    """Returns facts for failure.json about the rows, counted from 0, of a step that diverged."""
    swap_folder: Path | None = None  # this run's own folder on an NVMe disk, removed at the end of the run
    memory_by_phase: MemoryByPhase | None = None
    """Bytes after each phase of the first step; None before training begins."""
    timeline: Path | None = None
    """The file to which the run's phases are written; None before the run folder is open, and on other ranks than 0."""
    phases: list[tuple[str, float]] = field(default_factory=lambda: [("start", psutil.Process().create_time())])
    """Each phase of the run and the Unix time when it began; `start` is the start of this process."""

    def enter(self, phase: str) -> None:
        """Begin a phase and record the time. Phases that repeat in every step only set `phase`."""
        self.phase = phase
        self.phases.append((phase, time.time()))
        self.note(phase, unix=self.phases[-1][1])

    def note(self, phase: str, **facts: Any) -> None:
        """Write a line to the timeline; the phase stays what it is."""
        if self.timeline is not None:
            add_moment(self.timeline, phase, step=self.step, **facts)

    def open_timeline(self, timeline: Path) -> None:
        """Write the phases so far, and each later one when it begins."""
        self.timeline, restarted = timeline, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        for phase, unix in self.phases:
            self.note(phase, unix=unix, restarted=restarted and phase == "start")

    def record_memory(self, phase: str) -> None:
        """Record the bytes in use now, the first time a phase ends: in the first step, which is not timed."""
        if (memory := self.memory_by_phase) is not None and getattr(memory, phase) is None:
            import torch  # not above: that torch cannot be imported is reported too

            on_gpu = memory.bytes_of == "allocated"
            used = torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss
            self.memory_by_phase = memory.updated(**{phase: used})
