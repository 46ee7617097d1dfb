"""GPUs of this node, counted and described without torch, whose import takes seconds.

>>> visible_gpus(["0", "1", "2"], cuda_visible_devices="2,0")
2
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.system_text import entries_of, output_of
from toolkit.units import MIB

# Column of nvidia-smi -> key in run.json.
GPU_FIGURES = {
    "power.limit": "power_limit_watts",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.memory": "max_memory_clock_mhz",
}

ON_CPU_MESSAGE = "no GPU is visible: training on the CPU (gloo, fp32)"
# Enough for every preset's communication to take place.
CPU_PROCESSES = 2


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
        raise ToolkitError(
            "--num-processes is missing, and no GPU is visible on this node",
            hint="the number of GPUs of the job, for example `--num-processes 8`",
        )
    return visible


def visible_gpus(installed: list[str], *, cuda_visible_devices: str | None) -> int:
    """Return the number of GPUs that are visible: CUDA stops at the first entry that names no installed GPU."""
    if cuda_visible_devices is None:
        return len(installed)
    count = 0
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or entry in installed):
            break
        count += 1
    return min(count, len(installed))


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
    rows = (output_of("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits") or "").splitlines()
    fields = [row.split(", ") for row in rows]
    return [read_gpu_row(row) for row in fields if len(row) == len(GPU_FIGURES) + 3]  # not `No devices were found`


def read_gpu_row(fields: list[str]) -> dict[str, Any]:
    """Return one row of nvidia-smi's output as values; None for those it does not know.

    >>> read_gpu_row(["Tesla T4", "15360", "570.86.15", "[N/A]", "1590", "5001"])["max_sm_clock_mhz"]
    1590
    """
    name, mib, driver, *figures = fields
    facts: dict[str, Any] = {"name": name, "memory_bytes": int(mib) * MIB if mib.isdigit() else None, "driver": driver}
    for key, text in zip(GPU_FIGURES.values(), figures, strict=False):
        facts[key] = None if not text.replace(".", "", 1).isdigit() else float(text) if "." in text else int(text)
    return facts


def gpu_topology() -> str | None:
    """Return how the GPUs are connected: nvidia-smi's own table without colours; None without nvidia-smi."""
    table = output_of("nvidia-smi", "topo", "-m")
    return None if table is None else re.sub(r"\x1b\[[0-9;]*m", "", table)
