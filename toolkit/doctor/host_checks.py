"""Checks of the host: shared memory, limits of the process, cores, NUMA nodes, memory, clock, network, disks."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

import psutil

from toolkit.cache import ASYNC_IO_OPS, COMPILE_ASYNC_IO, INSTALL_LIBAIO
from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeReadings, NotMeasured, Outcome, node_check
from toolkit.doctor.environment_report import (
    SHARED_MEMORY,
    compiled_ops,
    described_disks,
    filesystem_bytes,
    hub_home,
    hub_login,
    token_file,
    usual_folders,
)
from toolkit.doctor.ops import has_libaio_header
from toolkit.errors import ToolkitError
from toolkit.hardware.disks import existing_folder, measure_rates, mount_of
from toolkit.hardware.node import (
    count_oom_kills,
    cpu_limit,
    host_memory_bytes,
    locked_memory_limit_bytes,
    memory_limit_bytes,
    soft_limit,
    tasks_limit,
)
from toolkit.hardware.system_text import text_of
from toolkit.launch.nvme import (
    LOCKED_BYTES_AT_LEAST,
    check_direct_io,
    check_filesystem,
    check_folder,
    check_libaio,
    nvme_path_of,
)
from toolkit.units import GIB, MIB, gib

NCCL_CONTAINERS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#docker"
# `docker run --shm-size=1g --ulimit memlock=-1` (NCCL_CONTAINERS).
SHARED_MEMORY_AT_LEAST = GIB
# A rank opens a socket to each peer, and files of its shards and of each data loader worker; 1,024 is a usual default.
OPEN_FILES_AT_LEAST = 4096
# Threads count as well: a rank has dozens of them, and so has each data loader worker.
TASKS_PER_RANK = 512
CORES_PER_RANK = 2
NUMA_NODES = Path("/sys/devices/system/node")
TIME_ERROR = 5  # what adjtimex returns for a clock that is not synchronised (sys/timex.h)

ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/run.html"
# torch's defaults: c10d rendezvous (torch/distributed/elastic), and the master port of `torchrun` without one.
RENDEZVOUS_PORTS = (29400, 29500)
# Variables that switch off a fast path, and the value that does.
SLOW_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}

FULL_BELOW_BYTES, SCARCE_BELOW_BYTES = GIB, 10 * GIB
SLOW_BELOW_BYTES_PER_SECOND = 200 * MIB
MOVED_BY = {"hub cache": "HF_HOME", "toolkit cache": "TOOLKIT_CACHE", "temporary files": "TMPDIR"}


@node_check(threshold="below 1 GiB (a container has 64 MiB by default)", source=NCCL_CONTAINERS)
def shared_memory(_: NodeReadings) -> Outcome:
    """Size of /dev/shm, through which NCCL, gloo and data loader workers exchange data."""
    size, writable = filesystem_bytes(SHARED_MEMORY), os.access(SHARED_MEMORY, os.W_OK)
    outcome = Outcome({"bytes": size, "writable": writable})
    if size is None or size < SHARED_MEMORY_AT_LEAST or not writable:
        what = "/dev/shm is missing, too small, or cannot be written"
        fix = "docker run --ipc=host (or --shm-size=16g); Kubernetes: an emptyDir with `medium: Memory` at /dev/shm"
        outcome.add(ERROR, what, gib(size), f"at least {gib(SHARED_MEMORY_AT_LEAST)}", fix)
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
        outcome.add(level, "little memory may be locked", gib(limit), "unlimited", fix)
    return outcome


@node_check(
    threshold="below 4,096",
    source=f"{OWN_CHOICE}: a rank opens a socket to each peer, and files of shards and data loader workers",
)
def ulimit_nofile(_: NodeReadings) -> Outcome:
    """Files and sockets that a process may have open: too few end in `Too many open files`."""
    limit = soft_limit(resource.RLIMIT_NOFILE)
    outcome = Outcome({"files": limit})
    if limit is not None and limit < OPEN_FILES_AT_LEAST:
        outcome.add(WARNING, "few files may be open", limit, f"at least {OPEN_FILES_AT_LEAST}", "ulimit -n 65536")
    return outcome


@node_check(
    threshold=f"below {TASKS_PER_RANK} per rank",
    source=f"{OWN_CHOICE}: a rank and each of its data loader workers has dozens of threads",
)
def ulimit_nproc(node: NodeReadings) -> Outcome:
    """Processes and threads, the user's limit and the cgroup's: too few end in `Resource temporarily unavailable`."""
    needed = TASKS_PER_RANK * node.processes
    outcome = Outcome({"user": soft_limit(resource.RLIMIT_NPROC), "cgroup": tasks_limit()})
    lowest = min((limit for limit in outcome.measured.values() if limit is not None), default=needed)
    if lowest < needed:
        fix = "ulimit -u unlimited; docker run --pids-limit -1; Kubernetes: podPidsLimit of the kubelet"
        expected = f"at least {needed}, for {node.processes} ranks"
        outcome.add(WARNING, "few processes and threads may exist", lowest, expected, fix)
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
        fix = "SLURM: --cpus-per-task; docker run --cpus; Kubernetes: resources.limits.cpu"
        expected = f"at least {needed}, for {node.processes} ranks"
        outcome.add(WARNING, "few cores for the ranks", f"{available:g}", expected, fix)
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
        what, expected = "no usable core is on the NUMA node of these GPUs", "cores of every NUMA node that has a GPU"
        fix = "SLURM: --exclusive or --gpus-per-task with --cpu-bind=cores; docker run without --cpuset-cpus"
        outcome.add(WARNING, what, ", ".join(far), expected, fix)
    if balancing:
        what, expected = "automatic NUMA balancing moves pages while ranks run", "off, with ranks bound to nodes"
        outcome.add(NOTE, what, "on", expected, "sysctl kernel.numa_balancing=0")
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
    measured = {"installed_bytes": installed, "available_bytes": available, "limit_bytes": limit}
    measured |= {"swap_bytes": psutil.swap_memory().total, "needed_bytes": node.planned_host_bytes, "oom_kills": kills}
    outcome = Outcome(measured)
    what = f"`{node.options.preset}` in {node.processes} processes needs more host memory"
    if needed > usable:
        fix = "a preset without offload, more nodes, or `--lora_r 16`: `toolkit recommend` shows what fits"
        outcome.add(ERROR, what, gib(usable), gib(needed), fix)
    elif needed > available:
        fix = "end other processes: `ps aux --sort -rss | head`"
        outcome.add(WARNING, f"{what} than is available now", gib(available), gib(needed), fix)
    if kills:
        fix = "dmesg | grep -i 'killed process'"
        outcome.add(NOTE, "the kernel has killed processes for lack of memory", kills, 0, fix)
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
        outcome.add(NOTE, "the clock is not synchronised", "not synchronised", "by NTP", fix)
    return outcome


# -- Network


@node_check(
    threshold="a port not active; an InfiniBand port slower than the others",
    source="https://docs.kernel.org/infiniband/sysfs.html",
)
def rdma(node: NodeReadings) -> Outcome:
    """Ports of InfiniBand, RoCE and EFA: state and rate."""
    if not node.rdma_ports:
        raise NotMeasured("no RDMA port: several nodes would use TCP")
    outcome = Outcome({port.name: f"{port.state}, {port.rate}, {port.link_layer}" for port in node.rdma_ports})
    active = [port for port in node.rdma_ports if port.state == "ACTIVE"]
    fastest = max((port.gigabits_per_second for port in active), default=0.0)
    for port in node.rdma_ports:
        if port not in active:
            fix = "INIT: start the subnet manager; DOWN: check cable and switch port, or leave it out (NCCL_IB_HCA)"
            outcome.add(WARNING if active else ERROR, f"{port.name} is not active", port.state, "ACTIVE", fix)
        elif port.gigabits_per_second < fastest and port.link_layer == "InfiniBand":
            what, fix = f"{port.name} is slower than the other ports", "check cable and switch port: `iblinkinfo`"
            outcome.add(WARNING, what, port.rate, f"{fastest:g} Gb/sec", fix)
    return outcome


@node_check(
    threshold="it does not resolve, or to a loopback address: other nodes would be told a wrong address",
    source=f"{ELASTIC} (`--local-addr`)",
)
def hostname(_: NodeReadings) -> Outcome:
    """Address that this node's own name resolves to, and addresses of its interfaces."""
    name, resolved, states = socket.gethostname(), None, psutil.net_if_stats()
    addresses: dict[str, str] = {}
    for card, listed in psutil.net_if_addrs().items():
        found = [address.address for address in listed if address.family == socket.AF_INET]
        if found and card != "lo" and card in states and states[card].isup:
            addresses[card] = found[0]
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(name)
    outcome = Outcome({"hostname": name, "resolves_to": resolved, "addresses": addresses})
    if resolved is None or ipaddress.ip_address(resolved).is_loopback:
        address, what = next(iter(addresses.values()), "ADDRESS"), "other nodes cannot connect to this node by its name"
        value, expected = f"{name} → {resolved or 'does not resolve'}", "an address of one of its interfaces"
        fix = f"name the address: `torchrun --local-addr {address}`; as the head `--rdzv-endpoint {address}:29500`"
        outcome.add(WARNING, what, value, expected, fix)
    return outcome


