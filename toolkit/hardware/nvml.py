"""What NVIDIA's management library counts for one GPU. Every answer is None where it cannot be asked.

>>> throttle_names(0x4 | 0x40)
['software power cap', 'hardware thermal slowdown']

`nvidia-ml-py` is optional (extra `[gpu]`); a container may hide processes, and a rented machine its counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# nvmlClocksEventReasons (https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). Left out are
# those that slow no work down: idle, clocks set by the user, synchronised boost, display.
THROTTLES = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def throttle_names(mask: int) -> list[str]:
    """The reasons of a bit mask that slow work down."""
    return [name for bit, name in THROTTLES.items() if mask & bit]


class Nvml:
    """One GPU by its UUID, as `torch.cuda.get_device_properties(device).uuid` gives it."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.library: Any = None
        self.handle: Any = None

    def process_bytes(self, pid: int) -> int | None:
        """Memory of one process, its context and libraries included."""
        processes = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or []
        return next((process.usedGpuMemory for process in processes if process.pid == pid), None)

    def energy_joules(self) -> float | None:
        """Energy of the whole GPU since its driver was loaded; Volta and later."""
        millijoules = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
        return None if millijoules is None else millijoules / 1000

    def throttle_reasons(self) -> list[str] | None:
        """Why the GPU's clocks are held down at this moment; empty where they are not."""
        mask = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        return None if mask is None else throttle_names(mask)

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        try:
            if self.handle is None:
                import pynvml

                pynvml.nvmlInit()
                self.library, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")
            return question(self.library, self.handle)
        except Exception:  # NVML is optional, and each of its answers may be "not supported"
            return None
