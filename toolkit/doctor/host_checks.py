"""Checks of the host: shared memory, limits of the process, cores, NUMA nodes, memory, the clock."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, Outcome, node_check
from toolkit.doctor.collectors import SHARED_MEMORY, filesystem_bytes
from toolkit.doctor.node_readings import NodeReadings
from toolkit.hardware.cgroups import count_oom_kills, cpu_limit, memory_limit_bytes, tasks_limit
from toolkit.hardware.node import host_memory_bytes
from toolkit.hardware.process_limits import locked_memory_limit_bytes, open_files_limit, processes_limit
from toolkit.hardware.system_text import text_of
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
TIME_ERROR = 5  # what adjtimex returns for a clock that is not synchronised (sys/timex.h)


@node_check(threshold="below 1 GiB (a container has 64 MiB by default)", source=NCCL_CONTAINERS)
def shared_memory(_: NodeReadings) -> Outcome:
    """Size of /dev/shm, through which NCCL, gloo and data loader workers exchange data."""
    size, writable = filesystem_bytes(SHARED_MEMORY), os.access(SHARED_MEMORY, os.W_OK)
    outcome = Outcome({"bytes": size, "writable": writable})
    if size is None or size < SHARED_MEMORY_AT_LEAST or not writable:
        outcome.add(
            ERROR,
            "/dev/shm is missing, too small, or cannot be written",
            value=gib(size),
            expected=f"at least {gib(SHARED_MEMORY_AT_LEAST)}",
            fix="docker run --ipc=host (or --shm-size=16g); Kubernetes: an emptyDir with `medium: Memory` at /dev/shm",
        )
    return outcome


@node_check(
    threshold="below 1 GiB, on a node with a GPU or an RDMA port, or for a preset that offloads",
    source=NCCL_CONTAINERS,
)
def ulimit_memlock(node: NodeReadings) -> Outcome:
    """Memory that a process may lock: RDMA and offload buffers."""
    limit = locked_memory_limit_bytes()
    outcome = Outcome({"bytes": limit})
    needed = bool(node.has_gpu or node.rdma_ports or (node.preset and node.preset.offload_optimizer))
    if limit is not None and limit < LOCKED_BYTES_AT_LEAST and needed:
        level = ERROR if node.rdma_ports else WARNING
        fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: LimitMEMLOCK=infinity of slurmd"
        outcome.add(level, "little memory may be locked", value=gib(limit), expected="unlimited", fix=fix)
    return outcome


@node_check(
    threshold="below 4,096",
    source=f"{OWN_CHOICE}: a rank opens a socket to each peer, and files of shards and data loader workers",
)
def ulimit_nofile(_: NodeReadings) -> Outcome:
    """Files and sockets that a process may have open: too few end in `Too many open files`."""
    limit = open_files_limit()
    outcome = Outcome({"files": limit})
    if limit is not None and limit < OPEN_FILES_AT_LEAST:
        expected = f"at least {OPEN_FILES_AT_LEAST}"
        outcome.add(WARNING, "few files may be open", value=limit, expected=expected, fix="ulimit -n 65536")
    return outcome


@node_check(
    threshold=f"below {TASKS_PER_RANK} per rank",
    source=f"{OWN_CHOICE}: a rank and each of its data loader workers has dozens of threads",
)
def ulimit_nproc(node: NodeReadings) -> Outcome:
    """Processes and threads, the user's limit and the cgroup's: too few end in `Resource temporarily unavailable`."""
    limits, needed = {"user": processes_limit(), "cgroup": tasks_limit()}, TASKS_PER_RANK * node.processes
    lowest = min((limit for limit in limits.values() if limit is not None), default=needed)
    outcome = Outcome({**limits})
    if lowest < needed:
        outcome.add(
            WARNING,
            "few processes and threads may exist",
            value=lowest,
            expected=f"at least {needed}, for {node.processes} ranks",
            fix="ulimit -u unlimited; docker run --pids-limit -1; Kubernetes: podPidsLimit of the kubelet",
        )
    return outcome


@node_check(
    threshold=f"below {CORES_PER_RANK} per rank, on a node with a GPU",
    source=f"{OWN_CHOICE}: one for Python and one for the data loader, and CPU Adam uses all of them",
)
def cores(node: NodeReadings) -> Outcome:
    """Cores that this process may use: affinity and the cgroup's quota."""
    usable, quota, needed = len(os.sched_getaffinity(0)), cpu_limit(), CORES_PER_RANK * node.processes
    outcome = Outcome({"installed": os.cpu_count(), "usable": usable, "quota": quota, "ranks": node.processes})
    available = min(usable, quota or usable)
    if available < needed and node.has_gpu:
        expected = f"at least {needed}, for {node.processes} ranks"
        fix = "SLURM: --cpus-per-task; docker run --cpus; Kubernetes: resources.limits.cpu"
        outcome.add(WARNING, "few cores for the ranks", value=f"{available:g}", expected=expected, fix=fix)
    return outcome