@node_check(threshold="another process listens on one", source=f"torch's defaults, 29400 and 29500: {ELASTIC}")
def ports(node: NodeReadings) -> Outcome:
    """Ports that the rendezvous needs on the head node."""
    checked = node.options.port or RENDEZVOUS_PORTS
    outcome = Outcome({"checked": list(checked), "taken": []})
    for port in checked:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be used
            try:
                probe.bind(("", port))
                probe.listen(1)
            except OSError as error:
                outcome.measured["taken"].append(port)
                fix = f"`ss -ltnp sport = :{port}` shows who has it; or use another: `--rdzv-endpoint HEAD:OTHER`"
                outcome.add(WARNING, f"port {port} cannot be used", error.strerror or error, "free", fix)
    return outcome


@node_check(
    threshold="one is set: it may be left over from a test",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
)
def nccl_variables(_: NodeReadings) -> Outcome:
    """Variables that switch off a fast path of NCCL, and interfaces that do not exist."""
    outcome = Outcome({"set": sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))})
    for name, slow in SLOW_SETTINGS.items():
        if os.environ.get(name) == slow:
            outcome.add(WARNING, f"{name} switches off a fast path", slow, "not set", f"unset {name}")
    interfaces = set(psutil.net_if_addrs())
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        words = tuple(word.lstrip("=") for word in value.split(",") if word)
        if words and not words[0].startswith("^") and not any(card.startswith(words) for card in interfaces):
            what, expected = f"{name} names no interface of this node", ", ".join(sorted(interfaces - {"lo"}))
            outcome.add(ERROR, what, value, expected, f"unset {name}, or name one of them")
    return outcome


