"""A/A test of `toolkit compare`: a preset against itself, where at most 1 of 20 comparisons may claim a difference.

    python benchmarks/aa_comparisons.py --model MODEL --work DIR

Each comparison is `toolkit compare --preset P --variant again=P`, with trials interleaved in the order of its own seed.
Finished trials are in the ledgers under DIR: the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import print_table, write_result

from toolkit.compare.results import load_results
from toolkit.demo.assets import default_data_file, prepare_default_model

GOAL = 1
"""Largest number of claimed differences in 20 comparisons."""


def compare(folder: Path, given: argparse.Namespace, seed: int) -> None:
    """Run or resume one comparison."""
    job = ["--model_name_or_path", given.model, "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    job += ["--max_seq_length", "64", "--max_steps", str(given.steps), "--per_device_train_batch_size", "2"]
    options = ["--preset", given.preset, "--variant", f"again={given.preset}", "--baseline", given.preset]
    options += ["--repeats", str(given.repeats), "--order-seed", str(seed), "--num-processes", str(given.num_processes)]
    command = ["compare", *options, "--output", str(folder), "--resume", "--cpu", "--", *job]
    subprocess.run(
        [sys.executable, "-m", "toolkit", *command], check=True, stdout=subprocess.DEVNULL, env=dict(os.environ)
    )


def figures(folder: Path) -> dict[str, Any]:
    """Return what one comparison claims, and the speeds of its trials."""
    results = load_results(folder)
    again = next(row for row in results.rows if row.preset == "again")
    speeds = {
        name: [trial.tokens_per_second for trial in results.trials if trial.preset == name]
        for name in {row.preset for row in results.rows}
    }
    return {
        "parity": again.parity,
        "difference": again.difference,
        "ratio": again.ratio_to_reference,
        "ratio_interval": again.ratio_interval,
        "tokens_per_second": speeds,
        "timed_steps": again.timed_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a comparison claims that a preset differs from itself.")
    parser.add_argument("--model", default=None, help="model folder; the demo's model by default")
    parser.add_argument("--work", type=Path, required=True, help="folder for the comparisons")
    parser.add_argument("--preset", default="ddp")
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    given = parser.parse_args()
    given.model = given.model or str(prepare_default_model())
    found = {}
    for seed in range(given.comparisons):
        folder = given.work / f"seed-{seed}"
        if not (folder / "results.json").exists():
            compare(folder, given, seed)
        found[seed] = figures(folder)
    claims = [seed for seed, shown in found.items() if shown["difference"] != "no difference seen"]
    rows = [
        [
            seed,
            shown["difference"] or "n/a",
            f"{shown['ratio']:.3f}",
            *(f"{end:.3f}" for end in shown["ratio_interval"]),
        ]
        for seed, shown in found.items()
    ]
    print_table(["seed", "difference", "ratio", "low", "high"], rows)
    print(f"{len(claims)} of {len(found)} comparisons claim a difference; at most {GOAL} may")
    print(write_result("aa_comparisons", {"claims": len(claims), "goal": GOAL, "comparisons": found}))


if __name__ == "__main__":
    main()
