"""An all-reduce between the GPUs of this node by torch, which `toolkit doctor --long` runs as a program of its own.

    python -m toolkit.doctor.speed_probe 2

Without a GPU it runs in processes on the CPU with gloo: that tests collectives, and says nothing about a GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta
from statistics import median

from toolkit.hardware.gpu_table import GIGA
from toolkit.units import MIB

# The same on every node, so that results compare; far above the sizes at which latency counts.
PAYLOAD_BYTES = 256 * MIB
COLLECTIVE_SECONDS = 60


def probe(rank: int, world_size: int, store: str) -> None:
    """Measure as one rank; rank 0 prints the bus bandwidth of the median of five, as nccl-tests do."""
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
        sent_bytes = 2 * (world_size - 1) / world_size * PAYLOAD_BYTES
        print("# Out of bounds values : 0 OK")
        print(f"# Avg bus bandwidth : {sent_bytes / median(seconds[1:]) / GIGA:.6f}", flush=True)
    distributed.destroy_process_group()


def main(world_size: int) -> None:
    """Start the ranks, and raise the error of the first that fails."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        multiprocessing.spawn(probe, (world_size, f"{folder}/store"), nprocs=world_size)


if __name__ == "__main__":
    main(int(sys.argv[1]))
