"""Checks of the host: limits of the process, cores, memory, network, disks, installed software."""

import os
import re
import resource
import shutil
import stat
from pathlib import Path

import psutil

from toolkit.doctor import environment_report as report
from toolkit.doctor.checks import ERROR, NOTE, OWN_CHOICE, WARNING, NodeReadings, NotMeasured, Outcome, node_check
from toolkit.doctor.environment_report import SHARED_MEMORY, described_disks
from toolkit.doctor.node_packages import INSTALL_CUDA_BUILD, find_nvcc, left_out
from toolkit.doctor.ops import check_compiler, has_libaio_header, stale_locks
from toolkit.engines import compiled_ops
from toolkit.hardware import node as limits
from toolkit.hardware.disks import existing_folder, mount_of
from toolkit.installation import install_line
from toolkit.launch import nvme
from toolkit.models.hub import hub_home, token_file
from toolkit.units import GIB, gib
from toolkit.versions import installed_version, torch_cuda_version, version_numbers

NCCL_CONTAINERS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#docker"
# Variables that switch off a fast path, and the value that does.
SLOW_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}
# What moves each folder to another disk.
MOVED_BY = {
    **{"run folder": "`--output_dir DIR`", "hub cache": "export HF_HOME=DIR", "NVMe offload": "`--nvme-path DIR`"},
    **{"toolkit cache": "export TOOLKIT_CACHE=DIR", "temporary files": "export TMPDIR=DIR"},
}


@node_check(NCCL_CONTAINERS)
def shared_memory(_: NodeReadings, outcome: Outcome) -> None:
    """Size of /dev/shm, through which NCCL, gloo and data loader workers exchange data."""
    size, writable = report.filesystem_bytes(SHARED_MEMORY), os.access(SHARED_MEMORY, os.W_OK)
    outcome.measured = {"bytes": size, "writable": writable}
    if size is None or size < GIB or not writable:
        what = "/dev/shm is missing, too small, or cannot be written"
        fix = "docker run --ipc=host (or --shm-size=16g); Kubernetes: an emptyDir with `medium: Memory` at /dev/shm"
        outcome.add(ERROR, what, gib(size), f"at least {gib(GIB)}", fix)


@node_check(NCCL_CONTAINERS)
def ulimit_memlock(node: NodeReadings, outcome: Outcome) -> None:
    """Memory that a process may lock: RDMA and offload buffers."""
    limit = outcome.measured["bytes"] = limits.locked_memory_limit_bytes()
    needed = node.has_gpu or node.rdma_ports or (node.preset and node.preset.offload_optimizer)
    if limit is not None and limit < nvme.LOCKED_BYTES_AT_LEAST and needed:
        fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: LimitMEMLOCK=infinity of slurmd"
        outcome.add(ERROR if node.rdma_ports else WARNING, "little memory may be locked", gib(limit), "unlimited", fix)


@node_check(f"{OWN_CHOICE}: a socket to each peer, and files of shards and data loader workers")
def ulimit_nofile(_: NodeReadings, outcome: Outcome) -> None:
    """Files and sockets that a process may have open: too few end in `Too many open files`."""
    limit = outcome.measured["files"] = limits.soft_limit(resource.RLIMIT_NOFILE)
    if limit is not None and limit < 4096:
        outcome.add(WARNING, "few files may be open", limit, "at least 4096", "ulimit -n 65536")


@node_check(
    f"{OWN_CHOICE}: Python, the data loader; CPU Adam uses all; a run that just ended leaves a load of 1 per core"
)
def cores(node: NodeReadings, outcome: Outcome) -> None:
    """Cores that this process may use (affinity, cgroup), and the load of the last minute."""
    usable, quota, ranks, load = len(os.sched_getaffinity(0)), limits.cpu_limit(), node.processes, os.getloadavg()[0]
    outcome.measured = {"installed": os.cpu_count(), "usable": usable, "quota": quota, "ranks": ranks, "load": load}
    available = min(usable, quota or usable)
    if available < 2 * ranks and node.has_gpu:
        fix = "SLURM: --cpus-per-task; docker run --cpus; Kubernetes: resources.limits.cpu"
        expected = f"at least {2 * ranks}, for {ranks} ranks"
        outcome.add(WARNING, "few cores for the ranks", f"{available:g}", expected, fix)
    if busy := limits.busy_cores():
        outcome.add(WARNING, busy, None, None, "end other programs: `ps aux --sort -%cpu | head`")


