"""Matmul on every GPU at once, and an all-reduce between them, in child processes: torch is imported only there.

    python -m toolkit.doctor.speed_probe --rank 0 --world-size 2 --store /tmp/store --device cpu --shape 512,512,512

Without a GPU the same code runs in two processes on the CPU with gloo: that tests collectives on this node, and says
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.hardware.gpu_table import TERA, known_gpu
from toolkit.hardware.gpus import CPU_PROCESSES, count_gpus
from toolkit.launch.environment import threads_per_rank
from toolkit.launch.process import end_with_parent
from toolkit.units import MIB

# The same on every node, so that results compare; far above the sizes at which latency counts.
PAYLOAD_BYTES = 256 * MIB
PROBE_SECONDS = 240.0
COLLECTIVE_SECONDS = 60
ACHIEVABLE_SOURCE = (
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator"
    "#maximum-achievable-matmul-flops-comparison-table"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievableMatmul:
    """The best bf16 matmul that was measured on a GPU, and its shape."""

    tflops: float
    shape: tuple[int, int, int]
    """m, n, k."""


_H100 = AchievableMatmul(tflops=794.5, shape=(2048, 2048, 13312))
# Name in our table of GPUs -> the best of a search over shapes, torch 2.5 to 2.7 (ACHIEVABLE_SOURCE; H200: "the same").
ACHIEVABLE_MATMUL = {
    **dict.fromkeys(("a100-40gb", "a100-80gb"), AchievableMatmul(tflops=271.2, shape=(1024, 10240, 5120))),
    **dict.fromkeys(("a100-40gb-pcie", "a100-80gb-pcie"), AchievableMatmul(tflops=252.9, shape=(2048, 5120, 6144))),
    **dict.fromkeys(("h100-sxm", "h200"), _H100),
    "b200": AchievableMatmul(tflops=1745.0, shape=(1792, 16128, 3072)),
}
OTHER_GPU_SHAPE = (8192, 8192, 8192)
CPU_SHAPE = (1024, 1024, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpeed:
    """What the processes measured."""

    device: str
    """`cuda` or `cpu`."""
    world_size: int
    shape: tuple[int, int, int]
    matmul_tflops: tuple[float, ...]
    """By rank; bf16 on a GPU, fp32 on the CPU. Shorter than `world_size` if a process failed."""
    all_reduce_seconds: float | None
    """Of the slowest rank; None with one rank, and where it failed."""
    failure: str | None = None

    @property
    def bus_bytes_per_second(self) -> float | None:
        """Bus bandwidth as nccl-tests define it: what each rank sends, 2 (N-1)/N of the payload, per second."""
        if self.all_reduce_seconds is None:
            return None
        return 2 * (self.world_size - 1) / self.world_size * PAYLOAD_BYTES / self.all_reduce_seconds


def achievable_matmul(gpu_name: str | None) -> AchievableMatmul | None:
    """Return the achievable figure of a GPU by the name that nvidia-smi prints; None if it is not known.

    >>> achievable_matmul("NVIDIA H100 80GB HBM3").tflops
    794.5
    """
    gpu = known_gpu(gpu_name or "")
    return None if gpu is None else ACHIEVABLE_MATMUL.get(gpu.name)


def measure_speed(gpu_name: str | None) -> NodeSpeed:
    """Measure in one process per visible GPU, or in two on the CPU. Takes about a minute."""
    device, world_size = ("cuda", count_gpus()) if gpu_name and count_gpus() else ("cpu", CPU_PROCESSES)
    known = achievable_matmul(gpu_name)
    shape = CPU_SHAPE if device == "cpu" else known.shape if known else OTHER_GPU_SHAPE
    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        ranks = [_start_rank(Path(folder), rank, world_size, device, shape) for rank in range(world_size)]
        rows, failure = _collect(ranks, Path(folder))
    tflops = [row["matmul_tflops"] for row in rows if "matmul_tflops" in row]
    seconds = [row["all_reduce_seconds"] for row in rows if "all_reduce_seconds" in row]
    return NodeSpeed(
        device=device,
        world_size=world_size,
        shape=shape,
        matmul_tflops=tuple(tflops),
        all_reduce_seconds=max(seconds) if seconds and failure is None else None,
        failure=failure,
    )


def _start_rank(
    folder: Path, rank: int, world_size: int, device: str, shape: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    arguments = {"rank": rank, "world-size": world_size, "store": folder / "store", "device": device}
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "toolkit.doctor.speed_probe", *words, "--shape", ",".join(map(str, shape))]
    environment = dict(os.environ)
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads_per_rank(world_size))}
    with (folder / f"{rank}.out").open("wb") as output, (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            preexec_fn=end_with_parent,
        )


def _collect(ranks: list[subprocess.Popen[bytes]], folder: Path) -> tuple[list[dict[str, float]], str | None]:
    """The rows of all ranks in order, and why the first of them failed. No process is left behind."""
    deadline, failure = time.monotonic() + PROBE_SECONDS, None
    try:
        while any(rank.poll() is None for rank in ranks) and failure is None:
            failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
            if failed:
                failure = f"rank {failed[0]}: {_last_line(folder / f'{failed[0]}.err')}"
            elif time.monotonic() > deadline:
                failure = f"no answer within {PROBE_SECONDS:.0f} s"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode != 0]
    if failed and failure is None:
        failure = f"rank {failed[0]}: {_last_line(folder / f'{failed[0]}.err')}"
    return [row for number in range(len(ranks)) for row in _rows(folder / f"{number}.out")], failure


def _rows(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text("utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a message"


# -- in the child


def probe(rank: int, world_size: int, *, store: str, device: str, shape: tuple[int, int, int]) -> None:
    """Measure as one rank, and print a row of JSON for each result."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(rank)
    print(json.dumps({"matmul_tflops": _matmul_tflops(torch, device, shape)}), flush=True)
    if world_size > 1:
        print(json.dumps({"all_reduce_seconds": _all_reduce_seconds(torch, rank, world_size, store, device)}))


