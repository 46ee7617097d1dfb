"""Simulated searches of `toolkit tune`, on the surfaces of its test and on ones with heavy tails, bursts and drift.

python benchmarks/tune.py --searches 300 --seed new61
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from record import ROOT, write_result

sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("tune", "support", "warm_starts")]
import test_elimination as simulation
from test_elimination import Surface

SAMPLES = 2000


def harder_surfaces() -> Iterator[Surface]:
    """Yield surfaces whose noise has heavy tails or bursts, and whose rounds drift by 10 %."""
    chance, recorded = random.Random(1), simulation.recorded_differences()
    for deviation in (0.03, 0.2):
        tails = [student_t3(chance) * deviation / math.sqrt(3) for _ in range(SAMPLES)]
        bursts = [
            chance.gauss(0, deviation / 3) + (chance.random() < 0.1) * chance.expovariate(1 / (3 * deviation))
            for _ in range(SAMPLES)
        ]
        for kind, differences in (("recorded differences", recorded), ("0 to 5 % apart", [n / 100 for n in range(6)])):
            yield Surface(f"t with 3 degrees of freedom, {deviation:.0%}: {kind}", [tails], differences, drift=0.1)
            yield Surface(f"bursts, {deviation:.0%}: {kind}", [bursts], differences, drift=0.1)


def student_t3(chance: random.Random) -> float:
    return chance.gauss(0, 1) / math.sqrt(sum(chance.gauss(0, 1) ** 2 for _ in range(3)) / 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    seen: list[Any] = []
    after_round = simulation.after_round
    simulation.after_round = lambda figures, **known: seen.append(figures) or after_round(figures, **known)
    rows = []
    for surface in (*simulation.surfaces(), *harder_surfaces()):
        chance, wrong, lost, trials = random.Random(f"{given.seed}-{surface.name}"), 0, [], []
        for _ in range(given.searches):
            is_wrong, slower = simulation.search(surface, chance)
            wrong += is_wrong
            lost.append(slower)
            trials.append(sum(map(len, seen[-1].values())))
            seen.clear()
        row = {"surface": surface.name, "searches": given.searches, "wrong": wrong}
        rows.append(row | {"median_trials": statistics.median(trials), "mean_lost": statistics.fmean(lost)})
        print(rows[-1], flush=True)
    facts = {"stated_error": simulation.ERROR, "num_settings": simulation.NUM_SETTINGS, "rounds": simulation.ROUNDS}
    print(write_result("tune", facts | {"seed": given.seed}, rows))


if __name__ == "__main__":
    main()
