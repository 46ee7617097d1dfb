"""Checks of the host: shared memory, limits of the process, cores, NUMA nodes, memory, the clock."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeFinding, Outcome, node_check
from toolkit.doctor.collectors import filesystem_bytes, text_of
from toolkit.doctor.environment_report import SHARED_MEMORY
from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.hardware.cgroups import count_oom_kills, cpu_limit, memory_limit_bytes, tasks_limit
from toolkit.hardware.node import host_memory_bytes
from toolkit.hardware.process_limits import locked_memory_limit_bytes, open_files_limit, processes_limit
from toolkit.launch.nvme import LOCKED_BYTES_AT_LEAST
from toolkit.units import GIB, gib

NCCL_CONTAINERS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#docker"
NUMA_NODES = Path("/sys/devices/system/node")
# `docker run --shm-size=1g --ulimit memlock=-1` (NCCL_CONTAINERS).
SHARED_MEMORY_AT_LEAST = GIB
# A rank opens a socket to each peer, and files of its shards and of each data loader worker; 1,024 is a usual default.
OPEN_FILES_AT_LEAST = 4096
# Threads count as well: a rank has dozens of them, and so has each data loader worker.
TASKS_PER_RANK = 512
CORES_PER_RANK = 2
STA_UNSYNC = 0x0040  # linux/timex.h


@node_check(
    "shared-memory",
    looks_at="size of /dev/shm, through which NCCL, gloo and data loader workers exchange data",
    threshold="below 1 GiB (a container has 64 MiB by default)",
    source=NCCL_CONTAINERS,
)
def shared_memory(_: NodeReadings) -> Outcome:
    """Find a /dev/shm that is too small."""
    size = filesystem_bytes(SHARED_MEMORY)
    measured = {"bytes": size, "writable": os.access(SHARED_MEMORY, os.W_OK)}
    if size is not None and size >= SHARED_MEMORY_AT_LEAST and measured["writable"]:
        return Outcome(measured=measured)
    found = NodeFinding(
        level=ERROR,
        what="/dev/shm is missing, too small, or cannot be written",
        value=gib(size),
        expected=f"at least {gib(SHARED_MEMORY_AT_LEAST)}",
        fix="docker run --ipc=host (or --shm-size=16g); Kubernetes: an emptyDir with `medium: Memory` at /dev/shm",
    )
    return Outcome(measured=measured, findings=(found,))


@node_check(
    "ulimit-memlock",
    looks_at="memory that a process may lock: RDMA and offload buffers",
    threshold="below 1 GiB, on a node with a GPU or an RDMA port, or for a preset that offloads",
    source=NCCL_CONTAINERS,
)
def ulimit_memlock(node: NodeReadings) -> Outcome:
    """Find a limit that RDMA or offload would hit."""
    limit = locked_memory_limit_bytes()
    measured = {"bytes": limit}
    preset = node.preset
    needed = bool(node.has_gpu or node.rdma_ports or (preset and preset.offload_optimizer))
    if limit is None or limit >= LOCKED_BYTES_AT_LEAST or not needed:
        return Outcome(measured=measured)
    found = NodeFinding(
        level=ERROR if node.rdma_ports else WARNING,
        what="little memory may be locked",
        value=gib(limit),
        expected="unlimited",
        fix="ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: LimitMEMLOCK=infinity of slurmd",
    )
    return Outcome(measured=measured, findings=(found,))


@node_check(
    "ulimit-nofile",
    looks_at="files and sockets that a process may have open",
    threshold="below 4,096",
    source=f"{OWN_CHOICE}: a rank opens a socket to each peer, and files of shards and data loader workers",
)
def ulimit_nofile(_: NodeReadings) -> Outcome:
    """Find a limit that ends in `Too many open files`."""
    limit = open_files_limit()
    if limit is None or limit >= OPEN_FILES_AT_LEAST:
        return Outcome(measured={"files": limit})
    found = NodeFinding(
        level=WARNING,
        what="few files may be open",
        value=str(limit),
        expected=f"at least {OPEN_FILES_AT_LEAST}",
        fix="ulimit -n 65536",
    )
    return Outcome(measured={"files": limit}, findings=(found,))


@node_check(
    "ulimit-nproc",
    looks_at="processes and threads: the user's limit and the cgroup's",
    threshold=f"below {TASKS_PER_RANK} per rank",
    source=f"{OWN_CHOICE}: a rank and each of its data loader workers has dozens of threads",
)
def ulimit_nproc(node: NodeReadings) -> Outcome:
    """Find a limit that ends in `Resource temporarily unavailable`."""
    limits = {"user": processes_limit(), "cgroup": tasks_limit()}
    known = [limit for limit in limits.values() if limit is not None]
    needed = TASKS_PER_RANK * node.processes
    if not known or min(known) >= needed:
        return Outcome(measured=dict(limits))
    found = NodeFinding(
        level=WARNING,
        what="few processes and threads may exist",
        value=str(min(known)),
        expected=f"at least {needed}, for {node.processes} ranks",
        fix="ulimit -u unlimited; docker run --pids-limit -1; Kubernetes: podPidsLimit of the kubelet",
    )
    return Outcome(measured=dict(limits), findings=(found,))


@node_check(
    "cores",
    looks_at="cores that this process may use: affinity and the cgroup's quota",
    threshold=f"below {CORES_PER_RANK} per rank",
    source=f"{OWN_CHOICE}: one for Python and one for the data loader, and CPU Adam uses all of them",
)
def cores(node: NodeReadings) -> Outcome:
    """Find an allocation with too few cores for its ranks."""
    usable, quota = len(os.sched_getaffinity(0)), cpu_limit()
    measured = {"installed": os.cpu_count(), "usable": usable, "quota": quota, "ranks": node.processes}
    available = min(usable, quota or usable)
    if available >= CORES_PER_RANK * node.processes or not node.has_gpu:
        return Outcome(measured=measured)
    found = NodeFinding(
        level=WARNING,
        what="few cores for the ranks",
        value=f"{available:g}",
        expected=f"at least {CORES_PER_RANK * node.processes}, for {node.processes} ranks",
        fix="SLURM: --cpus-per-task; docker run --cpus; Kubernetes: resources.limits.cpu",
    )
    return Outcome(measured=measured, findings=(found,))


@node_check(
    "numa",
    looks_at="NUMA nodes, the cores of this process on them, the GPUs at them, automatic balancing",
    threshold="a GPU's NUMA node without a usable core; automatic balancing on with several nodes: a note",
    source="https://docs.kernel.org/admin-guide/sysctl/kernel.html#numa-balancing; nodes of GPUs: nvidia-smi topo -m",
)
def numa(node: NodeReadings) -> Outcome:
    """Find a binding that keeps ranks away from the memory next to their GPUs."""
    usable = os.sched_getaffinity(0)
    nodes = {int(path.name[4:]): cpus_of(text_of(path / "cpulist") or "") for path in NUMA_NODES.glob("node[0-9]*")}
    balancing = text_of(Path("/proc/sys/kernel/numa_balancing")) == "1" and len(nodes) > 1
    at_gpus = node.topology.numa_nodes if node.gpu_query else {}
    counts = {str(name): len(cpus) for name, cpus in sorted(nodes.items())}
    measured, found = {"nodes": counts, "balancing": balancing, "gpus": dict(at_gpus)}, []
    far = sorted(gpu for gpu, name in at_gpus.items() if name in nodes and not nodes[name] & usable)
    if far:
        found.append(
            NodeFinding(
                level=WARNING,
                what="no usable core is on the NUMA node of these GPUs",
                value=", ".join(far),
                expected="cores of every NUMA node that has a GPU",
                fix="SLURM: --exclusive or --gpus-per-task with --cpu-bind=cores; docker run without --cpuset-cpus",
            )
        )
    if balancing:
        found.append(
            NodeFinding(
                level=NOTE,
                what="automatic NUMA balancing moves pages while ranks run",
                value="on",
                expected="off, with ranks bound to nodes",
                fix="sysctl kernel.numa_balancing=0",
            )
        )
    return Outcome(measured=measured, findings=tuple(found))


def cpus_of(cpulist: str) -> set[int]:
    """Return the cores of the kernel's list.

    >>> sorted(cpus_of("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in cpulist.split(",") if part.strip()]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


@node_check(
    "host-memory",
    looks_at="memory of the host, the cgroup's limit, swap, and with `--preset` and MODEL what their plan needs",
    threshold="less than the plan needs: an error; less available now: a warning; processes killed for memory: a note",
    source="`toolkit plan` (docs/concepts/plan.md), with the default batch",
)
def host_memory(node: NodeReadings) -> Outcome:
    """Compare host memory with the needs of a preset."""
    memory, limit = psutil.virtual_memory(), memory_limit_bytes()
    usable = min(host_memory_bytes(), limit or host_memory_bytes())
    needed = node.planned_host_bytes
    kills = count_oom_kills()
    measured = {
        "installed_bytes": host_memory_bytes(),
        "available_bytes": memory.available,
        "limit_bytes": limit,
        "swap_bytes": psutil.swap_memory().total,
        "needed_bytes": needed,
        "oom_kills": kills,
    }
    found = [*_too_little(node, needed, usable=usable, available=memory.available)] if needed else []
    if kills:
        found.append(
            NodeFinding(
                level=NOTE,
                what="the kernel has killed processes for lack of memory",
                value=str(kills),
                expected="0",
                fix="dmesg | grep -i 'killed process'",
            )
        )
    return Outcome(measured=measured, findings=tuple(found))


def _too_little(node: NodeReadings, needed: int, *, usable: int, available: int) -> list[NodeFinding]:
    if needed <= available and needed <= usable:
        return []
    assert node.preset is not None
    never = needed > usable
    return [
        NodeFinding(
            level=ERROR if never else WARNING,
            what=f"`{node.preset.name}` in {node.processes} processes needs more host memory"
            + ("" if never else " than is available now"),
            value=gib(usable if never else available),
            expected=gib(needed),
            fix="a preset without offload, more nodes, or `--lora_r 16`: `toolkit recommend` shows what fits"
            if never
            else "end other processes: `ps aux --sort -rss | head`",
        )
    ]


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` of <sys/timex.h>, and room for its rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "frequency", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


@node_check(
    "clock",
    looks_at="synchronisation of the clock, as the kernel reports it",
    threshold="not synchronised: logs and rendezvous timeouts of several nodes disagree",
    source="https://man7.org/linux/man-pages/man2/adjtimex.2.html (STA_UNSYNC)",
)
def clock(_: NodeReadings) -> Outcome:
    """Find a clock that nothing keeps right."""
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        raise NotMeasured(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    synchronised = not state.status & STA_UNSYNC
    measured = {"synchronised": synchronised, "max_error_seconds": state.maxerror / 10**6 if synchronised else None}
    found = NodeFinding(
        level=NOTE,
        what="the clock is not synchronised",
        value="not synchronised",
        expected="synchronised by NTP",
        fix="timedatectl set-ntp true   (or start chrony)",
    )
    return Outcome(measured=measured, findings=() if synchronised else (found,))