@node_check(
    threshold="a GPU's NUMA node without a usable core; automatic balancing on with several nodes: a note",
    source="https://docs.kernel.org/admin-guide/sysctl/kernel.html#numa-balancing",
)
def numa(node: NodeReadings) -> Outcome:
    """NUMA nodes, the cores of this process on them, the GPUs at them, automatic balancing."""
    usable = os.sched_getaffinity(0)
    nodes = {path.name[4:]: cpus_of(text_of(path / "cpulist") or "") for path in NUMA_NODES.glob("node[0-9]*")}
    balancing = text_of(Path("/proc/sys/kernel/numa_balancing")) == "1" and len(nodes) > 1
    at_gpus = {device.name: text_of(device / "numa_node") for device in node.pci_gpus}  # -1: the firmware names none
    counts = {name: len(cpus) for name, cpus in sorted(nodes.items())}
    outcome = Outcome({"nodes": counts, "balancing": balancing, "gpus": at_gpus})
    far = [gpu for gpu, name in at_gpus.items() if name in nodes and not nodes[name] & usable]
    if far:
        outcome.add(
            WARNING,
            "no usable core is on the NUMA node of these GPUs",
            value=", ".join(far),
            expected="cores of every NUMA node that has a GPU",
            fix="SLURM: --exclusive or --gpus-per-task with --cpu-bind=cores; docker run without --cpuset-cpus",
        )
    if balancing:
        what, expected = "automatic NUMA balancing moves pages while ranks run", "off, with ranks bound to nodes"
        outcome.add(NOTE, what, value="on", expected=expected, fix="sysctl kernel.numa_balancing=0")
    return outcome


def cpus_of(cpulist: str) -> set[int]:
    """Return the cores of the kernel's list.

    >>> sorted(cpus_of("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in cpulist.split(",") if part.strip()]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


@node_check(
    threshold="less than the plan needs: an error; less available now: a warning; processes killed for memory: a note",
    source="`toolkit plan` (docs/concepts/plan.md), with the default batch",
)
def host_memory(node: NodeReadings) -> Outcome:
    """Memory of the host, the cgroup's limit, swap, and with `--preset` and MODEL what their plan needs."""
    installed, limit, available = host_memory_bytes(), memory_limit_bytes(), psutil.virtual_memory().available
    usable, needed, kills = min(installed, limit or installed), node.planned_host_bytes or 0, count_oom_kills()
    outcome = Outcome(
        {
            "installed_bytes": installed,
            "available_bytes": available,
            "limit_bytes": limit,
            "swap_bytes": psutil.swap_memory().total,
            "needed_bytes": node.planned_host_bytes,
            "oom_kills": kills,
        }
    )
    what = f"`{node.options.preset}` in {node.processes} processes needs more host memory"
    if needed > usable:
        fix = "a preset without offload, more nodes, or `--lora_r 16`: `toolkit recommend` shows what fits"
        outcome.add(ERROR, what, value=gib(usable), expected=gib(needed), fix=fix)
    elif needed > available:
        what, fix = f"{what} than is available now", "end other processes: `ps aux --sort -rss | head`"
        outcome.add(WARNING, what, value=gib(available), expected=gib(needed), fix=fix)
    if kills:
        what, fix = "the kernel has killed processes for lack of memory", "dmesg | grep -i 'killed process'"
        outcome.add(NOTE, what, value=kills, expected=0, fix=fix)
    return outcome


@node_check(
    threshold="not synchronised: logs and rendezvous timeouts of several nodes disagree",
    source="https://man7.org/linux/man-pages/man2/adjtimex.2.html (TIME_ERROR)",
)
def clock(_: NodeReadings) -> Outcome:
    """Synchronisation of the clock, as the kernel reports it."""
    timex = ctypes.create_string_buffer(512)  # `struct timex`, of zeros: adjtimex only reads
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex fails")
    outcome = Outcome({"synchronised": state != TIME_ERROR})
    if state == TIME_ERROR:
        fix = "timedatectl set-ntp true   (or start chrony)"
        outcome.add(NOTE, "the clock is not synchronised", value="not synchronised", expected="by NTP", fix=fix)
    return outcome
