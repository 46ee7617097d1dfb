"""Kill random ranks at random steps: seconds until the attempt ends, steps lost, and the final losses.

    python benchmarks/kill_ranks.py --work DIR [--kills 50] [--seed 0] [--seconds 180]

A run of the small random Llama under `--max-restarts 5` is killed up to five times with SIGKILL. It must end with the
losses, gradient norms and batches of an undisturbed run, bit for bit. The seed determines the rank, the step (0: before
the first) and the delay after it. Finished runs are in the record: the same command resumes. After `--seconds` no more
ranks are killed, and the current run finishes.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import print_table, read_result, spread, write_result
from small_job import small_model, train_command, trained

from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import last_step

PRESETS = ("ddp", "zero2", "fsdp2")
STEPS, SAVE_STEPS, KILLS_A_RUN = 40, 4, 5
# Steps of an attempt before its kill, and seconds after that step, so that a forward, a backward or a save is hit.
LAST_STEP_OF_ATTEMPT, DELAY_SECONDS = 10, 0.3
HEADER = (
    *("preset", "kills", "seconds from the kill to the attempt's end: median", "largest"),
    *("steps lost: median", "largest", "more than since the last checkpoint", "runs, equal bit for bit"),
)


def start(preset: str, work: Path, output: Path, *, max_restarts: int) -> subprocess.Popen[bytes]:
    model = small_model(work / "model")
    job = {"learning_rate": 1e-3, "max_steps": STEPS, "save_steps": SAVE_STEPS, "save_total_limit": 2}
    job |= {"model_name_or_path": model, "per_device_train_batch_size": 1, "output_dir": output}
    command = train_command(preset, "--max-restarts", str(max_restarts), **job)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def undisturbed(preset: str, work: Path) -> list[list[list[Any]]]:
    """Return what a run without kills computes; it is trained once."""
    kept = work / f"{preset}-undisturbed.json"
    if not kept.exists():
        folder = RunFolder(work / f"{preset}-undisturbed")
        assert start(preset, work, folder.path, max_restarts=0).wait() == 0, folder.log.read_text()[-2000:]
        kept.write_text(json.dumps(trained(folder)))
    return json.loads(kept.read_text())  # type: ignore[no-any-return]


def row_files(folder: RunFolder) -> dict[int, int]:
    """Return the inode of each rank's file of rows; a new attempt replaces the files."""
    return {rank: path.stat().st_ino for rank in (0, 1) if (path := folder.rank_rows(rank)).exists()}


def restarts_of(folder: RunFolder) -> list[dict[str, Any]]:
    return list((folder.read_run() or {}).get("restarts") or [])


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, f"the run ended by itself with code {process.returncode}"
        time.sleep(0.01)


def kill_once(
    folder: RunFolder, process: subprocess.Popen[bytes], chance: random.Random, *, resumed: int, rows: dict[int, int]
) -> dict[str, Any]:
    """Send one SIGKILL to an attempt that begins after step `resumed`, and return how the launcher handled it.

    `rows` are the inodes of the attempt before, as `row_files` returns them.
    """
    rank, steps, delay = chance.randrange(2), chance.randint(0, LAST_STEP_OF_ATTEMPT), chance.uniform(0, DELAY_SECONDS)
    before, ranks = len(restarts_of(folder)), folder.path / "ranks"

    def has_trained() -> bool:
        files = row_files(folder)
        return rank in files and files[rank] != rows.get(rank) and last_step(folder.rank_rows(rank)) >= resumed + steps

    wait_for(lambda: len(read_heartbeats(ranks)) == 2, process)
    wait_for(lambda: not steps or has_trained(), process)
    time.sleep(delay)
    os.kill(next(pulse.pid for pulse in read_heartbeats(ranks) if pulse.rank == rank), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: len(restarts_of(folder)) > before, process)
    seconds = time.monotonic() - killed
    restart = restarts_of(folder)[-1]
    steps_of_restart = {name: restart[name] for name in ("resumed_from_step", "lost_steps")}
    reached = sum(steps_of_restart.values())
    newest = next((each.step for each in list_checkpoints(folder.path) if each.problem(deep=True) is None), 0)
    found = {"rank": rank, "named_rank": restart["rank"], "step_reached": reached, "seconds_to_end": round(seconds, 2)}
    found |= {"newest_checkpoint_step": newest, "save_cut_off": newest < reached // SAVE_STEPS * SAVE_STEPS}
    return found | steps_of_restart


def run_once(number: int, seed: int, most: int, until: float, work: Path) -> dict[str, Any]:
    """Run once, killed up to `most` times but not after `until`, until it ends by itself."""
    preset = PRESETS[number % len(PRESETS)]
    chance, expected = random.Random(f"{seed}-{number}-{preset}"), undisturbed(preset, work)
    folder = RunFolder(work / f"{preset}-{number}-{int(time.time())}")
    process = start(preset, work, folder.path, max_restarts=KILLS_A_RUN)
    kills: list[dict[str, Any]] = []
    resumed, rows = 0, row_files(folder)
    while len(kills) < most and time.monotonic() < until:
        kills.append(kill_once(folder, process, chance, resumed=resumed, rows=rows))
        resumed, rows = kills[-1]["resumed_from_step"], row_files(folder)
        print(preset, number, kills[-1], flush=True)
    code = process.wait()
    run = {"run": number, "preset": preset, "exit_code": code, "bit_for_bit": trained(folder) == expected}
    print(run, flush=True)
    return run | {"kills": kills}


def is_bounded(kill: dict[str, Any]) -> bool:
    """Return True if the rank is named, the newest complete checkpoint is used, and only later steps are lost."""
    allowed = 2 * SAVE_STEPS if kill["save_cut_off"] else SAVE_STEPS
    used = kill["resumed_from_step"] == kill["newest_checkpoint_step"]
    return kill["named_rank"] == kill["rank"] and used and kill["lost_steps"] < allowed


def table_rows(_: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return a table row per preset, and one for all."""
    table: list[list[object]] = []
    for preset in (*PRESETS, "all"):
        own = [run for run in runs if preset in (run["preset"], "all")]
        if kills := [kill for run in own for kill in run["kills"]]:
            seconds, lost = (spread([kill[key] for kill in kills]) for key in ("seconds_to_end", "lost_steps"))
            figures = [f"{seconds['median']:.1f}", f"{seconds['max']:.1f}", f"{lost['median']:g}", lost["max"]]
            equal = sum(run["bit_for_bit"] and run["exit_code"] == 0 for run in own)
            unbounded = sum(not is_bounded(kill) for kill in kills)
            table.append([preset, len(kills), *figures, unbounded, f"{len(own)}, {equal}"])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no kill after this many seconds")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    runs, until = read_result("kill_ranks")[1], time.monotonic() + given.seconds
    facts = {"steps": STEPS, "save_steps": SAVE_STEPS, "ranks": 2, "seed": given.seed}
    while (left := given.kills - sum(len(run["kills"]) for run in runs)) > 0 and time.monotonic() < until:
        runs.append(run_once(len(runs), given.seed, min(left, KILLS_A_RUN), until, given.work.absolute()))
        write_result("kill_ranks", facts, runs)
    print_table(HEADER, table_rows(facts, runs))
    return 0 if all(run["bit_for_bit"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
