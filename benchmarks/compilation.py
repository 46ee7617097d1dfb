"""Seconds until the first step of a compiled model ends, against the same run without compilation.

    python benchmarks/compilation.py --model MODEL --rounds 3 --work DIR [--before CHECKOUT]

The job is a tiny Llama under `ddp` on two CPU ranks. Each run starts with an empty cache of torch's compiler, so that
g++ compiles every kernel; only torch's precompiled header, which is made once per node, is reused. CPU seconds are of
the whole run: ranks, launcher and compilers. `--before` also runs the source tree of an earlier commit, whose Trainer
compiled the model as a whole. Sides take turns, so that none always runs on the busier node.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result

from toolkit.demo.assets import default_data_file

ROOT = Path(__file__).parents[1]
RANKS = 2
STEPS = 5
COMPILE = ["--torch_compile", "true"]


def run(source: Path, model: str, folder: Path, extra: list[str], *, preset: str) -> dict[str, Any]:
    """Train once from a source tree, and return its figures."""
    job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": folder}
    job |= {"max_seq_length": 64, "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    job |= {"save_strategy": "no", "save_model": "false"}
    words = [word for name, value in job.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", str(RANKS), "--cpu"]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPATH": str(source), "TORCHINDUCTOR_CACHE_DIR": cache}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [*command, "--", *words, *extra]
        done = subprocess.run(argv, cwd=source, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{folder} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return figures(folder) | {
        "run_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "load_average_1_minute": os.getloadavg()[0],
    }


def figures(folder: Path) -> dict[str, Any]:
    """Return the first step's seconds, the later ones', the losses, and what the compiler did on the slowest rank."""
    paths = [folder / "ranks" / f"rank{rank}.jsonl" for rank in range(RANKS)]
    steps = list(zip(*([json.loads(line) for line in path.read_text().splitlines()] for path in paths), strict=True))
    attested = json.loads((folder / "attestation.json").read_text())["ranks"]
    return {
        "first_step_seconds": max(row["seconds"] for row in steps[0]),
        "first_step_cpu_seconds": max(row["cpu_seconds"] for row in steps[0]),
        "last_step_seconds": max(row["seconds"] for row in steps[-1]),
        "losses": [sum(row["loss"] for row in step) / RANKS for step in steps],
        "graph_breaks": max((rank.get("graph_breaks") or 0 for rank in attested), default=None),
        "graph_breaks_after_first_step": sum(row.get("graph_breaks") or 0 for step in steps[1:] for row in step),
    }


def largest_difference(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="First step of a compiled model, against the uncompiled one.")
    parser.add_argument("--model", required=True, help="folder of a tiny model")
    parser.add_argument("--preset", default="ddp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="source tree of an earlier commit, to compile with too")
    parser.add_argument("--work", type=Path, required=True, help="keeps the runs; must be empty")
    given = parser.parse_args()
    sides = {"uncompiled": (ROOT, []), "layer by layer": (ROOT, COMPILE)}
    if given.before:
        sides["before"] = (given.before, COMPILE)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(given.rounds):
        turns = list(sides.items())[:: 1 if number % 2 == 0 else -1]
        for name, (source, extra) in turns:
            folder = given.work / f"{name.replace(' ', '-')}-{number}"
            found[name].append(run(source, given.model, folder, extra, preset=given.preset))
    measured = ("first_step_seconds", "first_step_cpu_seconds", "run_cpu_seconds", "last_step_seconds")
    rows = [
        [name, *(f"{spread([one[key] for one in runs])['median']:.1f}" for key in measured)]
        for name, runs in found.items()
    ]
    print_table(["side, median seconds", *measured], rows)
    eager = found["uncompiled"][0]["losses"]
    result = {
        "preset": given.preset,
        "sides": {
            name: {key: spread([one[key] for one in runs]) for key in measured}
            | {"runs": runs, "largest_loss_difference": max(largest_difference(one["losses"], eager) for one in runs)}
            for name, runs in found.items()
        },
    }
    print(write_result("compilation", result))


if __name__ == "__main__":
    main()