# -- Disks


def _elsewhere(name: str) -> str:
    return f"export {MOVED_BY[name]}=DIR on another disk" if name in MOVED_BY else "`--output_dir` on another disk"


@node_check(
    threshold="below 10 GiB; below 1 GiB, or not writable: an error",
    source=f"{OWN_CHOICE}: a checkpoint of a 0.6B model takes 7 to 12 GB; `toolkit train` checks its own run",
)
def disk_space(node: NodeReadings) -> Outcome:
    """Free space for the run folder (`--output-dir`), the hub's cache, the toolkit's cache, temporary files."""
    outcome = Outcome(described_disks({"run folder": node.output_dir} | usual_folders(os.environ)))
    for name, disk in outcome.measured.items():
        path, free, fix = disk["path"], disk["free_bytes"], _elsewhere(name)
        if not os.access(existing_folder(Path(path)), os.W_OK | os.X_OK):
            is_guess = name == "run folder" and node.options.output_dir is None  # where the user happens to be
            level, what = NOTE if is_guess else ERROR, f"the {name} cannot be written: {path}"
            outcome.add(level, what, "not writable", "writable by this user", fix)
        elif free < SCARCE_BELOW_BYTES:
            level, what = ERROR if free < FULL_BELOW_BYTES else WARNING, f"little space for the {name}: {path}"
            value, expected = f"{gib(free)} free of {gib(disk['total_bytes'])}", f"at least {gib(SCARCE_BELOW_BYTES)}"
            outcome.add(level, what, value, expected, fix)
    return outcome


