"""Where a rank is in its run, and its memory by phase: read by the heartbeat, failure report and signal handling."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit.record.measurements import MEMORY_PHASES
from toolkit.record.timeline import add_moment

STEP_PHASES = ("train", "forward", "backward", "step")
STATM = Path("/proc/self/statm")


class PhaseMemoryRecorder:
    """Bytes in use after loading, the first forward, the first backward and the first optimizer step.

    Recorded once each in the first step, which is not timed: allocated bytes on a GPU, resident bytes on a CPU.

    >>> memory = PhaseMemoryRecorder(on_gpu=False)
    >>> memory.record("load")
    >>> memory.facts()["bytes_of"], memory.facts()["forward"]
    ('rss', None)
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.bytes: dict[str, int] = {}

    def record(self, phase: str) -> None:
        """Record the bytes in use now, the first time a phase ends."""
        if phase not in self.bytes:
            self.bytes[phase] = torch.cuda.memory_allocated() if self.on_gpu else resident_bytes()

    def facts(self) -> dict[str, Any]:
        """Return `bytes_of` (`allocated` or `rss`) and the bytes of each phase; None for one not reached."""
        phases = {phase: self.bytes.get(phase) for phase in MEMORY_PHASES}
        return {"bytes_of": "allocated" if self.on_gpu else "rss", **phases}


def resident_bytes() -> int:
    """Return this process's resident memory (the second number of /proc/self/statm, in pages)."""
    return int(STATM.read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    describe_rows: Callable[[tuple[int, ...]], dict[str, Any]] = lambda _: {}
    """Returns facts for failure.json about the rows, counted from 0, of a step that diverged."""
    swap_folder: Path | None = None
    """This run's own folder on an NVMe disk, removed at the end of the run."""
    memory_by_phase: PhaseMemoryRecorder | None = None
    """Bytes after each phase of the first step; None before training begins."""
    timeline: Path | None = None
    """Returns the file to which the run's phases are written; None before the run folder is open, and on other ranks
    than 0."""
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

    def open_timeline(self, timeline: Path, *, restarted: bool) -> None:
        """Write the phases so far, and each later one when it begins."""
        self.timeline = timeline
        for phase, unix in self.phases:
            self.note(phase, unix=unix, restarted=restarted and phase == "start")
