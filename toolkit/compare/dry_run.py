"""What a comparison would do, before anything is started or paid for: each trial's command, and how long it may take.

print(dry_run_text(comparison, Path("out/comparison"), unsupported={}))
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.compare.ledger import LEDGER_FILE, Ledger
from toolkit.compare.planned import planned_bytes
from toolkit.compare.probes import Probes, bounds, completed, most_probes, probes_among, with_largest_batches
from toolkit.compare.trials import Comparison, Trial, row_name
from toolkit.launch.command import launch_command
from toolkit.models.shape import ModelShape
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.units import NOT_AVAILABLE, gib, number, seconds

Row = dict[str, Any]


def dry_run_text(
    comparison: Comparison,
    folder: Path,
    unsupported: Mapping[str, str],
    *,
    price_per_gpu_hour: float | None = None,
    shape: ModelShape | None = None,
) -> str:
    """Every trial in the running order; durations are those of trials in the folder's ledger, where it has any."""
    ledger = Ledger(folder / LEDGER_FILE).read()
    comparison = with_largest_batches(comparison, Ledger(folder / LEDGER_FILE))
    trials = comparison.trials()
    left = [trial for trial in trials if trial.id not in ledger and trial.row not in unsupported]
    lines = _searches(comparison, ledger, unsupported)
    for place, trial in enumerate(trials, 1):
        planned = planned_bytes(comparison, trial.preset, trial.num_processes, shape=shape)["planned_peak_bytes"]
        expected_here = _expectation(trial, ledger, unsupported, planned)
        lines.append(f"[{place}/{len(trials)}] {trial.id}: {expected_here}")
        if trial.row not in unsupported:
            lines.append(f"    {_command(comparison, trial, folder)}")
    expected = [expected_seconds(trial, ledger) for trial in left]
    known = [duration for duration in expected if duration is not None]
    complete = len(known) == len(expected)
    whole = seconds(sum(known)) if complete else NOT_AVAILABLE
    cost = ""
    if price_per_gpu_hour is not None:
        gpu_seconds = sum(trial.num_processes * (duration or 0) for trial, duration in zip(left, expected, strict=True))
        cost = f", at {number(gpu_seconds / 3600 * price_per_gpu_hour, 2) if complete else NOT_AVAILABLE}"
    return "\n".join([*lines, f"{len(left)} of {len(trials)} trials to run, in {whole}{cost}; nothing was started"])


def _searches(comparison: Comparison, ledger: Mapping[str, Row], unsupported: Mapping[str, str]) -> list[str]:
    """One line a row whose largest micro-batch is searched before its trials."""
    if comparison.find_max_batch is None:
        return []
    rows = [row for row in comparison.rows() if row_name(*row) not in unsupported]
    return [_search(comparison, preset, n, probes_among(ledger, row_name(preset, n))) for preset, n in rows]


def _search(comparison: Comparison, preset: str, num_processes: int, tried: Probes) -> str:
    start, cap = bounds(replace(comparison, batches={}), preset, num_processes)
    name = row_name(preset, num_processes)
    if not tried:
        most = most_probes(start=start, cap=cap)
        return (
            f"{name}: first its largest micro-batch is searched, from {start} to {cap}: at most {most} runs of 2 steps"
        )
    found = max(completed(tried), default=None)
    return f"{name}: of micro-batches up to {cap}, {', '.join(map(str, tried))} were tried, and {found or 'none'} runs"


def expected_seconds(trial: Trial, ledger: Mapping[str, Row]) -> float | None:
    """Median wall time of the trials of this row that are in the ledger, else of any; None without one."""
    done = [row for row in ledger.values() if row["status"] == status.COMPLETED and row.get("wall_seconds")]
    same = [row for row in done if (row["preset"], row["world_size"]) == (trial.preset, trial.num_processes)]
    return statistics.median(row["wall_seconds"] for row in same or done) if done else None


def _expectation(
    trial: Trial, ledger: Mapping[str, Row], unsupported: Mapping[str, str], planned_peak_bytes: int | None
) -> str:
    if trial.row in unsupported:
        return f"not supported here: {unsupported[trial.row]}"
    if trial.id in ledger:
        return f"{ledger[trial.id]['status']}, already in the ledger"
    return f"duration {seconds(expected_seconds(trial, ledger))}, predicted memory {gib(planned_peak_bytes)}"


def _command(comparison: Comparison, trial: Trial, folder: Path) -> str:
    argv = comparison.training_argv(trial.preset, trial.num_processes, folder / "trials" / trial.id)
    preset = load_preset(comparison.loads[trial.preset])
    return launch_command(preset, num_processes=trial.num_processes, training_argv=argv, cpu=comparison.cpu).shown
