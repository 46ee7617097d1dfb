"""Kill random ranks at random steps: seconds until the attempt ends, steps lost, and the final losses.

    python benchmarks/kill_ranks.py WORK_FOLDER [--kills 50] [--seed 0] [--seconds 180]

A run of the tiny random Llama under `--max-restarts 5` is killed up to five times with SIGKILL. It must end with the
losses, gradient norms and batches of an undisturbed run, bit for bit. The seed determines the rank, the step (0: before
the first) and the delay after it. Finished runs are kept: the same command resumes. After `--seconds` no more ranks are
killed, and the current run finishes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from record import RESULTS, print_table, spread, write_result, write_table

from toolkit.demo.assets import default_data_file
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import read_rows

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "random-kills.md"
TABLE = "kill_ranks"
PRESETS = ("ddp", "zero2", "fsdp2")
STEPS, SAVE_STEPS, KILLS_A_RUN = 40, 4, 5
# Steps of an attempt before its kill, and seconds after that step, so that a forward, a backward or a save is hit.
LAST_STEP_OF_ATTEMPT, DELAY_SECONDS = 10, 0.3
GOAL_SECONDS = 30.0
COMPARED = ("step", "loss", "grad_norm", "local_grad_norm", "batch_sha256")


def start(preset: str, model: Path, output: Path, *, max_restarts: int) -> subprocess.Popen[str]:
    job = ["--model_name_or_path", str(model), "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    job += ["--max_seq_length", "64", "--learning_rate", "1e-3", "--max_steps", str(STEPS), "--save_model", "false"]
    job += ["--per_device_train_batch_size", "1", "--save_steps", str(SAVE_STEPS), "--save_total_limit", "2"]
    options = ["--preset", preset, "--num-processes", "2", "--cpu", "--max-restarts", str(max_restarts)]
    command = [sys.executable, "-m", "toolkit", "train", *options, "--", *job, "--output_dir", str(output)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, **silent)  # type: ignore[call-overload,no-any-return]


def trained(folder: RunFolder) -> list[list[list[Any]]]:
    """Return each rank's batches, losses and gradient norms."""
    return [[[getattr(row, key) for key in COMPARED] for row in read_rows(folder.rank_rows(rank))] for rank in (0, 1)]


def reference(preset: str, model: Path, work: Path) -> list[list[list[Any]]]:
    """Return the undisturbed run, trained once."""
    kept = work / f"{preset}-reference.json"
    if not kept.exists():
        folder = RunFolder(work / f"{preset}-reference")
        assert start(preset, model, folder.path, max_restarts=0).wait() == 0, folder.log.read_text()[-2000:]
        kept.write_text(json.dumps(trained(folder)))
    return json.loads(kept.read_text())  # type: ignore[no-any-return]


def steps_of(folder: RunFolder, rank: int) -> int:
    path = folder.rank_rows(rank)
    return max((row.step for row in read_rows(path)), default=0) if path.exists() else 0


def row_files(folder: RunFolder) -> dict[int, int]:
    """Return the inode of each rank's file of rows."""
    return {rank: path.stat().st_ino for rank in (0, 1) if (path := folder.rank_rows(rank)).exists()}


def is_new(folder: RunFolder, rank: int, rows: dict[int, int]) -> bool:
    found = row_files(folder)
    return rank in found and found[rank] != rows.get(rank)


def restarts_of(folder: RunFolder) -> list[dict[str, Any]]:
    return list((folder.read_run() or {}).get("restarts") or [])


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, f"the run ended by itself with code {process.returncode}"
        time.sleep(0.01)


def kill_once(
    folder: RunFolder, process: subprocess.Popen[str], chance: random.Random, *, resumed: int, rows: dict[int, int]
) -> dict[str, Any]:
    """Send one SIGKILL to an attempt that begins after step `resumed`, and return how the launcher handled it.

    `rows` are the ranks' files of rows of the attempt before; the new attempt replaces them.
    """
    rank, steps, delay = chance.randrange(2), chance.randint(0, LAST_STEP_OF_ATTEMPT), chance.uniform(0, DELAY_SECONDS)
    before, ranks = len(restarts_of(folder)), folder.path / "ranks"
    wait_for(lambda: len(read_heartbeats(ranks)) == 2, process)
    wait_for(lambda: not steps or (is_new(folder, rank, rows) and steps_of(folder, rank) >= resumed + steps), process)
    time.sleep(delay)
    pid = next(pulse.pid for pulse in read_heartbeats(ranks) if pulse.rank == rank)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: len(restarts_of(folder)) > before, process)
    seconds = time.monotonic() - killed
    restart = restarts_of(folder)[-1]
    reached = restart["lost_steps"] + restart["resumed_from_step"]
    newest = next((each.step for each in list_checkpoints(folder.path) if each.problem(deep=True) is None), 0)
    return {
        "rank": rank,
        "named_rank": restart["rank"],
        "steps_of_attempt": reached - resumed,
        "step_reached": reached,
        "message": restart["message"],
        "seconds_to_end": round(seconds, 2),
        "newest_checkpoint_step": newest,
        "save_cut_off": newest < reached // SAVE_STEPS * SAVE_STEPS,
        "resumed_from_step": restart["resumed_from_step"],
        "lost_steps": restart["lost_steps"],
        "load_average_1_minute": round(os.getloadavg()[0], 1),
    }