@node_check(
    threshold="below 200 MiB/s: a checkpoint of an 8B model (96 GB in fp32: weights and Adam) takes 7.6 minutes",
    source=f"{OWN_CHOICE}; measured as `toolkit train --nvme-path` does",
    long=True,
)
def disk_speed(node: NodeReadings) -> Outcome:
    """One stream past the page cache, written and read: run folder, hub's cache, `--nvme-path`."""
    folders = {"run folder": node.output_dir, "hub cache": hub_home()}
    if node.options.nvme_path:
        folders["NVMe offload"] = Path(node.options.nvme_path)
    outcome = Outcome({})
    for name, folder in folders.items():
        measured: dict[str, Any] = {"path": str(folder)}
        outcome.measured[name] = measured
        try:
            rates = measure_rates(existing_folder(folder))
        except OSError as error:
            measured["not_measured"] = f"no direct I/O: {error.strerror}"
            continue
        for way, rate in (("writes", rates.write_bytes_per_second), ("reads", rates.read_bytes_per_second)):
            measured[f"{way}_bytes_per_second"] = rate
            if rate < SLOW_BELOW_BYTES_PER_SECOND:
                what, expected = f"the disk of the {name} is slow: {folder}", f"{gib(SLOW_BELOW_BYTES_PER_SECOND)}/s"
                fix = f"{_elsewhere(name)}; fewer saves: `--save_steps`, `--save_only_model true`"
                outcome.add(WARNING, what, f"{way} {gib(rate)}/s", f"at least {expected}", fix)
    return outcome


@node_check(
    threshold="missing, for a preset that offloads to NVMe: an error; otherwise a note",
    source="docs/how-to/optimizers.md: what `toolkit train` refuses",
)
def nvme_offload(node: NodeReadings) -> Outcome:
    """libaio and DeepSpeed's async_io; with `--preset` or `--nvme-path` the disk: file system, direct I/O."""
    preset, path = node.preset, node.options.nvme_path
    uses_nvme = preset is not None and "nvme" in (preset.offload_optimizer, preset.offload_param)
    header, compiled = has_libaio_header(), all(compiled_ops().get(op) for op in ASYNC_IO_OPS)
    outcome = Outcome({"libaio_header": header, "async_io_compiled": compiled, "path": path})
    if not compiled:
        what = "DeepSpeed's async_io is not compiled" if header else "libaio's header is missing"
        fix, level = COMPILE_ASYNC_IO if header else INSTALL_LIBAIO, ERROR if uses_nvme else NOTE
        outcome.add(level, f"NVMe offload: {what}", "missing", "present", fix)
    try:
        if preset is not None and uses_nvme:
            check_libaio()
            nvme_path_of(preset, path)
        if path:
            check_folder(Path(path))
            outcome.measured["filesystem"] = check_filesystem(Path(path))
            check_direct_io(Path(path))
    except ToolkitError as error:
        outcome.add_refusal(error, path, "a local NVMe disk")
    return outcome


@node_check(
    threshold="no token: a note; a token that others can read; a cache in memory",
    source="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
)
def hub(_: NodeReadings) -> Outcome:
    """The hub's cache (place, kind of disk), its token (present or not; never read), offline mode."""
    home, login = hub_home(), hub_login()
    mount = mount_of(existing_folder(home))
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None)
    kind = mount.kind if mount else None
    outcome = Outcome({"cache": str(home), "disk": kind, "token": login or "none", "offline": offline})
    if login is None and offline is None:
        what, fix = "no hub token: gated and private models are refused", "hf auth login   (or export HF_TOKEN)"
        outcome.add(NOTE, what, "none", "a token, if the model needs one", fix)
    if login == "token file" and (mode := token_file().stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        what, fix = "other users can read the hub's token", f"chmod 600 {token_file()}"
        outcome.add(WARNING, what, stat.filemode(mode), "-rw-------", fix)
    if kind == "memory":
        what, fix = f"the hub's cache is in memory: {home}", "export HF_HOME=DIR on a disk"
        outcome.add(WARNING, what, kind, "a disk", fix)
    return outcome
