"""Checks with `--long`: NVIDIA's own diagnostics, and an all-reduce between the GPUs of the node; a program of its own.

On a CPU it runs in processes with gloo: that tests collectives, and says nothing about a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

from toolkit.doctor.checks import ERROR, NOTE, WARNING, NodeReadings, NotMeasured, Outcome, node_check
from toolkit.engines.planned import Collective
from toolkit.hardware.gpu_table import GIGA, common_gpu
from toolkit.hardware.gpus import CPU_PROCESSES, count_gpus
from toolkit.hardware.shared_gpu import WAY_VARIABLE, WAYS, default_way, nccl_version, rank_variables
from toolkit.hardware.system_text import output_of
from toolkit.launch.command import threads_per_rank
from toolkit.launch.process import end_with_parent
from toolkit.plan.interconnect import Interconnect
from toolkit.units import MIB, NOT_AVAILABLE
from toolkit.versions import installed_version

DCGM = "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/"
PROGRAM_SECONDS = 600.0
# The same on every node, so that results compare; far above the sizes at which latency counts.
PAYLOAD_BYTES = 256 * MIB
COLLECTIVE_SECONDS = 60


def run_program(command: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run a program for at most ten minutes; return its exit code and what it printed. No process is left behind."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent, "text": True}
    with subprocess.Popen(command, env=os.environ | variables, errors="replace", **options, **streams) as process:
        try:
            printed, _ = process.communicate(timeout=PROGRAM_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return 124, f"{command[0]} does not end within {PROGRAM_SECONDS:.0f} s"
            raise
    return process.returncode, printed


def _last_line(printed: str, code: int) -> str:
    return (printed.strip().splitlines() or [f"exit code {code}, and nothing printed"])[-1]


@node_check(f"{DCGM}dcgm-diagnostics.html", long=True)
def dcgm(node: NodeReadings, outcome: Outcome) -> None:
    """NVIDIA's diagnostics where they are installed, `dcgmi diag -r 2`: memory, PCIe, software."""
    if not node.has_gpu:
        raise NotMeasured("no NVIDIA GPU")
    if shutil.which("dcgmi") is None:
        raise NotMeasured(f"dcgmi is not installed: {DCGM}getting-started.html")
    code, printed = run_program(["dcgmi", "diag", "-r", "2"])
    rows = re.findall(r"^\|\s*(\S.*?)\s*\|\s*(Fail.*?)\s*\|$", printed, re.MULTILINE)
    failed = [f"{test}: {result}" for test, result in rows]
    outcome.measured = {"exit_code": code, "failed": failed}
    if code != 0 or failed:
        value, fix = ", ".join(failed) or _last_line(printed, code), "`dcgmi diag -r 2` shows GPU and reason"
        outcome.add(ERROR, "NVIDIA's diagnostics fail", value, "all tests pass", fix)


@node_check(
    "`toolkit/plan/interconnect.py`; bus bandwidth as in "
    "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
    long=True,
)
def all_reduce(node: NodeReadings, outcome: Outcome) -> None:
    """Bus bandwidth of an all-reduce of 256 MiB: by nccl-tests' `all_reduce_perf` or by torch between all GPUs, by
    torch and gloo between two processes on a CPU.
    """
    gpus, program = count_gpus(), shutil.which("all_reduce_perf")
    ranks, size = gpus or CPU_PROCESSES, str(PAYLOAD_BYTES)
    if gpus == 1:
        raise NotMeasured("one GPU")
    if gpus and program:
        measured_by = "nccl-tests"
        code, printed = run_program([program, "-b", size, "-e", size, "-g", str(gpus)])
    elif installed_version("torch"):
        measured_by = f"torch, {'nccl' if gpus else 'gloo'}"
        variables = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads_per_rank(ranks))}
        code, printed = run_program([sys.executable, "-m", "toolkit.doctor.speed_checks", str(ranks)], **variables)
    else:
        raise NotMeasured("neither torch nor nccl-tests is installed")
    bandwidth, kind = read_nccl_tests(printed), common_gpu(node.gpu_names) if gpus else None
    expected = None
    if kind:
        collective = Collective(name="all_reduce", purpose="doctor", payload_bytes=PAYLOAD_BYTES, group_size=gpus)
        interconnect = Interconnect(gpu=kind, world_size=gpus, gpus_per_node=gpus)
        expected = collective.sent_bytes / interconnect.seconds(collective)[1]
    outcome.measured = {
        "measured_by": measured_by,
        "ranks": ranks,
        "payload_bytes": PAYLOAD_BYTES,
        "bus_bytes_per_second": bandwidth and round(bandwidth),
        "planned_at_least_bytes_per_second": expected and round(expected),
        "remark": None if gpus else "two processes on the CPU: says nothing about a GPU",
    }
    if code != 0 or bandwidth is None:
        what, fix = f"the all-reduce of {ranks} processes fails", "NCCL_DEBUG=INFO toolkit doctor --long"
        outcome.add(ERROR, what, _last_line(printed, code), "a result", fix)
    elif expected and bandwidth < expected:
        what = f"the all-reduce of {gpus} GPUs is slower than the planner's range"
        fix = "NCCL_DEBUG=INFO toolkit doctor --long; see gpu-links and nccl-variables"
        outcome.add(WARNING, what, f"{bandwidth / GIGA:.0f} GB/s", f"at least {expected / GIGA:.0f} GB/s", fix)


