"""GPUs of this node, without torch, whose import takes seconds: by nvidia-smi, and by NVIDIA's management library.

>>> visible_gpus(["0", "1", "2"], cuda_visible_devices="2,0")
2
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.system_text import entries_of, output_of
from toolkit.installation import install_line
from toolkit.units import MIB

# Column of nvidia-smi -> key in run.json.
GPU_FIGURES = {
    "power.limit": "power_limit_watts",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.memory": "max_memory_clock_mhz",
}

# nvmlClocksEventReasons (https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). Reasons
# that slow no work down are left out: idle, clocks set by the user, synchronised boost, display.
THROTTLES = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}

ON_CPU_MESSAGE = "no GPU is visible: training on the CPU"
CPU_PROCESSES = 2  # enough for every preset's communication to take place


def count_gpus() -> int:
    """Return the number of GPUs that this process may use; respects `CUDA_VISIBLE_DEVICES`."""
    return visible_gpus(installed_gpus(), cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))


def trains_on_cpu(choice: bool | None) -> bool:
    """Return the user's `--cpu/--no-cpu`, or by default whether no GPU is visible."""
    return count_gpus() == 0 if choice is None else choice


def default_num_processes(*, on_cpu: bool) -> int:
    """Return the processes of a run for which no number is given: one per visible GPU, or two on a CPU."""
    return CPU_PROCESSES if on_cpu else max(1, count_gpus())


def visible_world_size() -> int:
    """Return the number of visible GPUs, the default of `--num-processes`. Raises ToolkitError where there are none."""
    visible = count_gpus()
    if visible == 0:
        what = "--num-processes is missing, and no GPU is visible on this node"
        raise ToolkitError(what, hint="the number of GPUs of the job, for example `--num-processes 8`")
    return visible


def visible_gpus(installed: list[str], *, cuda_visible_devices: str | None) -> int:
    """Return the number of GPUs that are visible: CUDA stops at the first entry that names no installed GPU."""
    if cuda_visible_devices is None:
        return len(installed)
    entries = map(str.strip, cuda_visible_devices.split(","))
    known = itertools.takewhile(lambda entry: entry.startswith(("GPU-", "MIG-")) or entry in installed, entries)
    return min(len(list(known)), len(installed))


def installed_gpus() -> list[str]:
    """Return the indices of the NVIDIA GPUs that the driver lists; empty without a driver."""
    count = len(entries_of(Path("/proc/driver/nvidia/gpus")))
    if count == 0:  # in a container, /proc may be hidden while nvidia-smi works
        count = sum(line.startswith("GPU ") for line in (output_of("nvidia-smi", "-L") or "").splitlines())
    return [str(index) for index in range(count)]


def gpu_names() -> list[str]:
    """Return the name of each GPU as nvidia-smi prints it; empty without nvidia-smi."""
    return [str(gpu["name"]) for gpu in describe_gpus()]


def describe_gpus() -> list[dict[str, Any]]:
    """Return name, memory in bytes, driver, power limit and highest clocks of each GPU, as nvidia-smi reports them."""
    columns = ",".join(("name", "memory.total", "driver_version", *GPU_FIGURES))
    text = output_of("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits") or ""
    rows = [row.split(", ") for row in text.splitlines()]
    return [read_gpu_row(row) for row in rows if len(row) == len(GPU_FIGURES) + 3]  # not `No devices were found`


def read_gpu_row(fields: list[str]) -> dict[str, Any]:
    """Return one row of nvidia-smi's output as values; None for those it does not know."""
    name, mib, driver, *figures = fields
    facts: dict[str, Any] = {"name": name, "memory_bytes": int(mib) * MIB if mib.isdigit() else None, "driver": driver}
    for key, text in zip(GPU_FIGURES.values(), figures, strict=False):
        facts[key] = None if not text.replace(".", "", 1).isdigit() else float(text) if "." in text else int(text)
    return facts


def gpu_topology() -> str | None:
    """Return how the GPUs are connected: nvidia-smi's own table without colours; None without nvidia-smi."""
    table = output_of("nvidia-smi", "topo", "-m")
    return None if table is None else re.sub(r"\x1b\[[0-9;]*m", "", table)


# -- NVML, through `nvidia-ml-py` (extra `[gpu]`)


def load_nvml() -> Any:
    """Return the module `pynvml`, initialised. Raises ToolkitError without the package or a driver that answers."""
    try:
        import pynvml
    except ImportError:
        raise ToolkitError("nvidia-ml-py is not installed", hint=install_line("pynvml")) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ToolkitError(f"NVML: {error}", hint="`dmesg | grep -i nvrm` shows why the driver fails") from None
    return pynvml


def list_gpus() -> list[Nvml]:
    """Return the GPUs that the driver lists to this process, in its order. Raises ToolkitError as `load_nvml` does."""
    return [Nvml(index=index) for index in range(load_nvml().nvmlDeviceGetCount())]


class Nvml:
    """Readings of one GPU, by torch's UUID or the driver's index; None for what it does not have."""

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
        return None if mask is None else [name for bit, name in THROTTLES.items() if mask & bit]

    def recovery_action(self) -> int | None:
        """Return NVML's number of the action that the driver asks for; 0 for none. Drivers since 570."""
        field = getattr(self.library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 0)
        fields = self.read("nvmlDeviceGetFieldValues", [field])
        return fields[0].value.uiVal if fields and fields[0].nvmlReturn == 0 else None

    def fabric(self) -> tuple[int, int] | None:
        """Return state and status of the NVSwitch fabric: state 0 is not supported, 3 is completed; status 0 is OK."""
        with contextlib.suppress(Exception):
            info = self.library.c_nvmlGpuFabricInfo_v2_t()
            self.library.nvmlDeviceGetGpuFabricInfoV(self.handle, ctypes.byref(info))
            return info.state, info.status
        return None
