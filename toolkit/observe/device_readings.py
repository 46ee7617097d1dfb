"""Memory and GPU readings of this rank: peaks for each step's row, and memory by phase of the first step.

Reading them never waits for the GPU. NVML is queried at most once per second: a row between two queries has no reading.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from toolkit.hardware.nvml import Nvml
from toolkit.record.heartbeat import peak_resident_bytes
from toolkit.record.measurements import MEMORY_PHASES

SECONDS_BETWEEN_NVML_QUERIES = 1.0
STATM = Path("/proc/self/statm")


class DeviceReadings:
    """Reads the memory columns of a step's row. On a CPU all but host memory are None."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.nvml = Nvml(str(torch.cuda.get_device_properties(device).uuid)) if self.cuda else None
        self.queried_at = -math.inf
        self.driver_bytes: int | None = None

    def read(self) -> dict[str, Any]:
        """Return the memory columns: peaks since the process began, in bytes."""
        gpu_reading = self._query_nvml()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.cuda else None,
            "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.cuda else None,
            "driver_bytes": self.driver_bytes,
            "gpu_reading": gpu_reading,
            "peak_host_bytes": peak_resident_bytes(),
        }

    def _query_nvml(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if self.nvml is None or now - self.queried_at < SECONDS_BETWEEN_NVML_QUERIES:
            return None
        self.queried_at = now
        self.driver_bytes = self.nvml.process_bytes(os.getpid())
        energy, throttles = self.nvml.energy_joules(), self.nvml.throttle_reasons()
        return {"monotonic_seconds": now, "energy_joules": energy, "throttle_reasons": throttles}


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
