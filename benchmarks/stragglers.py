"""Check `toolkit simulate stragglers` against two real ranks of which one is slow, and against real threads.

    python benchmarks/stragglers.py --work DIR

1. Two CPU ranks train under `ddp`, then again with rank 1 asleep for 0.3 s before each forward (the fault `slow_rank`
   of benchmarks/faulty_ranks). From the undisturbed run and the 0.3 s, the simulation predicts step time and waiting of
   the disturbed one; three pairs of runs.
2. Eight threads sleep as long as drawn compute times and update one version number, as workers and a parameter server
   would: steps per second, staleness and waiting of each policy, measured beside simulated. Sleeping threads need no
   core each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from record import EVIDENCE, print_table, write_result, write_table
from small_job import small_model, train

from toolkit.record.measurements import read_steps, timed_steps
from toolkit.simulate.stragglers import compute_seconds, drawn_seconds
from toolkit.simulate.synchronization import Policy, simulate

DOCUMENT, TABLE = EVIDENCE / "simulations.md", "stragglers"
HEADER = ["case", "quantity", "measured", "simulated"]
FAULTY_RANKS = Path(__file__).parent / "faulty_ranks"
SLEEP_SECONDS = 0.3
UNTIMED_STEPS = 3
POLICIES = (
    Policy(name="bounded_staleness", number=0),
    Policy(name="bounded_staleness", number=1),
    Policy(name="bounded_staleness", number=4),
    Policy(name="asynchronous"),
)


def steps_of(row: str, work: Path, number: int) -> list[list[dict[str, Any]]]:
    """Train two ranks, with the fault that the row is named after, and return their timed steps."""
    output = work / f"{row}-n2-r0"
    shutil.rmtree(output, ignore_errors=True)
    job = {"model_name_or_path": small_model(work / "model"), "max_steps": number, "per_device_train_batch_size": 4}
    path = {"PYTHONPATH": os.pathsep.join([str(FAULTY_RANKS), os.environ.get("PYTHONPATH", "")])}
    folder = train("ddp", output, environment=path, save_strategy="no", **job)
    return timed_steps(read_steps(folder), untimed_steps=UNTIMED_STEPS)


def slow_rank(number: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return measured and predicted step time, and waiting of the fast rank, of one pair of runs."""
    undisturbed, disturbed = (steps_of(row, given.work, given.steps) for row in ("none", "slow_rank"))

    def step_seconds(steps: list[list[dict[str, Any]]]) -> float:
        return statistics.median(max(row.seconds for row in step) for step in steps)

    def elsewhere(steps: list[list[dict[str, Any]]]) -> float:
        """Backward and waiting of rank 0, which nothing tells apart."""
        return statistics.median(step[0].seconds - step[0].own_seconds for step in steps)

    base = step_seconds(undisturbed)
    times = numpy.array([[base], [base + SLEEP_SECONDS]])
    predicted = simulate(Policy(name="synchronous"), times, steps=1)
    from_run = [compute_seconds(step) for step in disturbed]
    return {
        "pair": number,
        "undisturbed_step_seconds": base,
        "predicted_step_seconds": predicted.seconds,
        "measured_step_seconds": step_seconds(disturbed),
        "predicted_waiting_seconds": predicted.waiting_seconds,
        "measured_waiting_seconds": elsewhere(disturbed) - elsewhere(undisturbed),
        "waiting_seconds_from_run_folder": statistics.median(max(step) - step[0] for step in from_run),
    }


class Server:
    """A version number that threads update, and the batches that each has finished."""

    def __init__(self, policy: Policy, workers: int, gradients: int) -> None:
        self.policy, self.gradients = policy, gradients
        self.version, self.finished = 0, [0] * workers
        self.staleness: list[int] = []
        self.waiting_seconds = 0.0
        self.changed = threading.Condition()

    def work(self, worker: int, seconds: list[float]) -> None:
        """Compute (sleep), push, and begin the next batch when the policy lets this worker."""
        read = 0
        for batch in range(10**9):
            time.sleep(seconds[batch % len(seconds)])
            with self.changed:
                if self.version >= self.gradients:
                    return
                self.staleness.append(self.version - read)
                self.version += 1
                self.finished[worker] += 1
                self.changed.notify_all()
                since = time.monotonic()
                self.changed.wait_for(lambda: self.version >= self.gradients or self._may_go_on(worker))
                self.waiting_seconds += time.monotonic() - since
                read = self.version

    def _may_go_on(self, worker: int) -> bool:
        bounded = self.policy.name == "bounded_staleness"
        return not bounded or self.finished[worker] - min(self.finished) <= self.policy.number


def live(policy: Policy, given: argparse.Namespace) -> dict[str, Any]:
    """Run a policy in threads and in the simulation, over the same compute times."""
    workers, steps = given.workers, given.live_steps
    seconds = drawn_seconds("exponential", mean=0.05, spread=0.5, shape=(workers, 2 * steps), seed=0)
    server = Server(policy, workers, workers * steps)
    threads = [
        threading.Thread(target=server.work, args=(worker, seconds[worker].tolist())) for worker in range(workers)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured = time.monotonic() - start
    run = simulate(policy, seconds, steps=steps)
    ages = [age for age, count in run.staleness.items() for _ in range(count)]
    return {
        "policy": policy.label,
        "measured_steps_per_second": steps / measured,
        "simulated_steps_per_second": run.steps_per_second,
        "measured_staleness_mean": statistics.mean(server.staleness),
        "simulated_staleness_mean": statistics.mean(ages),
        "measured_waiting_fraction": server.waiting_seconds / (workers * measured),
        "simulated_waiting_fraction": run.waiting_seconds / (workers * run.seconds),
    }


def table_rows(_: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the page's table: each quantity measured and simulated."""
    waits = "seconds that the fast one waits"
    table = []
    for row in rows:
        if "pair" in row:
            case, simulated = f"two ranks, pair {row['pair']}", "predicted"
            quantities = (("seconds per step", "step_seconds", 3), (waits, "waiting_seconds", 3))
        else:
            case, simulated = f"threads, `{row['policy']}`", "simulated"
            quantities = (("steps/s", "steps_per_second", 2), ("mean staleness", "staleness_mean", 2))
            quantities += (("waiting fraction", "waiting_fraction", 3),)
        for name, key, digits in quantities:
            table.append([case, name, *(f"{row[f'{kind}_{key}']:.{digits}f}" for kind in ("measured", simulated))])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Stragglers: simulated against two real ranks, and against threads.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--live-steps", type=int, default=100)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [slow_rank(number, given) for number in range(1, given.pairs + 1)]
    rows += [live(policy, given) for policy in POLICIES]
    print_table(HEADER, table_rows({}, rows))
    write_result("stragglers", {"sleep_seconds": SLEEP_SECONDS}, rows)
    write_table(DOCUMENT, TABLE, HEADER, table_rows({}, rows))


if __name__ == "__main__":
    main()
