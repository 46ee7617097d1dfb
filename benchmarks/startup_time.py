"""Time light commands from start to exit, against `accelerate --help`.

    python benchmarks/startup_time.py --pairs 7

The goal is a fifth of `accelerate --help`: a command that answers a question must not import torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import pairs, print_table, spread, write_result

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.2
BASELINE = [str(Path(sys.executable).parent / "accelerate"), "--help"]
# Each command and its exit code: help, a table, a refused preset name, and a file of each kind that `lint` reads.
COMMANDS = {
    "--help": 0,
    "presets": 0,
    "train --preset zeroo2 --num-processes 2 -- --dataset rows.jsonl": 2,
    "lint accelerate_configs/fsdp2.yaml": 0,
    "lint accelerate_configs/zero3.yaml": 0,
    "lint ds_configs/zero3.json": 0,
    "lint examples/lora_8b.yaml": 0,
}


def seconds(argv: list[str], exit_code: int = 0) -> float:
    """Return the wall time of one command from start to exit."""
    started = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode != exit_code:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return taken


def compare(command: str, exit_code: int, number: int) -> dict[str, Any]:
    """Time one command against accelerate's help, after a run of each that fills the caches."""

    def ours() -> float:
        return seconds([sys.executable, "-m", "toolkit", *command.split()], exit_code)

    pairs(1, ours, lambda: seconds(BASELINE))
    measured = pairs(number, ours, lambda: seconds(BASELINE))
    return {
        "command": f"toolkit {command}",
        "seconds": spread([own for own, _ in measured]),
        "baseline_seconds": spread([baseline for _, baseline in measured]),
        "ratio": spread([own / baseline for own, baseline in measured]),
        "pairs": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of light commands against `accelerate --help`.")
    parser.add_argument("--pairs", type=int, default=7, help="interleaved measurements of each command")
    given = parser.parse_args()
    results = [compare(command, exit_code, given.pairs) for command, exit_code in COMMANDS.items()]
    rows = [
        [
            result["command"],
            f"{result['seconds']['median']:.3f} s",
            f"{result['baseline_seconds']['median']:.3f} s",
            *(f"{result['ratio'][name]:.3f}" for name in ("median", "min", "max")),
            "reached" if result["ratio"]["median"] <= GOAL else "missed",
        ]
        for result in results
    ]
    print_table(["command", "median", "accelerate --help", "median ratio", "min", "max", f"goal {GOAL}"], rows)
    print(write_result("startup_time", {"goal": GOAL, "baseline": "accelerate --help", "results": results}))


if __name__ == "__main__":
    main()
