"""Step times of DDP over a shaped link, against the communication model's prediction.

    python benchmarks/link_speed.py --work DIR          # root, iproute2 and util-linux; minutes

Two machines made of namespaces (tests/cluster/machines.py), one CPU rank on each, train a random Llama of 3.2 M
parameters in one run. While it trains, the rate of both cables changes every few steps, in turn, so that every rate
meets the same load of the host. The prediction adds to the step without a limit what `toolkit.plan` says of the
collectives: nothing to all of them hidden behind computation, at the full rate to half of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comm_hooks import small_model
from record import print_table, write_result

from toolkit.demo.assets import default_data_file
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.job import TrainingJob, TrainingSetup
from toolkit.presets import load_preset
from toolkit.record.measurements import read_rows

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from cluster.machines import Machines, shaped, wait_until  # noqa: E402

NODES = ("node1", "node2")
# Bits per second of the cable; None is not limited.
RATES: dict[str, float | None] = {"no limit": None, "1 Gbit/s": 1e9, "200 Mbit/s": 2e8}
BATCH, LENGTH = 2, 64
# What TCP over Ethernet leaves for data: 1,448 of the 1,514 bytes that the token bucket counts.
PAYLOAD_SHARE = 1448 / 1514


def predicted_range(base_seconds: float, bits_per_second: float, model: Path) -> tuple[float, float]:
    """Return the lowest and highest step time at a rate; `base_seconds` is the step without a limit."""
    rate = int(bits_per_second / 8 * PAYLOAD_SHARE)
    link = Interconnect(gpu=find_gpu("h100"), world_size=2, gpus_per_node=1, network_bytes_per_second=rate)
    found = [link.seconds(collective) for collective in step_collectives(setup_of(model))]
    return max(base_seconds, sum(low for low, _ in found)), base_seconds + sum(high for _, high in found)


def setup_of(model: Path) -> TrainingSetup:
    job = TrainingJob(per_device_train_batch_size=BATCH, max_seq_length=LENGTH)
    return TrainingSetup(shape=read_model(str(model)), preset=load_preset("ddp"), world_size=2, job=job)


def measure(model: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the step times at each rate, without the step in which the rate changed."""
    output = arguments.work / "run"
    shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run
    found: dict[str, list[float]] = {rate: [] for rate in RATES}
    with Machines(Path(tempfile.mkdtemp(prefix="link-speed-")), NODES) as machines:
        launchers = [machines.start(node, *command(model, output), env=environment()) for node in NODES]
        try:
            wait_until(lambda: len(seconds_of(output)) >= 3, "the run trains", 300)
            for _ in range(arguments.rounds):
                for rate, bits in RATES.items():
                    with contextlib.nullcontext() if bits is None else shaped(machines, NODES, f"{bits:.0f}bit"):
                        found[rate] += next_steps(output, arguments.steps)
        finally:
            for launcher in launchers:
                machines.stop(launcher)
    return found


def next_steps(output: Path, number: int) -> list[float]:
    """Wait for some steps, and return their times without that of the step in progress."""
    start = len(seconds_of(output)) + 1
    wait_until(lambda: len(seconds_of(output)) >= start + number, f"{number} steps", 300)
    return seconds_of(output)[start : start + number]


def seconds_of(output: Path) -> list[float]:
    path = output / "ranks" / "rank0.jsonl"
    return [row.seconds for row in read_rows(path)] if path.exists() else []


def command(model: Path, output: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-id", "link", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "-m", "toolkit.train"]
    job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": output}
    job |= {"max_steps": 100_000, "max_seq_length": LENGTH, "per_device_train_batch_size": BATCH}
    job |= {"lr_scheduler_type": "constant", "save_strategy": "no", "save_model": "false"}
    return [sys.executable, *torchrun, *(word for name, value in job.items() for word in (f"--{name}", str(value)))]


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "TOOLKIT_PRESET": "ddp", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own


def rows_of(found: dict[str, list[float]], model: Path) -> list[dict[str, Any]]:
    """Return measured and predicted step times of each rate."""
    base = statistics.median(found["no limit"])
    rows = []
    for rate, bits in RATES.items():
        low, high = (None, None) if bits is None else predicted_range(base, bits, model)
        measured = statistics.median(found[rate])
        spread = {"min": min(found[rate]), "max": max(found[rate])}
        row = {"rate": rate, "steps": len(found[rate]), "step_seconds_median": measured, **spread}
        rows.append(row | {"predicted_low": low, "predicted_high": high})
    return rows


def shown(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the run")
    parser.add_argument("--steps", type=int, default=8, help="steps at each rate in a round")
    parser.add_argument("--rounds", type=int, default=4, help="times that each rate has its turn")
    arguments = parser.parse_args(argv)
    started, model = time.monotonic(), small_model(arguments.work / "model")
    rows = rows_of(measure(model, arguments), model)
    planned = communication_bytes(step_collectives(setup_of(model)))
    figures = {"planned_bytes_per_step": planned, "rows": rows, "seconds": time.monotonic() - started}
    write_result("link_speed", figures)
    columns = ("step_seconds_median", "min", "max", "predicted_low", "predicted_high")
    print_table(["rate", *columns], [[row["rate"], *(shown(row[name]) for name in columns)] for row in rows])


if __name__ == "__main__":
    main()
