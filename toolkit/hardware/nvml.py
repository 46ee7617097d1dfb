"""Readings of one GPU from NVIDIA's management library (NVML); None where a reading is not available.

>>> throttle_names(0x4 | 0x40)
['software power cap', 'hardware thermal slowdown']

`nvidia-ml-py` is optional (extra `[gpu]`); containers may hide processes, and cloud nodes their counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# nvmlClocksEventReasons (https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). Reasons
# that slow no work down are left out: idle, clocks set by the user, synchronised boost, display.
THROTTLES = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def throttle_names(mask: int) -> list[str]:
    """Return the names of the reasons in a bit mask that slow work down."""
    return [name for bit, name in THROTTLES.items() if mask & bit]


class Nvml:
    """One GPU by its UUID, as `torch.cuda.get_device_properties(device).uuid` gives it."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.library: Any = None
        self.handle: Any = None

    def process_bytes(self, pid: int) -> int | None:
        """Return the GPU memory of one process, its CUDA context and libraries included."""
        processes = self._query(lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or []
        return next((process.usedGpuMemory for process in processes if process.pid == pid), None)

    def energy_joules(self) -> float | None:
        """Return the energy that the GPU has used since its driver was loaded; Volta and later."""
        millijoules = self._query(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
        return None if millijoules is None else millijoules / 1000

    def throttle_reasons(self) -> list[str] | None:
        """Return the reasons for which the GPU's clocks are reduced now; empty if they are not."""
        mask = self._query(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        return None if mask is None else throttle_names(mask)

    def _query(self, query: Callable[[Any, Any], Any]) -> Any:
        try:
            if self.handle is None:
                import pynvml

                pynvml.nvmlInit()
                self.library, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")
            return query(self.library, self.handle)
        except Exception:  # NVML is optional, and each of its answers may be "not supported"
            return None
