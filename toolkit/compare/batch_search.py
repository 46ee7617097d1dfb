"""The search for the largest micro-batch of each row that runs, by doubling and then halving.

A probe is a run of two steps and a record in the ledger, like a trial: an interrupted search resumes, and no size that
ran out of memory is tried again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from toolkit.compare.ledger import ProbeRecord, TrialRecord, completed_sizes, probes_of
from toolkit.compare.predictions import search_bounds
from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.run_record import read_run_record
from toolkit.compare.runner import Runner
from toolkit.compare.specification import BATCH_ARGUMENT, with_largest_batches
from toolkit.job.job import Job

# Optimizer states are allocated in the first step; the second holds everything.
PROBE_STEPS = 2


def search(
    known: Mapping[int, ProbeRecord], probe: Callable[[int], ProbeRecord], *, start: int, cap: int
) -> int | None:
    """Return the largest micro-batch up to `cap` that runs, None if none does. Sizes in `known` are not probed again.

    A failure for another reason than memory means that the size does not run. If no size has run yet, the reason is
    not the size, and no smaller one is tried.
    """
    probes = dict(known)
    low, high, size = 0, cap + 1, min(start, cap)  # low runs, high does not
    while high - low > 1:
        if size not in probes:
            probes[size] = probe(size)
        outcome = probes[size]
        if not (outcome.completed or outcome.out_of_memory or completed_sizes(probes.values())):
            return None
        low, high = (size, high) if outcome.completed else (low, size)
        size = min(2 * low, cap) if high == cap + 1 and low else (low + high) // 2
    return low or None


def find_largest_batches(
    runner: Runner, unsupported: Mapping[str, str], *, retry_failed: bool = False
) -> tuple[Runner, dict[str, str]]:
    """Return a runner with each row at its largest micro-batch, and for the rows without any the reason."""
    without: dict[str, str] = {}
    for row in runner.spec.rows():
        if row.name in unsupported:
            continue
        known = probes_of(runner.ledger.read(), row)
        if retry_failed and not completed_sizes(known.values()):
            known = {}
        start, cap = search_bounds(runner.spec, row)
        if search(known, functools.partial(_probe, runner, row), start=start, cap=cap) is None:
            without[row.name] = _record_failure(runner, row)
    return replace(runner, spec=with_largest_batches(runner.spec, runner.ledger)), without


def _probe(runner: Runner, row: RowKey, size: int) -> ProbeRecord:
    name, arguments = f"{row.name}-b{size}", probe_arguments(runner.spec.job(row), size)
    run_folder = runner.start_run(row, runner.folder / "probes" / name, arguments)
    measured = read_run_record(Trial(row=row, repeat=0), run_folder, runner.folder, untimed_steps=0)
    record = ProbeRecord.of(measured, trial=name, per_device_train_batch_size=size)
    runner.ledger.append(record)
    runner.progress.finish_probe(record)
    return record


def probe_arguments(job: Job, size: int) -> list[str]:
    """Return the training arguments of a probe, which begins with the longest rows: no trial pads a batch further."""
    words = [f"--{BATCH_ARGUMENT}", str(size), "--max_steps", str(PROBE_STEPS)]
    return words if job.streaming or job.packing else [*words, "--train_sampling_strategy", "group_by_length"]


def _record_failure(runner: Runner, row: RowKey) -> str:
    """Record the outcome of the smallest size as the row's first trial; return the reason."""
    records = runner.ledger.read()
    size, probe = next(iter(probes_of(records, row).items()))
    reason = f"micro-batch {size} ended as {probe.status}"
    trials = [Trial(row=row, repeat=repeat).id for repeat in range(runner.spec.repeats)]
    failed = TrialRecord.of(probe, trial=trials[0], message=f"with a micro-batch of {size}: {probe.message}")
    if records.get(trials[0]) != failed:
        runner.ledger.append(failed)
    for trial in trials:
        runner.progress.skip(trial, reason)
    return reason
