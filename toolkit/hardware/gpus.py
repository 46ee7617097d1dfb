"""GPUs of this machine, counted without torch (importing it takes seconds).

>>> visible_gpus(["0", "1", "2"], cuda_visible_devices="2,0")
2
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def visible_gpus(installed: list[str], *, cuda_visible_devices: str | None) -> int:
    """GPUs that a process may use: CUDA stops at the first entry that names no installed GPU."""
    if cuda_visible_devices is None:
        return len(installed)
    count = 0
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or entry in installed):
            break
        count += 1
    return min(count, len(installed))


def installed_gpus() -> list[str]:
    """Indices of the NVIDIA GPUs that the driver lists; none without a driver."""
    listed = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia/gpus").is_dir() else []
    return [str(index) for index in range(len(listed) or _nvidia_smi_count())]


def count_gpus() -> int:
    """GPUs that this process may use, `CUDA_VISIBLE_DEVICES` respected."""
    return visible_gpus(installed_gpus(), cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))


def _nvidia_smi_count() -> int:
    """In a container /proc may be hidden while nvidia-smi answers."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