@node_check("`toolkit plan` (docs/concepts/plan.md), with the default batch")
def host_memory(node: NodeReadings, outcome: Outcome) -> None:
    """Memory of the host, the cgroup's limit, swap, and with `--preset` and MODEL what their plan needs."""
    installed, limit = limits.host_memory_bytes(), limits.memory_limit_bytes()
    available, needed, kills = psutil.virtual_memory().available, node.planned_host_bytes, limits.count_oom_kills()
    outcome.measured = {"installed_bytes": installed, "available_bytes": available, "limit_bytes": limit}
    outcome.measured |= {"swap_bytes": psutil.swap_memory().total, "needed_bytes": needed, "oom_kills": kills}
    what = f"`{node.options.preset}` in {node.processes} processes needs more host memory"
    if needed and needed > (usable := min(installed, limit or installed)):
        fix = "a preset without offload, more nodes, or `--lora_r 16`: `toolkit recommend` shows what fits"
        outcome.add(ERROR, what, gib(usable), gib(needed), fix)
    elif needed and needed > available:
        fix = "end other processes: `ps aux --sort -rss | head`"
        outcome.add(WARNING, f"{what} than is available now", gib(available), gib(needed), fix)
    if kills:
        outcome.add(NOTE, "processes were killed for lack of memory", kills, None, "dmesg | grep -i 'killed process'")


# -- Network


@node_check("https://docs.kernel.org/infiniband/sysfs.html")
def rdma(node: NodeReadings, outcome: Outcome) -> None:
    """Ports of InfiniBand, RoCE and EFA: state and rate."""
    if not node.rdma_ports:
        raise NotMeasured("no RDMA port: several nodes would use TCP")
    outcome.measured = {port.name: f"{port.state}, {port.rate}, {port.link_layer}" for port in node.rdma_ports}
    active = [port for port in node.rdma_ports if port.state == "ACTIVE"]
    fastest = max((port.gigabits_per_second for port in active), default=0.0)
    for port in node.rdma_ports:
        if port not in active:
            fix = "INIT: start the subnet manager; DOWN: check cable and switch port, or leave it out (NCCL_IB_HCA)"
            outcome.add(WARNING if active else ERROR, f"{port.name} is not active", port.state, "ACTIVE", fix)
        elif port.gigabits_per_second < fastest and port.link_layer == "InfiniBand":
            what, fix = f"{port.name} is slower than the other ports", "check cable and switch port: `iblinkinfo`"
            outcome.add(WARNING, what, port.rate, f"{fastest:g} Gb/sec", fix)


@node_check("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html")
def nccl_variables(_: NodeReadings, outcome: Outcome) -> None:
    """Variables that switch off a fast path of NCCL, and interfaces that do not exist."""
    outcome.measured["set"] = sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))
    for name, slow in SLOW_SETTINGS.items():
        if os.environ.get(name) == slow:
            fix = f"unset {name}" + (" (not on consumer cards without P2P)" if name == "NCCL_P2P_DISABLE" else "")
            outcome.add(WARNING, f"{name}={slow} switches off a fast path", None, None, fix)
    interfaces = set(psutil.net_if_addrs())
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        words = tuple(word.lstrip("=") for word in value.split(",") if word)
        if words and not words[0].startswith("^") and not any(card.startswith(words) for card in interfaces):
            what, expected = f"{name} names no interface of this node", ", ".join(sorted(interfaces - {"lo"}))
            outcome.add(ERROR, what, value, expected, f"unset {name}, or name one of them")


# -- Disks


