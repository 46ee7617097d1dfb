"""Facts of this node from files and programs, for the issue report and for the doctor: compilers, hub, disks, network.

Whatever cannot be read is None: a node without a program is not an error here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cache import ASYNC_IO_OPS, are_compiled, cache_folder, home_folder
from toolkit.doctor.node_packages import find_nvcc
from toolkit.doctor.ops import CPU_OPS
from toolkit.files.reading import user_path
from toolkit.files.secrets import hide_secrets
from toolkit.hardware.disks import existing_folder
from toolkit.hardware.node import disk_facts
from toolkit.hardware.system_text import entries_of, output_of, text_of
from toolkit.versions import installed_version

SHARED_MEMORY = Path("/dev/shm")
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaPort:
    """One port of InfiniBand, RoCE or EFA in the kernel's files; None where they do not say."""

    name: str
    """`mlx5_0 port 1`."""
    state: str | None
    """`ACTIVE`, `INIT`, `DOWN`."""
    rate: str | None
    """`400 Gb/sec (4X NDR)`."""
    link_layer: str | None

    @property
    def gigabits_per_second(self) -> float:
        """The rate as a number; 0 if it is not known."""
        found = re.match(r"[\d.]+", self.rate or "")
        return float(found[0]) if found else 0.0


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[RdmaPort]:
    """Return the RDMA ports that the kernel lists."""
    return [
        RdmaPort(
            name=f"{device.name} port {port.name}",
            state=(text_of(port / "state") or "").rpartition(": ")[2] or None,  # of `4: ACTIVE`
            rate=text_of(port / "rate"),
            link_layer=text_of(port / "link_layer"),
        )
        for device in entries_of(root)
        for port in entries_of(device / "ports")
    ]


def driver_cuda_version() -> str | None:
    """Return the newest CUDA that the driver supports."""
    found = re.search(r"CUDA Version\s*:\s*([\d.]+)", output_of("nvidia-smi", "--version") or "")
    return found[1] if found else None


def compiler_versions(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the version line of nvcc, of the C++ and C compilers that torch would call, and of ninja."""
    programs = dict.fromkeys([environment.get("CXX") or "c++", environment.get("CC") or "gcc", "ninja"])
    return {"nvcc": _version_of(find_nvcc()), **{name: _version_of(name) for name in programs}}


def _version_of(program: str | Path | None) -> str | None:
    """The line of `--version` that names a version; nvcc prints it last but one."""
    lines = (output_of(str(program), "--version") or "").strip().splitlines() if program else []
    return next((line for line in lines if re.search(r"\d+\.\d+", line)), None)


def compiled_ops() -> dict[str, bool]:
    """Return whether each of DeepSpeed's CPU ops is compiled; empty without torch or DeepSpeed."""
    if installed_version("torch") is None or installed_version("deepspeed") is None:
        return {}
    return {op: are_compiled([op]) for op in (*CPU_OPS, *ASYNC_IO_OPS)}


def filesystem_bytes(folder: Path) -> int | None:
    """Return the size of the file system of a folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return None


def described_disks(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return path, file system, size and free space of the disk of each named folder, which may not exist yet."""
    return {name: {"path": str(path), **disk_facts(existing_folder(path))} for name, path in folders.items()}


def usual_folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """Return the hub's cache, the toolkit's cache, and the folder for temporary files."""
    temporary = Path(environment.get("TMPDIR") or "/tmp")
    return {"hub cache": hub_home(environment), "toolkit cache": cache_folder(), "temporary files": temporary}


def hub_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the Hugging Face hub: its cache and its token."""
    cache = environment.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return user_path(environment.get("HF_HOME") or Path(cache) / "huggingface")


def token_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the hub's token, which may not exist."""
    return Path(environment.get("HF_TOKEN_PATH") or hub_home(environment) / "token")


def hub_login(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return where the hub's token comes from; None without one. The token itself is not read."""
    if environment.get("HF_TOKEN"):
        return "HF_TOKEN"
    return "token file" if token_file(environment).is_file() else None


def without_secrets(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return facts with every secret of the environment, and whatever looks like one, replaced in all texts."""
    stored = text_of(token_file(environment))
    return hide_secrets(value, known=[stored] if stored else [], environment=environment)
