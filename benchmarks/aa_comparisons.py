"""A/A test of `toolkit compare`: a preset against itself, where at most 1 of 20 comparisons may claim a difference.

    python benchmarks/aa_comparisons.py --work DIR [--model MODEL]

Each comparison is `toolkit compare --preset P --variant again=P`, with trials interleaved in the order of its own seed.
Finished trials are in the ledgers under DIR: the same command resumes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import print_table, write_result
from small_job import words

from toolkit.compare.results import load_results
from toolkit.demo.assets import prepare_default_model

GOAL = 1  # largest number of claimed differences in 20 comparisons


def compare(folder: Path, given: argparse.Namespace, seed: int) -> None:
    """Run or resume one comparison."""
    options = ["--preset", given.preset, "--variant", f"again={given.preset}", "--baseline", given.preset]
    options += ["--repeats", str(given.repeats), "--order-seed", str(seed), "--num-processes", str(given.num_processes)]
    command = [sys.executable, "-m", "toolkit", "compare", *options, "--output", str(folder), "--resume", "--cpu", "--"]
    job = words(model_name_or_path=given.model, max_steps=given.steps, per_device_train_batch_size=2)
    subprocess.run([*command, *job], check=True, stdout=subprocess.DEVNULL)


def figures(folder: Path, seed: int) -> dict[str, Any]:
    """Return what one comparison claims, and the speeds of its trials."""
    results = load_results(folder)
    again = next(row for row in results.rows if row.preset == "again")
    speeds: dict[str, list[float | None]] = {row.preset: [] for row in results.rows}
    for trial in results.trials:
        speeds[trial.preset].append(trial.tokens_per_second)
    claim = {"parity": again.parity, "difference": again.difference, "ratio": again.ratio_to_reference}
    return {"seed": seed, **claim, "ratio_interval": again.ratio_interval, "tokens_per_second": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a comparison claims that a preset differs from itself.")
    parser.add_argument("--model", help="model folder; the demo's model by default")
    parser.add_argument("--work", type=Path, required=True, help="folder for the comparisons")
    parser.add_argument("--preset", default="ddp")
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    given = parser.parse_args()
    given.model = given.model or prepare_default_model()
    rows = []
    for seed in range(given.comparisons):
        folder = given.work / f"seed-{seed}"
        if not (folder / "results.json").exists():
            compare(folder, given, seed)
        rows.append(figures(folder, seed))
    claims = sum(row["difference"] != "no difference seen" for row in rows)
    shown = [(row["difference"] or "n/a", f"{row['ratio']:.3f}", *row["ratio_interval"]) for row in rows]
    print_table(["difference", "ratio", "low", "high"], shown)
    print(f"{claims} of {len(rows)} comparisons claim a difference; at most {GOAL} may")
    print(write_result("aa_comparisons", {"claims": claims, "goal": GOAL}, rows))


if __name__ == "__main__":
    main()