@node_check(
    "`toolkit/hardware/shared_gpu.py`",
)
def ranks_per_gpu(node: NodeReadings, outcome: Outcome) -> None:
    """GPUs, MIG slices, and the NCCL that is loaded, which decides how ranks share a GPU (`--ranks-per-gpu`)."""
    gpus, version = count_gpus(), nccl_version()
    if not gpus:
        raise NotMeasured("no NVIDIA GPU")
    slices, way = (output_of("nvidia-smi", "-L") or "").count("(UUID: MIG-"), default_way(version)
    nccl = version and ".".join(map(str, version))
    outcome.measured = {"gpus": gpus, "mig_slices": slices, "nccl": nccl, "way": way}
    fix = "`toolkit compare --ranks-per-gpu 2`: memory, losses and parity of real ranks, without speeds"
    value = f"NCCL {nccl or NOT_AVAILABLE}, {WAY_VARIABLE}={way}"
    outcome.add(NOTE, "one GPU: ranks can share it", value, "a GPU for each rank", fix, when=gpus == 1)
    if not node.options.long or not installed_version("torch"):
        return
    failures, command = [], [sys.executable, "-m", "toolkit.doctor.speed_checks", "2"]
    for tried in sorted(WAYS, key=lambda name: name != way):
        code, printed = run_program(command, TOOLKIT_RANKS_PER_GPU="2", **{WAY_VARIABLE: tried})
        if code == 0 and read_nccl_tests(printed):
            outcome.measured["works_by"], fix = tried, f"export {WAY_VARIABLE}={tried}"
            outcome.add(NOTE, "two ranks share a GPU in another way only", tried, way, fix, when=tried != way)
            return
        failures.append(_last_line(printed, code))
    fix = "a newer NCCL; or under ddp `-- --ddp_backend gloo`"
    outcome.add(WARNING, "two ranks cannot share a GPU", failures[0], "an all-reduce of both", fix)


def read_nccl_tests(printed: str) -> float | None:
    """Return the average bus bandwidth in bytes per second; None if a value is wrong, or nothing is reported.

    >>> read_nccl_tests("# Out of bounds values : 0 OK\\n# Avg bus bandwidth    : 235.1")
    235100000000.0
    """
    bandwidth = re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", printed)
    correct = re.search(r"Out of bounds values\s*:\s*0 OK", printed)
    return float(bandwidth[1]) * GIGA if bandwidth and correct else None


def measure_all_reduce(rank: int, world_size: int, store: str) -> None:
    """Measure as one rank; rank 0 prints the bus bandwidth of the median of five, as nccl-tests do. Imports torch."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= rank_variables(os.environ, nccl=nccl_version())
    import torch
    from torch import distributed

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend, f"file://{store}", timedelta(seconds=COLLECTIVE_SECONDS), world_size, rank)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    payload, seconds = torch.ones(PAYLOAD_BYTES // 4, dtype=torch.float32, device=device), []
    for _ in range(6):
        payload.fill_(1.0)
        wait()
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(payload)
        wait()
        seconds.append(time.perf_counter() - started)
    if payload.min() != world_size or payload.max() != world_size:
        raise RuntimeError(f"the all-reduce of ones over {world_size} ranks returned {float(payload[0])}")
    if rank == 0:
        sent_bytes = 2 * (world_size - 1) / world_size * PAYLOAD_BYTES
        print("# Out of bounds values : 0 OK")
        print(f"# Avg bus bandwidth : {sent_bytes / median(seconds[1:]) / GIGA:.6f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    from torch import multiprocessing

    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        processes = int(sys.argv[1])
        multiprocessing.spawn(measure_all_reduce, (processes, f"{folder}/store"), nprocs=processes)
