"""The memory ladder: bytes after loading, the first forward, the first backward and the first step.

    >>> ladder = Ladder(on_gpu=False)
    >>> ladder.climb("load")
    >>> ladder.facts()["bytes_of"]
    'rss'

Read once each, in the first step, which is not timed; nothing waits for the GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from toolkit.runs.ladder import RUNGS

STATM = Path("/proc/self/statm")


class Ladder:
    """Bytes at each rung of this process; a rung that was not reached is missing."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.rungs: dict[str, int] = {}

    def climb(self, rung: str) -> None:
        """Write down what is held now, the first time that a rung is reached."""
        if rung not in self.rungs:
            self.rungs[rung] = torch.cuda.memory_allocated() if self.on_gpu else resident_bytes()

    def facts(self) -> dict[str, Any]:
        """What is counted, and the rungs in the order of `RUNGS`."""
        return {"bytes_of": "allocated" if self.on_gpu else "rss", **{rung: self.rungs.get(rung) for rung in RUNGS}}


def resident_bytes() -> int:
    """Resident memory of this process now (the second number of statm, in pages)."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
