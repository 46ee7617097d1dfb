"""The largest micro-batch that runs for each row, found by doubling and then halving; known failures are remembered.

    largest_that_runs(lambda size: size <= 12, start=2, cap=64)     # 12

A probe is a run of a few steps, and a line in the ledger like a trial: a search that was stopped goes on, and a size
that ran out of memory is never tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from toolkit.compare.probes import Probes, bounds, completed, probe_words, probes_among, with_largest_batches
from toolkit.compare.rows import row_of
from toolkit.compare.run import Runner
from toolkit.compare.trials import Trial, row_name
from toolkit.runs import status

Row = dict[str, Any]
OUT_OF_MEMORY = (status.OUT_OF_MEMORY, status.HOST_OUT_OF_MEMORY)


def largest_that_runs(runs: Callable[[int], bool], *, start: int, cap: int) -> int | None:
    """The largest size up to `cap` that runs; None where none does. Takes for granted that a smaller size runs too."""
    low, high, size = 0, cap + 1, min(start, cap)  # low runs, high does not
    while high - low > 1:
        low, high = (size, high) if runs(size) else (low, size)
        size = min(2 * low, cap) if high == cap + 1 and low else (low + high) // 2
    return low or None


def search(known: Probes, probe: Callable[[int], Row], *, start: int, cap: int) -> int | None:
    """The largest micro-batch whose probe completes; None where none does. No size in `known` is probed again.

    A size that fails for another reason than memory does not run either. Where nothing has run yet, such a reason is
    not the size's, and no smaller one is tried.
    """
    found, hopeless = dict(known), False

    def runs(size: int) -> bool:
        nonlocal hopeless
        if hopeless:
            return False
        if size not in found:
            found[size] = probe(size)
        hopeless = found[size]["status"] not in OUT_OF_MEMORY and not completed(found)
        return bool(found[size]["status"] == status.COMPLETED)

    return largest_that_runs(runs, start=start, cap=cap)


def find_largest_batches(
    runner: Runner, unsupported: Mapping[str, str], *, retry_failed: bool = False
) -> tuple[Runner, dict[str, str]]:
    """The same runner with each row at its largest micro-batch, and why the rows without any cannot run."""
    without: dict[str, str] = {}
    for preset, n in runner.comparison.rows():
        name = row_name(preset, n)
        if name not in unsupported and _search_row(runner, preset, n, retry_failed=retry_failed) is None:
            without[name] = _record_failure(runner, Trial(preset=preset, num_processes=n, repeat=0))
    return replace(runner, comparison=with_largest_batches(runner.comparison, runner.ledger)), without


def _search_row(runner: Runner, preset: str, num_processes: int, *, retry_failed: bool) -> int | None:
    known = probes_among(runner.ledger.read(), row_name(preset, num_processes))
    if retry_failed and not completed(known):
        known = {}
    start, cap = bounds(runner.comparison, preset, num_processes)
    return search(known, lambda size: _probe(runner, preset, num_processes, size), start=start, cap=cap)


def _probe(runner: Runner, preset: str, num_processes: int, size: int) -> Row:
    """A short run at this micro-batch, in the ledger."""
    name = f"{row_name(preset, num_processes)}-b{size}"
    trial = Trial(preset=preset, num_processes=num_processes, repeat=0)
    words = probe_words(runner.comparison.arguments(preset, num_processes), size)
    run_folder = runner.train(trial, runner.folder / "probes" / name, words)
    row = row_of(trial, run_folder, runner.folder, untimed_steps=0, position=0) | {"trial": name}
    runner.ledger.append(row)
    runner.telling.probe(name, row)
    return row


def _record_failure(runner: Runner, trial: Trial) -> str:
    """What the smallest size ended as is what its row ended as, and stands in the ledger as the first repeat: why."""
    finished = runner.ledger.read()
    size, row = next(iter(probes_among(finished, trial.row).items()))
    why = f"micro-batch {size} ended as {row['status']}"
    failed = row | {"trial": trial.id, "message": f"with a micro-batch of {size}: {row['message']}"}
    if finished.get(trial.id) != failed:
        runner.ledger.append(failed)
    for repeat in range(runner.comparison.repeats):
        runner.telling.skip(replace(trial, repeat=repeat).id, why)
    return why
