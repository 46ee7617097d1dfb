"""Readings of GPUs from NVIDIA's management library (NVML), through `nvidia-ml-py` (extra `[gpu]`).

>>> throttle_names(0x4 | 0x40)
['software power cap', 'hardware thermal slowdown']

A reading is None where the package, the driver or the GPU does not have it: containers may hide processes, and cloud
nodes their counters.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.versions import INSTALL_GPU_PACKAGES

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


def load_nvml() -> Any:
    """Return the module `pynvml`, initialised. Raises ToolkitError without the package or a driver that answers."""
    try:
        import pynvml
    except ImportError:
        raise ToolkitError("nvidia-ml-py is not installed", hint=INSTALL_GPU_PACKAGES) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ToolkitError(f"NVML: {error}", hint="`dmesg | grep -i nvrm` shows why the driver fails") from None
    return pynvml


def list_gpus() -> list[Nvml]:
    """Return the GPUs that the driver lists to this process, in its order. Raises ToolkitError as `load_nvml` does."""
    return [Nvml(index=index) for index in range(load_nvml().nvmlDeviceGetCount())]


class Nvml:
    """One GPU, by its UUID as `torch.cuda.get_device_properties(device).uuid` gives it, or by the driver's index."""

    def __init__(self, uuid: str | None = None, *, index: int = 0) -> None:
        self.index = index
        self.library: Any = None
        self.handle: Any = None
        with contextlib.suppress(Exception):  # NVML is optional: without it, every reading is None
            self.library = load_nvml()
            open_gpu = self.library.nvmlDeviceGetHandleByIndex
            self.handle = open_gpu(index) if uuid is None else self.library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self, function: str, *arguments: Any) -> Any:
        """Return what an NVML function says of this GPU; None where it is not supported."""
        with contextlib.suppress(Exception):  # also a function that an older package or driver does not have
            return getattr(self.library, function)(self.handle, *arguments)
        return None

    @property
    def label(self) -> str:
        """`GPU 3 (0000:9D:00.0)`."""
        pci = self.read("nvmlDeviceGetPciInfo")
        return f"GPU {self.index}" + (f" ({pci.busId.removeprefix('0000')})" if pci else "")

    def process_bytes(self, pid: int) -> int | None:
        """Return the GPU memory of one process, its CUDA context and libraries included."""
        processes = self.read("nvmlDeviceGetComputeRunningProcesses") or []
        return next((process.usedGpuMemory for process in processes if process.pid == pid), None)

    def energy_joules(self) -> float | None:
        """Return the energy that the GPU has used since its driver was loaded; Volta and later."""
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def throttle_reasons(self) -> list[str] | None:
        """Return the reasons for which the GPU's clocks are reduced now; empty if they are not."""
        mask = self.read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if mask is None else throttle_names(mask)

    def recovery_action(self) -> int | None:
        """Return NVML's number of the action that the driver asks for; 0 for none. Drivers since 570."""
        fields = self.read(
            "nvmlDeviceGetFieldValues", [getattr(self.library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 0)]
        )
        return fields[0].value.uiVal if fields and fields[0].nvmlReturn == 0 else None

    def fabric(self) -> tuple[int, int] | None:
        """Return state and status of the NVSwitch fabric: state 0 is not supported, 3 is completed; status 0 is OK."""
        with contextlib.suppress(Exception):
            info = self.library.c_nvmlGpuFabricInfo_v2_t()
            self.library.nvmlDeviceGetGpuFabricInfoV(self.handle, ctypes.byref(info))
            return info.state, info.status
        return None
