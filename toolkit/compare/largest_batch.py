"""The largest micro-batch that runs for each row, found by doubling and then halving; known failures are remembered.

    largest_that_runs(lambda size: size <= 12, start=2, cap=64)     # 12

A probe is a run of a few steps, and a line in the ledger like a trial: a search that was stopped goes on, and a size
that ran out of memory is never tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from toolkit.compare.ledger import Ledger
from toolkit.compare.rows import row_of
from toolkit.compare.run import Runner
from toolkit.compare.trials import Comparison, Trial, row_name
from toolkit.errors import ToolkitError
from toolkit.runs import status
from toolkit.runs.argv import DEFAULT_BATCH, integer

Row = dict[str, Any]
BATCH = "per_device_train_batch_size"
# Optimizer states are there after the first step; the second holds everything.
PROBE_STEPS = 2
OUT_OF_MEMORY = (status.OUT_OF_MEMORY, status.HOST_OUT_OF_MEMORY)


def largest_that_runs(runs: Callable[[int], bool], *, start: int, cap: int) -> int | None:
    """The largest size up to `cap` that runs; None where none does. Takes for granted that a smaller size runs too."""
    low, high, size = 0, cap + 1, min(start, cap)  # low runs, high does not
    while high - low > 1:
        low, high = (size, high) if runs(size) else (low, size)
        size = min(2 * low, cap) if high == cap + 1 and low else (low + high) // 2
    return low or None


def find_largest_batches(runner: Runner, unsupported: Mapping[str, str]) -> Runner:
    """The same runner, with each row at its largest micro-batch."""
    for preset, n in runner.comparison.rows():
        if row_name(preset, n) not in unsupported:
            _search(runner, preset, n)
    return replace(runner, comparison=with_largest_batches(runner.comparison, runner.ledger))


def with_largest_batches(comparison: Comparison, ledger: Ledger) -> Comparison:
    """Each row at the largest micro-batch that a probe in the ledger ran."""
    if comparison.find_max_batch is None:
        return comparison
    batches = dict(comparison.batches)
    for preset, n in comparison.rows():
        ran = [size for size, row in probes(ledger, preset, n).items() if row["status"] == status.COMPLETED]
        if ran:
            batches[row_name(preset, n)] = {BATCH: max(ran)}
    return replace(comparison, batches=batches)


def probes(ledger: Ledger, preset: str, num_processes: int) -> dict[int, Row]:
    """Micro-batch to the probe of it that the ledger has."""
    prefix = f"{row_name(preset, num_processes)}-b"
    found = {name: row for name, row in ledger.read().items() if name.startswith(prefix)}
    return {int(name.removeprefix(prefix)): row for name, row in found.items()}


def _search(runner: Runner, preset: str, num_processes: int) -> None:
    arguments = runner.comparison.arguments(preset, num_processes)
    start, cap = integer(arguments, BATCH, DEFAULT_BATCH), runner.comparison.find_max_batch or 1

    def runs(size: int) -> bool:
        row = probes(runner.ledger, preset, num_processes).get(size) or _probe(runner, preset, num_processes, size)
        if row["status"] not in (status.COMPLETED, *OUT_OF_MEMORY):
            raise ToolkitError(f"{row['trial']} ended as {row['status']}: {row['message']}")
        return bool(row["status"] == status.COMPLETED)

    largest_that_runs(runs, start=start, cap=cap)


def _probe(runner: Runner, preset: str, num_processes: int, size: int) -> Row:
    """A short run at this micro-batch, in the ledger."""
    name = f"{row_name(preset, num_processes)}-b{size}"
    trial = Trial(preset=preset, num_processes=num_processes, repeat=0)
    words = [f"--{BATCH}", str(size), "--max_steps", str(PROBE_STEPS)]
    run_folder = runner.train(trial, runner.folder / "probes" / name, words)
    row = row_of(trial, run_folder, runner.folder, untimed_steps=0, position=0) | {"trial": name}
    runner.ledger.append(row)
    runner.telling.probe(name, row)
    return row
