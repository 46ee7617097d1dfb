"""An all-reduce between the GPUs of this node, by nccl-tests or torch, in child processes: only they import torch.

    python -m toolkit.doctor.speed_probe 2

Without a GPU it runs in two processes on the CPU with gloo: that tests collectives, and says nothing about a GPU.
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
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

from toolkit.hardware.gpu_table import GIGA
from toolkit.hardware.gpus import CPU_PROCESSES
from toolkit.run.environment import threads_per_rank
from toolkit.run.process import end_with_parent
from toolkit.units import MIB

# The same on every node, so that results compare; far above the sizes at which latency counts.
PAYLOAD_BYTES = 256 * MIB
PROGRAM_SECONDS = 600.0
COLLECTIVE_SECONDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """An all-reduce of `PAYLOAD_BYTES` between the processes of one node."""

    measured_by: str
    ranks: int
    bus_bytes_per_second: float | None
    """As nccl-tests define it: what each rank sends, 2 (N-1)/N of the payload, per second. None if it failed."""
    failure: str | None = None


def measure_all_reduce(gpus: int) -> AllReduce:
    """Measure between the visible GPUs, with nccl-tests where they are installed, or two processes on the CPU."""
    program = shutil.which("all_reduce_perf")
    if gpus and program is not None:
        command = [program, "-b", str(PAYLOAD_BYTES), "-e", str(PAYLOAD_BYTES), "-g", str(gpus)]
        code, printed = run_program(command)
        measured_by, ranks, bandwidth = "nccl-tests", gpus, read_nccl_tests(printed)
    else:
        ranks = gpus or CPU_PROCESSES
        variables = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads_per_rank(ranks))}
        code, printed = run_program([sys.executable, "-m", "toolkit.doctor.speed_probe", str(ranks)], variables)
        measured_by = f"torch, {'nccl' if gpus else 'gloo'}"
        seconds = next((float(line[8:]) for line in printed.splitlines() if line.startswith("seconds ")), None)
        bandwidth = seconds and 2 * (ranks - 1) / ranks * PAYLOAD_BYTES / seconds
    if code == 0 and bandwidth is not None:
        return AllReduce(measured_by=measured_by, ranks=ranks, bus_bytes_per_second=bandwidth)
    failure = (printed.strip().splitlines() or [f"it ended without a message, with exit code {code}"])[-1]
    return AllReduce(measured_by=measured_by, ranks=ranks, bus_bytes_per_second=None, failure=failure)


def read_nccl_tests(printed: str) -> float | None:
    """Return the average bus bandwidth in bytes per second; None if a value is wrong, or nothing is reported.

    >>> read_nccl_tests("# Out of bounds values : 0 OK\\n# Avg bus bandwidth    : 235.1")
    235100000000.0
    """
    bandwidth = re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", printed)
    correct = re.search(r"Out of bounds values\s*:\s*0 OK", printed)
    return float(bandwidth[1]) * GIGA if bandwidth and correct else None


def run_program(command: Sequence[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a program for at most ten minutes; return its exit code and what it printed. No process is left behind."""
    with subprocess.Popen(
        command,
        env=os.environ | (variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=end_with_parent,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=PROGRAM_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return 124, f"{command[0]} does not end within {PROGRAM_SECONDS:.0f} s"
            raise
    return process.returncode, printed


# -- in the child


def probe(rank: int, world_size: int, store: str) -> None:
    """Measure as one rank; rank 0 prints the median of five."""
    import torch
    from torch import distributed

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    if device == "cuda":
        torch.cuda.set_device(rank)
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
        print(f"seconds {median(seconds[1:])}", flush=True)
    distributed.destroy_process_group()


def main(world_size: int) -> None:
    """Start the ranks, and raise the error of the first that fails."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        multiprocessing.spawn(probe, (world_size, f"{folder}/store"), nprocs=world_size)


if __name__ == "__main__":
    main(int(sys.argv[1]))
