"""A run forked from a fork server against the same run started cold: losses, step times, memory, and seconds saved.

    python benchmarks/warm_starts.py --preset ddp zero2 --pairs 8 --work DIR

Both sides are `toolkit.launch.launch.run_training` on the same job, in alternating order (cold warm, warm cold, ...).
The ratio's 95 % confidence interval is a paired t interval of log ratios: it must contain 1 for the two to be the same
measurement. The same command with the same DIR resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from record import pairs, print_table, spread, write_result, write_table

from toolkit.compare.significance import geometric_mean, mean_interval
from toolkit.demo.assets import default_data_file, prepare_default_model
from toolkit.launch.environment import inherited_environment
from toolkit.launch.launch import command_of, run_training
from toolkit.launch.options import TrainOptions
from toolkit.launch.warm_start import WarmStart

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "comparison-time.md"
TABLE = "warm_starts"
RANKS = 2
UNTIMED_STEPS = 2
CONFIDENCE = 0.95
# Seconds of a run outside its steps, by the engine.
GOALS = {"none": 4.0, "ddp": 4.0, "deepspeed": 7.0, "fsdp2": 4.0}


def run(preset: str, model: str, steps: int, folder: Path, warm_start: WarmStart | None) -> dict[str, Any]:
    """Train once, unless the folder has the run already, and return its figures."""
    if not (folder / "run.json").exists() or json.loads((folder / "run.json").read_text())["status"] != "completed":
        job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": folder}
        job |= {"max_seq_length": 64, "max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 1e-4}
        job |= {"untimed_steps": UNTIMED_STEPS, "save_strategy": "no", "save_model": "false", "lora_r": 8}
        words = [word for name, value in job.items() for word in (f"--{name}", str(value))]
        options = TrainOptions(preset=preset, num_processes=RANKS, training_arguments=tuple(words), cpu=True)
        command, server = command_of(options), None
        if warm_start is not None:
            server = warm_start.socket_path(inherited_environment() | command.environment, on_line=print)
        run_training(command, options=options, output_dir=folder, on_line=lambda _: None, fork_server=server)
    return figures(folder)


def figures(folder: Path) -> dict[str, Any]:
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "completed", f"{folder} ended as {facts['status']}"
    paths = [folder / "ranks" / f"rank{rank}.jsonl" for rank in range(RANKS)]
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    step_seconds = [max(row["seconds"] for row in step) for step in zip(*ranks, strict=True)]
    return {
        "warm_start": facts["warm_start"],
        "wall_seconds": facts["wall_seconds"],
        "seconds_outside_steps": facts["wall_seconds"] - sum(step_seconds),
        "step_seconds_median": statistics.median(step_seconds[UNTIMED_STEPS:]),
        "first_step_seconds": step_seconds[0],
        "peak_host_bytes": max(row["peak_host_bytes"] for rank in ranks for row in rank),
        "losses": [[row["loss"] for row in rank] for rank in ranks],
    }


def ratio(measured: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> dict[str, float]:
    """Return the geometric mean of warm over cold with its 95 % confidence interval, of two pairs or more."""
    ratios = [warm[name] / cold[name] for cold, warm in measured]
    interval = mean_interval(ratios, CONFIDENCE)
    assert interval is not None, "one pair has no confidence interval"
    return {"ratio": geometric_mean(ratios), "low": interval[0], "high": interval[1]}


HEADER = (
    "preset",
    "pairs",
    "equal losses",
    "outside its steps, cold (s)",
    "warm (s)",
    "step time, warm / cold (95 % CI)",
    "peak host memory, warm / cold (95 % CI)",
)


def table_rows(result: dict[str, Any]) -> list[list[object]]:
    """Return one row per preset: median seconds, and ratios with their confidence intervals."""
    rows: list[list[object]] = []
    for preset, found in result["presets"].items():
        outside = found["seconds_outside_steps"]
        row = [f"`{preset}`", len(found["pairs"]), "yes" if found["equal_losses"] else "no"]
        row += [f"{outside[side]['median']:.1f}" for side in ("cold", "warm")]
        for name in ("step_seconds_median", "peak_host_bytes"):
            row.append("{ratio:.3f} ({low:.3f} to {high:.3f})".format(**found[name]))
        rows.append(row)
    return rows


def measure(preset: str, given: argparse.Namespace, warm_start: WarmStart) -> dict[str, Any]:
    """Run the pairs of one preset and compare their sides."""
    numbers = {"cold": iter(range(given.pairs)), "warm": iter(range(given.pairs))}

    def one(side: str) -> dict[str, Any]:
        folder = given.work / f"{preset}-{side}-{next(numbers[side])}"
        return run(preset, given.model, given.steps, folder, warm_start if side == "warm" else None)

    measured = pairs(given.pairs, lambda: one("cold"), lambda: one("warm"))
    assert all(warm["warm_start"] and not cold["warm_start"] for cold, warm in measured)
    outside = [[side["seconds_outside_steps"] for side in pair] for pair in measured]
    ratios = ("step_seconds_median", "first_step_seconds", "peak_host_bytes")
    kept = [[{name: value for name, value in side.items() if name != "losses"} for side in pair] for pair in measured]
    return {
        "equal_losses": all(cold["losses"] == warm["losses"] for cold, warm in measured),
        "seconds_outside_steps": {
            side: spread(seconds) for side, seconds in zip(("cold", "warm"), zip(*outside, strict=True), strict=True)
        },
        **{name: ratio(measured, name) for name in ratios},
        "pairs": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs forked from a fork server against cold starts.")
    parser.add_argument("--preset", nargs="+", default=["ddp", "zero2"])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--model", default=None, help="a folder; the default model if not given")
    parser.add_argument("--work", type=Path, required=True, help="keeps the runs")
    given = parser.parse_args()
    given.model = given.model or str(prepare_default_model())
    with WarmStart() as warm_start:
        found = {preset: measure(preset, given, warm_start) for preset in given.preset}
    result = {"goals_seconds": GOALS, "presets": found}
    print_table(HEADER, table_rows(result))
    print(write_result("warm_starts", result))
    write_table(DOCUMENT, TABLE, HEADER, table_rows(result))


if __name__ == "__main__":
    main()
