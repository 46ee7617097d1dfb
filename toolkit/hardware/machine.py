"""The machine and the libraries of a run, as text that goes into run.json.

>>> sorted(library_versions())[0]
'accelerate'
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.hardware.disks import mount_of
from toolkit.units import MIB

LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "peft", "datasets", "finetune-toolkit")


def library_versions() -> dict[str, str | None]:
    """Version of each library that a run depends on; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = None
    return versions


def describe_machine() -> dict[str, Any]:
    """Processor, cores that may be used, host memory in bytes, operating system, GPUs as the driver names them."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory_bytes": host_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": _gpus(),
    }


def host_memory_bytes() -> int:
    """Memory of this machine, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with `+changes` when the tree differs from it; None outside git."""
    try:
        head = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
        changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def gpu_links() -> str | None:
    """How the GPUs are connected: nvidia-smi's own table, without its colours; None without nvidia-smi."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return re.sub(r"\x1b\[[0-9;]*m", "", _output(["nvidia-smi", "topo", "-m"]))
    return None


def disk_facts(folder: Path) -> dict[str, Any]:
    """File system, size and room of the disk under a folder that is there."""
    usage, mount = shutil.disk_usage(folder), None
    with contextlib.suppress(OSError):
        mount = mount_of(folder)
    filesystem = None if mount is None else mount.filesystem
    return {"filesystem": filesystem, "total_bytes": usage.total, "free_bytes": usage.free}


# nvidia-smi's name of each figure, and ours.
GPU_FIGURES = {
    "power.limit": "power_limit_watts",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.memory": "max_memory_clock_mhz",
}


def _gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes, driver, power limit and highest clocks of each GPU, as nvidia-smi gives them."""
    wanted = ",".join(("name", "memory.total", "driver_version", *GPU_FIGURES))
    try:
        rows = _output(["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader,nounits"]).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu_facts(row.split(", ")) for row in rows]


def gpu_names() -> list[str]:
    """Of each GPU, as nvidia-smi prints it."""
    return [str(gpu["name"]) for gpu in _gpus()]


def gpu_facts(fields: list[str]) -> dict[str, Any]:
    """One line of nvidia-smi's answer; what it does not know is None."""
    name, mib, driver, *figures = fields
    facts: dict[str, Any] = {
        "name": name,
        "memory_bytes": int(mib) * MIB if mib.isdigit() else None,
        "driver": driver,
    }
    for key, text in zip(GPU_FIGURES.values(), figures, strict=False):
        facts[key] = None if not text.replace(".", "", 1).isdigit() else float(text) if "." in text else int(text)
    return facts