@node_check(f"{OWN_CHOICE}: a checkpoint of a 0.6B model takes 7 to 12 GB; `toolkit train` checks its own run")
def disk_space(node: NodeReadings, outcome: Outcome) -> None:
    """Free space for the run folder (`--output-dir`), the hub's cache, the toolkit's cache, temporary files."""
    outcome.measured = described_disks("run folder", node.output_dir)
    for name, disk in outcome.measured.items():
        path, free, fix = disk["path"], disk["free_bytes"], f"{MOVED_BY[name]} on another disk"
        if not os.access(existing_folder(Path(path)), os.W_OK | os.X_OK):
            is_guess = name == "run folder" and node.options.output_dir is None  # where the user happens to be
            outcome.add(NOTE if is_guess else ERROR, f"the {name} cannot be written: {path}", None, None, fix)
        elif free < 10 * GIB:
            what, value = f"little space for the {name}: {path}", f"{gib(free)} free of {gib(disk['total_bytes'])}"
            outcome.add(ERROR if free < GIB else WARNING, what, value, f"at least {gib(10 * GIB)}", fix)


@node_check("docs/how-to/optimizers.md: what `toolkit train` refuses")
def nvme_offload(node: NodeReadings, outcome: Outcome) -> None:
    """libaio and DeepSpeed's async_io, and the disk of `--nvme-path`: file system, direct I/O."""
    preset, path = node.preset, node.options.nvme_path
    uses_nvme = preset is not None and "nvme" in (preset.offload_optimizer, preset.offload_param)
    header, compiled = has_libaio_header(), compiled_ops.are_compiled(compiled_ops.ASYNC_IO_OPS)
    outcome.measured = {"libaio_header": header, "async_io_compiled": compiled, "path": path}
    if not compiled:
        what = compiled_ops.ASYNC_IO_MISSING if header else "libaio's header is missing"
        fix = compiled_ops.COMPILE_ASYNC_IO if header else compiled_ops.INSTALL_LIBAIO
        outcome.add(ERROR if uses_nvme else NOTE, f"NVMe offload: {what}", None, None, fix)
    with outcome.refusals():
        if uses_nvme and (header or compiled):  # a missing header has the same fix
            nvme.check_libaio()
    with outcome.refusals():
        if preset is not None:
            nvme.nvme_path_of(preset, path)
    with outcome.refusals():
        if path:
            nvme.check_folder(Path(path))
            outcome.measured["filesystem"] = nvme.check_filesystem(Path(path))
            nvme.check_direct_io(Path(path))


