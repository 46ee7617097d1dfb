"""Write the tables of planned against published speeds into benchmarks/results: `python benchmarks/speed_tables.py`.

By source, by what bounds a step, and calibrated by a run.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests" / name) for name in ("support", "warm_starts")]

from left_out_speeds import (  # noqa: E402
    WITHOUT,
    CalibratedPair,
    Speed,
    by,
    calibrated_pairs,
    compared,
    held_out_coverage,
    speed_of,
    table,
)

NAMES = {"stas00": "stas00/ml-engineering", "llm-foundry": "MosaicML (llm-foundry)"}


def percent(share: float) -> str:
    return f"{share:.0%}"


def median_error(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}"


def shares(speeds: Sequence[Speed]) -> tuple[str, str]:
    """Return the share inside of the interval, and the median error of the estimate."""
    return percent(statistics.mean(each.is_inside for each in speeds)), median_error([each.error for each in speeds])


def published_speeds() -> Iterator[list[str]]:
    yield ["source", "rows", "inside, fitted", "left out", "median error, fitted", "left out"]
    left_out = by("source")
    for source, jobs in compared().items():
        fitted, without = shares([speed_of(job) for job in jobs]), shares(left_out[source])
        yield [NAMES.get(source, source), str(len(jobs)), fitted[0], without[0], fitted[1], without[1]]


def speed_sources() -> Iterator[list[str]]:
    held_out = held_out_coverage()
    head, *rows = table(by("source"), "source, left out")
    shown = [0, 1, 3, 5, 6]
    yield [*(head[place] for place in shown), "inside, as wide as the others need"]
    for row in rows:
        share = held_out.get(row[0], statistics.mean(held_out.values()))
        yield [NAMES.get(row[0], row[0]), *(row[place] for place in shown[1:]), percent(share)]


def calibrated() -> Iterator[list[str]]:
    yield ["source", "pairs", "inside", "median error", "not calibrated", "width at the median"]
    by_source = {source: calibrated_pairs(source) for source in WITHOUT}
    for source, pairs in by_source.items():
        if pairs:
            yield calibrated_row(NAMES.get(source, source), pairs)
    yield calibrated_row("all", [pair for pairs in by_source.values() for pair in pairs])


def calibrated_row(name: str, pairs: Sequence[CalibratedPair]) -> list[str]:
    share = percent(statistics.mean(pair.is_inside for pair in pairs))
    errors = (median_error([getattr(pair, which) for pair in pairs]) for which in ("error", "error_before"))
    return [name, f"{len(pairs):,}", share, *errors, f"{statistics.median(pair.width for pair in pairs):.2f}"]


def markdown(rows: list[list[str]]) -> str:
    """Return a table whose first column is text, and the others numbers."""
    head, *lines = rows
    aligned = [":---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n".replace("%", " %") for row in (head, aligned, *lines))


def main() -> None:
    tables = {"published_speeds": published_speeds(), "speed_intervals": table(by("bound"), "bound by")}
    tables |= {"speed_sources": speed_sources(), "calibrated": calibrated()}
    for name, rows in tables.items():
        (ROOT / "benchmarks" / "results" / f"{name}.md").write_text(markdown(list(rows)))


if __name__ == "__main__":
    main()
