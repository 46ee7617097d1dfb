"""The machine and the libraries of a run, as text that goes into run.json.

>>> sorted(library_versions())[0]
'accelerate'
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": _gpus(),
    }


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


def _gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and driver of each GPU, as nvidia-smi gives them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        rows = [line.split(", ") for line in _output(query).splitlines()]
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        {"name": name, "memory_bytes": int(mib) * MIB if mib.isdigit() else None, "driver": driver}
        for name, mib, driver in rows
    ]
