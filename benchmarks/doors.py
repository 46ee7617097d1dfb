"""How long a light command takes before it answers, against `accelerate --help`.

    python benchmarks/doors.py --pairs 7

The goal is a fifth of `accelerate --help`. `accelerate launch --help` is shown beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import pairs, print_table, spread, write_result

BIN = Path(sys.executable).parent
GOAL = 0.2
WRONG_NAME = ["train", "--preset", "zeroo2", "--num-processes", "2", "--", "--dataset", "rows.jsonl"]
DOORS = {"toolkit --help": ["--help"], "toolkit presets": ["presets"], "toolkit train --preset zeroo2": WRONG_NAME}
AGAINST = {"accelerate --help": ["--help"], "accelerate launch --help": ["launch", "--help"]}
EXPECTED_EXIT_CODES = {"toolkit train --preset zeroo2": 2}


def seconds(name: str, argv: list[str]) -> float:
    """Wall time of one command from start to exit."""
    started = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode != EXPECTED_EXIT_CODES.get(name, 0):
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return taken


def compare(door: str, against: str, number: int) -> dict[str, Any]:
    """One door against one command of accelerate, after a run of each that fills the caches."""
    ours = [str(BIN / "toolkit"), *DOORS[door]]
    theirs = [str(BIN / "accelerate"), *AGAINST[against]]
    pairs(1, lambda: seconds(door, ours), lambda: seconds(against, theirs))
    measured = pairs(number, lambda: seconds(door, ours), lambda: seconds(against, theirs))
    return {
        "door": door,
        "against": against,
        "seconds": spread([own for own, _ in measured]),
        "seconds_against": spread([other for _, other in measured]),
        "ratio": spread([own / other for own, other in measured]),
        "pairs": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of light commands against accelerate's.")
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    results = [compare(door, against, given.pairs) for against in AGAINST for door in DOORS]
    rows = [
        [
            result["door"],
            f"{result['seconds']['median']:.3f} s",
            result["against"],
            f"{result['seconds_against']['median']:.3f} s",
            *(f"{result['ratio'][name]:.3f}" for name in ("median", "min", "max")),
            "reached" if result["ratio"]["median"] <= GOAL else "missed",
        ]
        for result in results
    ]
    print_table(["door", "median", "against", "median", "median ratio", "min", "max", f"goal {GOAL}"], rows)
    print(write_result("doors", {"goal": GOAL, "results": results}))


if __name__ == "__main__":
    main()
