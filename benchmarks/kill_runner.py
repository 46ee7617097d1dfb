"""Kill the runner of a short comparison at random times; after `--resume` the ledger must have each trial once.

    python benchmarks/kill_runner.py --model MODEL --work DIR --kills 30

The times are uniform over the duration of one trial, so that start-up, steps and the writing of the row are all hit.
When the comparison is finished, the next one begins. The same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from record import write_result

from toolkit.demo.assets import default_data_file, prepare_default_model
from toolkit.record.folder import read_json, write_json

TRIALS = 4
"""Of one comparison: two rows, two repeats."""


def start(folder: Path, model: str) -> subprocess.Popen[bytes]:
    """Start or resume the comparison."""
    job = ["--model_name_or_path", model, "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    job += ["--max_seq_length", "64", "--max_steps", "5", "--per_device_train_batch_size", "2"]
    options = ["--preset", "ddp", "--variant", "again=ddp", "--repeats", "2", "--num-processes", "2"]
    command = ["compare", *options, "--output", str(folder), "--resume", "--cpu", "--", *job]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "toolkit", *command], env=dict(os.environ), **quiet)


def ledger(folder: Path) -> list[str]:
    """Return the trials in the ledger, with repetitions; an incomplete last line is not one."""
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["trial"] for line in lines]


def kill_once(folder: Path, model: str, seconds: float) -> str:
    """Kill the runner `seconds` after its start; return `killed`, or `finished` if it ended before."""
    runner = start(folder, model)
    try:
        runner.wait(seconds)
    except subprocess.TimeoutExpired:
        runner.send_signal(signal.SIGKILL)
        runner.communicate()
        return "killed"
    said = (runner.communicate()[1] or b"").decode()
    if runner.returncode != 0:
        raise SystemExit(f"the comparison ended with {runner.returncode}:\n{said}")
    return "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill the runner at random times and resume.")
    parser.add_argument("--model", default=None, help="model folder; the demo's model by default")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--longest-seconds", type=float, default=12.0, help="latest kill, in seconds after the runner's start"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = given.model or str(prepare_default_model())
    state_file = given.work / "state.json"
    state = read_json(state_file) or {"moments": [], "comparisons": []}
    drawn = random.Random(given.seed)
    moments = [drawn.uniform(0, given.longest_seconds) for _ in range(10 * given.kills)]
    while len(state["moments"]) < given.kills or ledger(folder_of(given.work, state)):
        folder = folder_of(given.work, state)
        enough = len(state["moments"]) >= given.kills
        at = 600.0 if enough else moments[len(state["moments"])]
        before, begun = len(ledger(folder)), time.monotonic()
        if kill_once(folder, model, at) == "killed":
            state["moments"].append(round(at, 2))
            print(f"kill {len(state['moments'])} at {at:.1f} s: {len(ledger(folder)) - before} trials more", flush=True)
        else:
            check(folder)
            state["comparisons"].append({"folder": folder.name, "seconds": round(time.monotonic() - begun, 1)})
        write_json(state_file, state)
    done = len(state["comparisons"])
    print(f"{len(state['moments'])} kills, {done} comparisons finished, each trial once in each ledger")
    print(write_result("kill_runner", state | {"trials_of_a_comparison": TRIALS}))


def folder_of(work: Path, state: dict[str, Any]) -> Path:
    return work / f"comparison-{len(state['comparisons'])}"


def check(folder: Path) -> None:
    """Check that each trial is in the ledger once, and that the results have all of them."""
    counted = Counter(ledger(folder))
    if len(counted) != TRIALS or set(counted.values()) != {1}:
        raise SystemExit(f"{folder}: {dict(counted)}, expected {TRIALS} trials, each once")
    results = read_json(folder / "results.json") or {}
    if [row["repeats"] for row in results.get("rows", [])] != [2, 2]:
        raise SystemExit(f"{folder}: results.json does not have two repeats of each row")


if __name__ == "__main__":
    main()