@node_check("https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables")
def hub(_: NodeReadings, outcome: Outcome) -> None:
    """The hub's cache (place, kind of disk), its token (present or not, never read), offline mode."""
    home, login, mount = hub_home(), report.hub_login(), mount_of(existing_folder(hub_home()))
    token = token_file()
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None)
    kind = mount.kind if mount else None
    outcome.measured = {"cache": str(home), "disk": kind, "token": login or "none", "offline": offline}
    if login is None and offline is None:
        what, fix = "no hub token: gated and private models are refused", "hf auth login   (or export HF_TOKEN)"
        outcome.add(NOTE, what, None, None, fix)
    if login == "token file" and (mode := token.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        outcome.add(WARNING, "others can read the hub's token", stat.filemode(mode), "-rw-------", f"chmod 600 {token}")
    if kind == "memory":
        outcome.add(WARNING, f"the hub's cache is in memory: {home}", None, None, "export HF_HOME=DIR on a disk")


# -- Installed software


@node_check("pyproject.toml")
def libraries(_: NodeReadings, outcome: Outcome) -> None:
    """The libraries that every run imports."""
    outcome.measured = dict(limits.library_versions())
    if missing := [name for name, version in outcome.measured.items() if version is None]:
        outcome.add(ERROR, "libraries are not installed", ", ".join(missing), None, install_line(*missing))


@node_check("https://docs.nvidia.com/deploy/cuda-compatibility/ (minor version compatibility)")
def cuda(node: NodeReadings, outcome: Outcome) -> None:
    """CUDA that torch was built with, and the newest that the driver supports."""
    torch, built, driver = installed_version("torch"), torch_cuda_version(), report.driver_cuda_version()
    outcome.measured = {"torch": torch, "built_for": built, "driver_supports": driver}
    if torch is not None and built is None and node.has_gpu:
        what, expected = "torch is a CPU build: no GPU would be used", f"a build for CUDA {driver or 'of the driver'}"
        outcome.add(ERROR, what, None, expected, INSTALL_CUDA_BUILD)
    elif built and driver and version_numbers(built)[:2] > version_numbers(driver)[:2]:
        newer = version_numbers(built)[0] > version_numbers(driver)[0]
        what = "the driver is older than torch's CUDA" + ("" if newer else "; minor versions are compatible")
        fix = f"update the driver, or install a torch built for CUDA {driver}"
        outcome.add(ERROR if newer else NOTE, what, f"CUDA {driver}", f"CUDA {built} or newer", fix)


@node_check("torch loads the one of its package: https://docs.nvidia.com/deeplearning/nccl/release-notes/")
def nccl(_: NodeReadings, outcome: Outcome) -> None:
    """NCCL's package, and another NCCL on LD_LIBRARY_PATH."""
    packages = {name: version for name in report.NCCL_PACKAGES if (version := installed_version(name))}
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    others = [str(path) for folder in folders for path in sorted(Path(folder).glob("libnccl.so*"))]
    outcome.measured = {"packages": packages, "on_library_path": others}
    installed = ", ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        keep = f"nvidia-nccl-cu{(torch_cuda_version() or '12').partition('.')[0]}"
        fix = f"pip uninstall {' '.join(set(packages) - {keep})} && pip install --force-reinstall --no-deps {keep}"
        outcome.add(WARNING, "two NCCL packages overwrite each other's files", installed, keep, fix)
    if others:
        what = "another NCCL on LD_LIBRARY_PATH may replace the one of torch"
        fix = "remove its folder from LD_LIBRARY_PATH, unless the provider asks for it"
        outcome.add(WARNING, what, others[0], installed or "torch's own", fix)


@node_check("what `make setup` leaves out (`toolkit/doctor/node_packages.py`)")
def packages(node: NodeReadings, outcome: Outcome) -> None:
    """Optional packages that this node could use: Liger, bitsandbytes, NVML's library, nvcc."""
    parts = left_out()
    outcome.measured = {"left_out": [part.part for part in parts]}
    for part in parts:
        outcome.add(WARNING, f"{part.part}: {part.reason}", None, None, part.add, when=node.has_gpu)


@node_check(
    "DeepSpeed accepts other minor versions only: "
    "https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/builder.py (assert_no_cuda_mismatch)",
)
def compilers(_: NodeReadings, outcome: Outcome) -> None:
    """The C++ compiler and Python's headers, ninja, and nvcc against torch's CUDA."""
    versions, nvcc, built = report.compiler_versions(), find_nvcc(), torch_cuda_version()
    outcome.measured = versions | {"nvcc_path": str(nvcc) if nvcc else None}
    with outcome.refusals():
        check_compiler()
    if versions["ninja"] is None and shutil.which("ninja") is None and installed_version("ninja") is None:
        outcome.add(WARNING, "there is no ninja to compile DeepSpeed's ops", None, None, "pip install ninja")
    release = re.search(r"release (\d+)\.\d+", versions["nvcc"] or "")
    if release and built and release[1] != built.partition(".")[0]:
        what = "nvcc is of another CUDA than torch: DeepSpeed's CUDA ops do not compile"
        outcome.add(WARNING, what, release[0], built, f"export CUDA_HOME=/usr/local/cuda-{built}")


@node_check("docs/concepts/security.md")
def ops(_: NodeReadings, outcome: Outcome) -> None:
    """DeepSpeed's compiled CPU ops, and who may write them."""
    compiled = compiled_ops.which_are_compiled()
    outcome.measured = {"folder": str(compiled_ops.extensions_folder()), **compiled}
    with outcome.refusals():
        compiled_ops.check_extensions_folder()
    for lock in stale_locks():
        what = f"a compilation of {lock.parent.name} was killed: every run waits for its lock, without a message"
        outcome.add(ERROR, what, None, None, f"rm {lock}")
    if missing := [op for op in compiled_ops.CPU_OPS if not compiled.get(op, True)]:
        what = "DeepSpeed's CPU ops are not compiled, and the first run waits for them"
        outcome.add(NOTE, what, ", ".join(missing), None, "python -m toolkit.doctor.ops")
