"""How often `toolkit tune` eliminates the truly fastest setting, on simulated searches of recorded trials.

    python benchmarks/tune.py [--searches 1000]

A surface is twelve settings: recorded speeds of the same job under other presets and programs give each its true step
time, and the noise of its trials is resampled from recorded trials of one setting, around their mean. Every search runs
to its end on such trials, as `toolkit tune` would. A search is wrong if it eliminated the truly fastest setting and
every setting within 1 % of it. The rate of wrong searches must be below the stated one, 5 %.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from record import print_table, read_result, write_result

from toolkit.tune.elimination import ERROR, after_round

NUM_SETTINGS, ROUNDS = 12, 8
WITHIN = 0.01


class Recorded(NamedTuple):
    """Recorded trials: the noise of one trial, and the differences between settings, both as logarithms."""

    name: str
    noise: tuple[tuple[float, ...], ...]
    """Groups of trials of one setting, each around its mean."""


def recorded_noise() -> list[Recorded]:
    """Return the noise of trials that other benchmarks have recorded."""
    _, comparisons = read_result("aa_comparisons")
    speeds = [tuple(each) for row in comparisons for each in row["tokens_per_second"].values()]
    _, pairs = read_result("overhead")
    steps: dict[tuple[str, str], list[float]] = {}
    for row in pairs:
        for program, seconds in row.get("median_step_cpu_seconds", {}).items():
            steps.setdefault((row["case"], program), []).append(seconds)
    found = [Recorded("aa_comparisons", tuple(map(around_mean, speeds)))]
    found.append(Recorded("overhead", tuple(around_mean(each) for each in steps.values() if len(each) > 2)))
    _, tuned = read_result("tune_on_two_ranks")
    own = [around_mean(row["seconds_per_step"]) for row in tuned if len(row.get("seconds_per_step", ())) > 2]
    return found + ([Recorded("tune_on_two_ranks", tuple(own))] if own else [])


def around_mean(values: Sequence[float]) -> tuple[float, ...]:
    """Return the logarithms around their mean, scaled so that their variance is that of the trials."""
    logs = [math.log(value) for value in values]
    scale = math.sqrt(len(logs) / (len(logs) - 1))
    return tuple((log - statistics.fmean(logs)) * scale for log in logs)


def recorded_differences() -> list[float]:
    """Return logarithms of step times over the fastest one of the same job, of presets and programs."""
    _, rows = read_result("peers_two_ranks_in_turns")
    by_job: dict[str, list[float]] = {}
    for row in rows:
        if speed := (row.get("medians") or {}).get("tokens_per_second"):
            by_job.setdefault(row["job"].partition("-")[2], []).append(speed)
    return [math.log(max(speeds) / speed) for speeds in by_job.values() for speed in speeds]


class Surface(NamedTuple):
    """A kind of simulated search."""

    name: str
    recorded: Recorded
    differences: Sequence[float]
    """Logarithms from which the true step times are drawn."""
    drift: float = 0.0
    """Standard deviation of what is common to a round."""
    per_setting: bool = False
    """Each setting keeps the noise of one recorded group; otherwise every trial is from any group."""


def search(surface: Surface, chance: random.Random, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Simulate one search; return what was eliminated, and how many trials it took."""
    names = [f"s{number}" for number in range(NUM_SETTINGS)]
    true = {name: chance.choice(surface.differences) for name in names}
    groups = {name: chance.choice(surface.recorded.noise) for name in names}
    pooled = [value for group in surface.recorded.noise for value in group]
    figures: dict[str, list[float]] = {name: [] for name in names}
    left, trials = list(names), 0
    for number in range(rounds):
        shift = chance.gauss(0.0, surface.drift) if surface.drift else 0.0
        for name in left:
            noise = chance.choice(groups[name] if surface.per_setting else pooled)
            figures[name].append(true[name] + shift + noise)
            trials += 1
        if number == 0:
            continue
        race = after_round(figures, num_settings=NUM_SETTINGS)
        left = [name for name in left if name not in race.slower]
        if len(left) == 1 or race.settled:
            break
    best = min(true.values())
    good = [name for name in names if true[name] <= best + math.log1p(WITHIN)]
    leader = min(left, key=lambda name: statistics.fmean(figures[name]))
    return {
        "wrong": not set(good) & set(left),
        "best_eliminated": min(names, key=lambda name: true[name]) not in left,
        "lost": true[leader] - best,
        "trials": trials,
        "left": len(left),
    }


def surfaces() -> list[Surface]:
    """Return the kinds of search that are simulated."""
    differences, equal = recorded_differences(), [0.0]
    close = [number / 100 for number in range(6)]
    made = []
    for recorded in recorded_noise():
        made += [
            Surface(f"{recorded.name}: recorded differences", recorded, differences),
            Surface(f"{recorded.name}: 0 to 5 % apart", recorded, close),
            Surface(f"{recorded.name}: all equal", recorded, equal),
            Surface(f"{recorded.name}: 0 to 5 % apart, rounds drift by 10 %", recorded, close, drift=0.1),
            Surface(f"{recorded.name}: 0 to 5 % apart, noise by setting", recorded, close, per_setting=True),
        ]
    return made


def rates(surface: Surface, searches: int, seed: int) -> dict[str, Any]:
    """Return how often searches on one kind of surface were wrong, and what they cost."""
    chance = random.Random(f"{surface.name}-{seed}")
    results = [search(surface, chance) for _ in range(searches)]
    return {
        "surface": surface.name,
        "searches": searches,
        "wrong": sum(result["wrong"] for result in results),
        "best_eliminated": sum(result["best_eliminated"] for result in results),
        "median_trials": statistics.median(result["trials"] for result in results),
        "mean_left": statistics.fmean(result["left"] for result in results),
        "mean_lost": statistics.fmean(math.expm1(result["lost"]) for result in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    rows = [rates(surface, given.searches, given.seed) for surface in surfaces()]
    header = ("surface", "searches", "wrong", "stated", "trials of 96", "left", "slower than the best")
    table = []
    for row in rows:
        lost, stated = f"{row['mean_lost']:.2%}", f"{ERROR:.0%}"
        wrong = f"{row['wrong'] / row['searches']:.1%}"
        left = f"{row['mean_left']:.1f}"
        table.append([row["surface"], row["searches"], wrong, stated, row["median_trials"], left, lost])
    print_table(header, table)
    if not given.no_record:
        facts = {"stated_error": ERROR, "num_settings": NUM_SETTINGS, "rounds": ROUNDS, "seed": given.seed}
        print(write_result("tune", facts, rows))


if __name__ == "__main__":
    main()