def _matmul_tflops(torch: Any, device: str, shape: tuple[int, int, int]) -> float:
    """Mean of 100 multiplications after 50, as the published figures were measured; on a CPU 5 after 2."""
    (m, n, k), dtype = shape, torch.bfloat16 if device == "cuda" else torch.float32
    left, right = torch.randn(m, k, dtype=dtype, device=device), torch.randn(k, n, dtype=dtype, device=device)
    untimed, timed = (50, 100) if device == "cuda" else (2, 5)
    result = torch.empty(m, n, dtype=dtype, device=device)
    for _ in range(untimed):
        torch.mm(left, right, out=result)
    _wait(torch, device)
    started = time.perf_counter()
    for _ in range(timed):
        torch.mm(left, right, out=result)
    _wait(torch, device)
    return 2 * m * n * k * timed / (time.perf_counter() - started) / TERA


def _all_reduce_seconds(torch: Any, rank: int, world_size: int, store: str, device: str) -> float:
    from datetime import timedelta

    distributed = torch.distributed
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    payload = torch.ones(PAYLOAD_BYTES // 4, dtype=torch.float32, device=device)
    untimed, timed = (5, 20) if device == "cuda" else (1, 3)
    seconds = []
    for step in range(untimed + timed):
        payload.fill_(1.0)
        _wait(torch, device)
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(payload)
        _wait(torch, device)
        if step >= untimed:
            seconds.append(time.perf_counter() - started)
    if float(payload[0]) != world_size or float(payload[-1]) != world_size:
        raise RuntimeError(f"the all-reduce of ones over {world_size} ranks returned {float(payload[0])}")
    distributed.destroy_process_group()
    return median(seconds)


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str]) -> None:
    """Read the command line of one rank, and measure."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.doctor.speed_probe", description=__doc__)
    for name in ("rank", "world-size"):
        parser.add_argument(f"--{name}", type=int, required=True, help="this process, and how many there are")
    for name in ("store", "device", "shape"):
        parser.add_argument(f"--{name}", required=True, help="rendezvous file; cuda or cpu; m,n,k")
    given = parser.parse_args(argv)
    m, n, k = map(int, given.shape.split(","))
    probe(given.rank, given.world_size, store=given.store, device=given.device, shape=(m, n, k))


if __name__ == "__main__":
    main(sys.argv[1:])
