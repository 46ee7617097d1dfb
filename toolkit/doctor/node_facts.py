"""Facts in which the nodes of a job must agree: a flat mapping, compared by `toolkit doctor --compare`."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.software_checks import NCCL_PACKAGES
from toolkit.hardware.disks import existing_folder, mount_of
from toolkit.hardware.node import describe_node, library_versions
from toolkit.presets import Preset, list_presets
from toolkit.versions import installed_version, torch_cuda_version

Fact = str | int | float | None
NodeFacts = dict[str, Fact]


def node_facts(node: NodeReadings) -> NodeFacts:
    """Return the facts of this node. The time is taken first."""
    now = time.time()
    query, here = node.gpu_query, describe_node()
    gpus = query.gpus if query else ()
    nccl = [f"{name} {version}" for name in NCCL_PACKAGES if (version := installed_version(name))]
    facts: NodeFacts = {
        "hostname": socket.gethostname(),
        "unix_time": round(now, 3),
        "clock_offset_seconds": clock_offset_seconds(existing_folder(node.output_dir)),
        "gpus": _counted(gpu.name for gpu in gpus),
        "vbios": _counted(gpu.vbios or "unknown" for gpu in gpus),
        "driver": query.driver if query else None,
        "driver_cuda": query.cuda if query else None,
        "torch_cuda": torch_cuda_version(),
        "nccl": ", ".join(nccl) or None,
        "rdma": _counted(f"{port.link_layer} {port.rate}" for port in node.rdma_ports),
        "python": here["python"],
        "kernel": platform.release(),
        "cpu": here["cpu"],
        "cores": here["cpu_count"],
        "host_memory_bytes": here["host_memory_bytes"],
        "preset_files": hash_presets(list_presets()),
    }
    facts |= {f"version {library}": version for library, version in library_versions().items()}
    if node.preset is not None:
        facts[f"preset {node.preset.name}"] = hash_presets([node.preset])
    return facts


def hash_presets(presets: Iterable[Preset]) -> str:
    """Return the first 16 digits of the SHA-256 of the presets' files."""
    digest = hashlib.sha256()
    for preset in presets:
        for name, text in preset.texts().items():
            digest.update(f"{name}\n{text}\n".encode())
    return digest.hexdigest()[:16]


def clock_offset_seconds(folder: Path) -> float | None:
    """Return how far this node's clock is ahead of the file server of a folder, which stamps new files with its own.

    All nodes that share the folder have the same server, so their offsets compare, whenever they were taken. None for
    a local disk and a folder that cannot be written.
    """
    try:
        mount = mount_of(folder)
        if mount is None or mount.kind != "network":
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-probe-") as probe:
            probe.write(b"\n")
            probe.flush()
            os.fsync(probe.fileno())
            return round(time.time() - os.stat(probe.name).st_mtime, 3)  # noqa: PTH116  (a file's name)
    except OSError:
        return None


def _counted(values: Iterable[str]) -> str | None:
    """`8 × NVIDIA H200`; None for nothing."""
    return ", ".join(f"{count} × {value}" for value, count in sorted(Counter(values).items())) or None
