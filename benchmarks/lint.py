"""How long `toolkit lint` takes on one file, against `accelerate --help`.

    python benchmarks/lint.py --pairs 7

The goal is a fifth of `accelerate --help`.
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
BIN = Path(sys.executable).parent
GOAL = 0.2
# One of each kind: an accelerate YAML, a pair, a JSON, Trainer arguments.
FILES = [
    "accelerate_configs/fsdp2.yaml",
    "accelerate_configs/zero3.yaml",
    "ds_configs/zero3.json",
    "examples/lora.yaml",
]
AGAINST = [str(BIN / "accelerate"), "--help"]


def seconds(argv: list[str]) -> float:
    """Wall time of one command from start to exit."""
    started = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return taken


def compare(file: str, number: int) -> dict[str, Any]:
    """One file against accelerate's help, after a run of each that fills the caches."""
    ours = [sys.executable, "-m", "toolkit", "lint", file]
    pairs(1, lambda: seconds(ours), lambda: seconds(AGAINST))
    measured = pairs(number, lambda: seconds(ours), lambda: seconds(AGAINST))
    return {
        "file": file,
        "seconds": spread([own for own, _ in measured]),
        "seconds_against": spread([other for _, other in measured]),
        "ratio": spread([own / other for own, other in measured]),
        "pairs": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of `toolkit lint` on one file.")
    parser.add_argument("--pairs", type=int, default=7)
    number = parser.parse_args().pairs
    results = [compare(file, number) for file in FILES]
    rows = [
        [
            result["file"],
            f"{result['seconds']['median']:.3f} s",
            f"{result['seconds_against']['median']:.3f} s",
            *(f"{result['ratio'][name]:.3f}" for name in ("median", "min", "max")),
            "reached" if result["ratio"]["median"] <= GOAL else "missed",
        ]
        for result in results
    ]
    print_table(["file", "lint", "accelerate --help", "median ratio", "min", "max", f"goal {GOAL}"], rows)
    print(write_result("lint", {"goal": GOAL, "against": "accelerate --help", "results": results}))


if __name__ == "__main__":
    main()
