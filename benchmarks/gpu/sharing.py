"""Two ranks on one GPU: which way of sharing it works, by an all-reduce of each; one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta

from toolkit.hardware.gpus import count_gpus
from toolkit.hardware.shared_gpu import WAY_VARIABLE, WAYS, default_way, nccl_version, rank_variables

RANKS = 2
COLLECTIVE_SECONDS = 60
PROGRAM_SECONDS = 150


def reduce_ones(rank: int, store: str) -> None:
    """Sum ones over all ranks, as one of them. Raises RuntimeError for a wrong sum."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= rank_variables(os.environ, nccl=nccl_version())
    import torch
    from torch import distributed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", f"file://{store}", timedelta(seconds=COLLECTIVE_SECONDS), RANKS, rank)
    ones = torch.ones(2**20, device="cuda")
    distributed.all_reduce(ones)
    if ones.min() != RANKS or ones.max() != RANKS:
        raise RuntimeError(f"the all-reduce of ones over {RANKS} ranks returned {float(ones[0])}")
    distributed.destroy_process_group()


def examine() -> dict[str, object]:
    """Return the way that works, the default one first; without one the last line of each failure."""
    version = nccl_version()
    way = default_way(version)
    found: dict[str, object] = {"nccl": version and ".".join(map(str, version)), "way": way}
    if not count_gpus():
        return found | {"skipped": "no NVIDIA GPU"}
    failures = []
    for tried in sorted(WAYS, key=lambda name: name != way):
        environment = os.environ | {"TOOLKIT_RANKS_PER_GPU": str(RANKS), WAY_VARIABLE: tried}
        command = [sys.executable, __file__, "--reduce"]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PROGRAM_SECONDS
        )
        if ended.returncode == 0:
            return found | {"works_by": tried, "findings": failures}
        failures.append(f"two ranks cannot share a GPU by {tried}: {(ended.stderr.splitlines() or ['n/a'])[-1]}")
    return found | {"findings": failures}


if __name__ == "__main__":
    if sys.argv[1:] == ["--reduce"]:
        from torch import multiprocessing

        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(reduce_ones, (f"{folder}/store",), nprocs=RANKS)
    else:
        print(json.dumps(examine()))
