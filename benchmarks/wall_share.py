"""Where a comparison's wall time goes: the fraction spent in timed steps, and the rest by phase of each trial.

    toolkit compare --preset ddp --preset zero2 --preset fsdp2 --num-processes 2 --repeats 3 --target-interval 0 \\
        --output-dir wall-share --cpu -- --model_name_or_path MODEL --dataset "$(python -m toolkit.demo --data)" \\
        --max_seq_length 96 --max_steps 30 --per_device_train_batch_size 4 --learning_rate 1e-3
    python benchmarks/wall_share.py wall-share

MODEL is a random Llama of 3.2 M parameters with the demo's tokenizer (`toolkit.demo.assets.random_llama`): its steps
take 0.2 to 0.3 s on two cores. Only run folders are read, and in them what rank 0 wrote: `phases` of run.json, and its
step seconds. Under warm starts the phases begin shortly before the run's clock: the launcher's part is then negative.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from record import print_table, write_result

from toolkit.record.folder import RunFolder, read_json
from toolkit.record.measurements import measure, read_rows, read_steps

# Phases of `toolkit.observe.failure_report.Progress` under the table's names, in the order of a run.
PARTS = {
    "launcher": "launcher",
    "start": "imports",
    "arguments": "arguments",
    "data": "data",
    "load": "model",
    "engine": "engine",
    "attest": "attest",
    "untimed": "untimed steps",
    "timed": "timed steps",
    "train": "between steps",
    "save": "save",
    "end": "exit",
    "between": "until the next trial",
}
RESTARTED_SECONDS = 15.0
"""A longer gap between two trials is a comparison that was stopped and resumed, and counts as none of it."""


def wall_parts(folder: RunFolder, untimed_steps: int) -> dict[str, float]:
    """Return the seconds of each part of one completed run; they add up to its wall time."""
    run = folder.read_run() or {}
    begun, phases = run["started_unix"], run["phases"]
    ends = [*(began for _, began in phases[1:]), begun + run["wall_seconds"]]
    parts = dict.fromkeys(PARTS, 0.0)
    parts["launcher"] = phases[0][1] - begun
    for (name, began), ended in zip(phases, ends, strict=True):
        parts[name] += ended - began
    step_seconds = [row["seconds"] for row in read_rows(folder.rank_rows(0))]
    parts["untimed"], parts["timed"] = sum(step_seconds[:untimed_steps]), sum(step_seconds[untimed_steps:])
    parts["train"] -= parts["untimed"] + parts["timed"]  # logging, and the end of training
    return parts


def trials(folder: Path) -> dict[str, dict[str, float]]:
    """Return each completed trial of a comparison by its id."""
    comparison = read_json(folder / "comparison.json")
    if comparison is None:
        raise SystemExit(f"{folder} holds no comparison")
    found = {}
    for path in sorted((folder / "trials").iterdir(), key=lambda path: path.stat().st_ctime):
        run = RunFolder(path).read_run() or {}
        if run.get("status") == "completed" and "phases" in run:
            found[path.name] = wall_parts(RunFolder(path), comparison["untimed_steps"])
    starts = {name: (RunFolder(folder / "trials" / name).read_run() or {})["started_unix"] for name in found}
    order = sorted(found, key=lambda name: float(starts[name]))
    for name, following in itertools.pairwise(order):
        gap = starts[following] - starts[name] - sum(found[name].values())
        found[name]["between"] = gap if gap < RESTARTED_SECONDS else 0.0
    return {name: found[name] for name in order}


def step_median(folder: Path, trial: str) -> float:
    """Return the median of the timed steps, of the slowest rank."""
    untimed = (read_json(folder / "comparison.json") or {})["untimed_steps"]
    measured = measure(read_steps(RunFolder(folder / "trials" / trial)), untimed_steps=untimed)
    return measured.step_seconds_median or 0.0


def shares(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the fraction of wall time that each part takes, over all trials."""
    totals = {part: sum(parts[part] for parts in found.values()) for part in PARTS}
    whole = sum(totals.values())
    return {part: seconds / whole for part, seconds in totals.items()} | {"wall_seconds": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a comparison's wall time goes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="wall_share", help="name of the result file")
    given = parser.parse_args()
    found = trials(given.folder)
    if not found:
        raise SystemExit(f"{given.folder} holds no completed trial with phases")
    share = shares(found)
    rows: list[list[object]] = [
        [trial, f"{sum(parts.values()):.1f}", *(f"{parts[part]:.1f}" for part in PARTS)]
        for trial, parts in found.items()
    ]
    rows.append(["share", "100 %", *(f"{share[part]:.0%}".replace("%", " %") for part in PARTS)])
    print_table(["trial, seconds", "wall", *PARTS.values()], rows)
    print(f"{share['timed']:.1%} of {share['wall_seconds']:.0f} s in timed steps".replace("%", " %"))
    medians = {name: step_median(given.folder, name) for name in found}
    print(f"median timed step {min(medians.values()):.2f} to {max(medians.values()):.2f} s")
    job = (read_json(given.folder / "comparison.json") or {})["training_arguments"]
    result = {"training_arguments": [Path(word).name for word in job], "trials": found}
    print(write_result(given.name, result | {"step_seconds_median": medians, "share": share}))


if __name__ == "__main__":
    main()
