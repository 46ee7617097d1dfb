"""Memory and GPU readings that go into a step's row, outside the step's clock as far as they cost anything.

NVML is asked at most once a second: a row between two readings has none.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch

from toolkit.hardware.nvml import Nvml
from toolkit.runs.pulses import peak_resident_bytes

SECONDS_BETWEEN_READINGS = 1.0


class Sensors:
    """Peaks so far and, once a second, what the driver counts; all but the host's memory is None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.nvml = Nvml(str(torch.cuda.get_device_properties(device).uuid)) if self.cuda else None
        self.asked_at = -math.inf
        self.driver_bytes: int | None = None

    def read(self) -> dict[str, Any]:
        """The memory keys of a row."""
        reading = self._reading()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.cuda else None,
            "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.cuda else None,
            "driver_bytes": self.driver_bytes,
            "gpu_reading": reading,
            "peak_host_bytes": peak_resident_bytes(),
        }

    def _reading(self) -> dict[str, Any] | None:
        """Energy counter and throttling, with the time of asking; None between two readings."""
        now = time.monotonic()
        if self.nvml is None or now - self.asked_at < SECONDS_BETWEEN_READINGS:
            return None
        self.asked_at = now
        self.driver_bytes = self.nvml.process_bytes(os.getpid())
        energy, throttles = self.nvml.energy_joules(), self.nvml.throttle_reasons()
        return {"monotonic_seconds": now, "energy_joules": energy, "throttle_reasons": throttles}