def run_once(number: int, seed: int, most: int, until: float, work: Path) -> dict[str, Any]:
    """Run once, killed up to `most` times but not after `until`, until it ends by itself."""
    preset, model = PRESETS[number % len(PRESETS)], work / "model"
    chance = random.Random(f"{seed}-{number}-{preset}")
    expected = reference(preset, model, work)
    output = work / f"{preset}-{number}-{int(time.time())}"
    process, folder = start(preset, model, output, max_restarts=KILLS_A_RUN), RunFolder(output)
    kills: list[dict[str, Any]] = []
    resumed, rows = 0, row_files(folder)
    while len(kills) < most and time.monotonic() < until:
        kill = kill_once(folder, process, chance, resumed=resumed, rows=rows)
        resumed, rows = kill["resumed_from_step"], row_files(folder)
        kills.append(kill)
        words = f"rank {kill['rank']} after step {kill['step_reached']}: ended after {kill['seconds_to_end']} s"
        print(f"{preset} {number}: {words}, {kill['lost_steps']} steps lost ({kill['message']})", flush=True)
    code = process.wait()
    equal = trained(folder) == expected
    print(f"{preset} {number}: exit code {code}; equal to the run without kills: {equal}", flush=True)
    facts = {"run": number, "preset": preset, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return facts | {"exit_code": code, "bit_for_bit": equal, "kills": kills}


def is_bounded(kill: dict[str, Any]) -> bool:
    """Return True if the rank is named, the newest complete checkpoint is used, and only later steps are lost."""
    allowed = 2 * SAVE_STEPS if kill["save_cut_off"] else SAVE_STEPS
    used = kill["resumed_from_step"] == kill["newest_checkpoint_step"]
    return kill["named_rank"] == kill["rank"] and used and kill["lost_steps"] < allowed


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per preset, and one for all."""
    rows = []
    for preset in (*PRESETS, "all"):
        own = [run for run in runs if preset in (run["preset"], "all")]
        kills = [kill for run in own for kill in run["kills"]]
        if kills:
            rows.append(
                {
                    "preset": preset,
                    "kills": len(kills),
                    "seconds_to_end": spread([kill["seconds_to_end"] for kill in kills]),
                    "kills_over_the_goal": sum(kill["seconds_to_end"] > GOAL_SECONDS for kill in kills),
                    "lost_steps": spread([kill["lost_steps"] for kill in kills]),
                    "kills_that_lost_more": sum(not is_bounded(kill) for kill in kills),
                    "runs": len(own),
                    "runs_equal_bit_for_bit": sum(run["bit_for_bit"] and run["exit_code"] == 0 for run in own),
                }
            )
    return rows


HEADER = (
    *("preset", "kills", "seconds from the kill to the attempt's end: median", "largest"),
    *("steps lost: median", "largest", "more than since the last checkpoint", "runs, equal bit for bit"),
)


def cells(row: dict[str, Any]) -> list[object]:
    seconds, lost = row["seconds_to_end"], row["lost_steps"]
    figures = [row["kills"], f"{seconds['median']:.1f}", f"{seconds['max']:.1f}", f"{lost['median']:g}", lost["max"]]
    equal = f"{row['runs']}, {row['runs_equal_bit_for_bit']}"
    return [row["preset"], *figures, row["kills_that_lost_more"], equal]


def table_rows(found: dict[str, Any]) -> list[list[object]]:
    return [cells(row) for row in found["summary"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that contains `model`, a small model with its tokenizer")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no kill after this many seconds")
    arguments = parser.parse_args()
    kept = RESULTS / "kill_ranks.json"
    runs = json.loads(kept.read_text())["runs"] if kept.exists() else []
    until = time.monotonic() + arguments.seconds
    while (left := arguments.kills - sum(len(run["kills"]) for run in runs)) > 0 and time.monotonic() < until:
        most = min(left, KILLS_A_RUN)
        runs.append(run_once(len(runs), arguments.seed, most, until, arguments.work.absolute()))
        job = {
            "steps": STEPS,
            "save_steps": SAVE_STEPS,
            "ranks": 2,
            "seed": arguments.seed,
            "goal_seconds": GOAL_SECONDS,
        }
        found = {"job": job, "summary": summary(runs), "runs": runs}
        write_result("kill_ranks", found)
        write_table(DOCUMENT, TABLE, HEADER, table_rows(found))
    print_table(HEADER, [cells(row) for row in summary(runs)])
    return 0 if all(run["bit_for_bit"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
