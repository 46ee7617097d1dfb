"""Write the tables of planned against published speeds: by source, by what bounds a step, and calibrated by a run.

    PYTHONPATH=. python benchmarks/speed_tables.py

Rows, sources and constants are those of `tests/support/left_out_speeds.py`; the tests hold what they show.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "tests" / "support"))

from left_out_speeds import (  # noqa: E402
    WITHOUT,
    Speed,
    alike,
    as_measured,
    by,
    compared,
    held_out_coverage,
    left_out_speeds,
    speed_of,
    table,
)

from toolkit.plan.step_parts import Calibration  # noqa: E402
from toolkit.plan.step_time import step_time  # noqa: E402

NAMES = {"stas00": "stas00/ml-engineering", "llm-foundry": "MosaicML (llm-foundry)"}


def markdown(rows: list[list[str]]) -> str:
    """Return a table whose first column is text, and the others numbers."""
    head, *lines = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, [":---", *["---:"] * (len(head) - 1)], *lines)) + "\n"


def shares(speeds: list[Speed]) -> tuple[str, str]:
    """Return the share inside of the interval, and the median error of the estimate."""
    inside = statistics.mean(speed.is_inside for speed in speeds)
    return f"{inside:.0%}".replace("%", " %"), f"{100 * statistics.median(abs(each.error) for each in speeds):.1f} %"


def published_speeds() -> Iterator[list[str]]:
    yield ["source", "rows", "inside, fitted", "left out", "median error, fitted", "left out"]
    left_out = by("source")
    for source, jobs in compared().items():
        fitted, without = shares([speed_of(job) for job in jobs]), shares(left_out[source])
        yield [NAMES.get(source, source), str(len(jobs)), fitted[0], without[0], fitted[1], without[1]]


def intervals() -> Iterator[list[str]]:
    for row in table(by("bound"), "bound by"):
        yield [cell.replace("%", " %") for cell in row]


def sources() -> Iterator[list[str]]:
    held_out = held_out_coverage()
    head, *rows = table(by("source"), "source, left out")
    kept = [0, 1, 3, 5, 6]
    yield [*(head[place] for place in kept), "inside, as wide as the others need"]
    for row in rows:
        share = held_out.get(row[0], statistics.mean(held_out.values()))
        cells = [NAMES.get(row[0], row[0]), *(row[place] for place in kept[1:]), f"{share:.0%}"]
        yield [cell.replace("%", " %") for cell in cells]


def calibrated() -> Iterator[list[str]]:
    yield ["source", "pairs", "inside", "median error", "not calibrated", "width at the median"]
    everything: list[tuple[bool, float, float, float]] = []
    for source, constants in WITHOUT.items():
        names = [each.name for each in fields(Calibration)]
        calibration = Calibration(**dict(zip(names, constants, strict=True)))
        pairs: list[tuple[bool, float, float, float]] = []
        for jobs in (jobs for jobs in alike() if jobs[0].source == source):
            rows = [(job, as_measured(job, calibration)) for job in jobs]
            for (_, measured), (job, own) in itertools.permutations(rows, 2):
                if job.interconnect is None or not measured.differences(own.setup):
                    continue
                speed = step_time(own.setup, job.interconnect, calibration=calibration, measured=measured)
                if speed is not None:
                    low, high = speed.step_seconds
                    before, after = (abs(own.seconds / each.estimate_seconds - 1) for each in (own.planned, speed))
                    pairs.append((low <= own.seconds <= high, after, before, high / low))
        everything += pairs
        if pairs:
            yield _calibrated_row(NAMES.get(source, source), pairs)
    yield _calibrated_row("all", everything)


def _calibrated_row(name: str, pairs: list[tuple[bool, float, float, float]]) -> list[str]:
    inside, after, before, width = zip(*pairs, strict=True)
    errors = (f"{100 * statistics.median(each):.1f} %" for each in (after, before))
    share = f"{statistics.mean(inside):.0%}".replace("%", " %")
    return [name, f"{len(pairs):,}", share, *errors, f"{statistics.median(width):.2f}"]


def main() -> None:
    files = {"published_speeds": published_speeds, "speed_intervals": intervals, "speed_sources": sources}
    for name, rows in {**files, "calibrated": calibrated}.items():
        (RESULTS / f"{name}.md").write_text(markdown(list(rows())))
    print(len(left_out_speeds()), "speeds")


if __name__ == "__main__":
    main()
