"""Recorded outputs of nvidia-smi, ibstat and dmesg (tests/fixtures/doctor), and an nvidia-smi that prints them.

They were written after the tools' documentation and published outputs; the first line of each file says so.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "fixtures" / "doctor"
NO_REAL_GPU = pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")


def recorded(name: str) -> str:
    """Return an output without the line that says where it comes from."""
    lines = (FOLDER / name).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))


def install_nvidia_smi(folder: Path, *, query: str = "nvidia_smi_healthy.xml", connections: bool = True) -> Path:
    """Write an nvidia-smi that prints recorded outputs, and return the folder to put on PATH."""
    outputs = {"-q -x": query}
    if connections:
        outputs |= {"topo -m": "topo_m.txt", "topo -p2p r": "topo_p2p.txt"}
        outputs |= {"nvlink -e": "nvlink_errors.txt", "nvlink --status": "nvlink_status.txt"}
    cases = [f'"{words}") grep -v "^#" {shlex.quote(str(FOLDER / name))};;' for words, name in outputs.items()]
    cases.append('"-L") printf "GPU 0: NVIDIA H100\\nGPU 1: NVIDIA H100\\n";;')
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\n*) exit 6;;\nesac\n")
    program.chmod(0o755)
    return folder
