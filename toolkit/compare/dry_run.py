"""What a comparison would do, before anything is started or paid for: each trial's command, and how long it may take.

print(dry_run_text(comparison, Path("out/comparison"), unsupported={}))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.compare.expected import Expected, expected_time
from toolkit.compare.ledger import LEDGER_FILE, Ledger
from toolkit.compare.planned import planned_bytes
from toolkit.compare.probes import (
    PROBE_STEPS,
    Probes,
    bounds,
    completed,
    most_probes,
    probes_among,
    with_largest_batches,
)
from toolkit.compare.run import failed_repeat
from toolkit.compare.trials import Comparison, Trial, row_name
from toolkit.hardware.gpu_table import Gpu
from toolkit.launch.command import launch_command
from toolkit.models.shape import ModelShape
from toolkit.presets import load_preset
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR, gib, number, seconds

Row = dict[str, Any]
SAID_BY = {
    "trials": "as its trials in the ledger",
    "other trials": "as other rows' trials in the ledger",
    "planner": "of steps, by the planner",
}
"""Where an expected duration comes from, beside a trial."""


def dry_run_text(
    comparison: Comparison,
    folder: Path,
    unsupported: Mapping[str, str],
    *,
    price_per_gpu_hour: float | None = None,
    shape: ModelShape | None = None,
    gpu: Gpu | None = None,
) -> str:
    """Every trial in the running order, what it takes, and what all that are left take and cost."""
    ledger = Ledger(folder / LEDGER_FILE).read()
    comparison = with_largest_batches(comparison, Ledger(folder / LEDGER_FILE))
    trials = comparison.trials()
    left = [trial for trial in trials if _why_not(trial, ledger, unsupported) is None]
    expected = {trial.id: expected_time(trial, ledger, comparison, shape=shape, gpu=gpu) for trial in left}
    lines = _searches(comparison, ledger, unsupported)
    for place, trial in enumerate(trials, 1):
        planned = planned_bytes(comparison, trial.preset, trial.num_processes, shape=shape)["planned_peak_bytes"]
        said = _why_not(trial, ledger, unsupported) or _expectation(expected.get(trial.id), planned)
        lines.append(f"[{place}/{len(trials)}] {trial.id}: {said}")
        if trial.row not in unsupported:
            lines.append(f"    {_command(comparison, trial, folder)}")
    whole = [(trial, expected[trial.id]) for trial in left]
    said = f"{len(left)} of {len(trials)} trials to run, in {_whole(whole, price_per_gpu_hour)}; nothing was started"
    return "\n".join([*lines, said, *_sources(comparison, list(expected.values()), gpu)])


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
        asked = f"{name}: first its largest micro-batch is searched, from {start} to {cap}"
        return f"{asked}: at most {most} runs of {PROBE_STEPS} steps"
    found = max(completed(tried), default=None)
    return f"{name}: of micro-batches up to {cap}, {', '.join(map(str, tried))} were tried, and {found or 'none'} runs"


def _why_not(trial: Trial, ledger: Mapping[str, Row], unsupported: Mapping[str, str]) -> str | None:
    """Why a trial would not be run; None for one that would."""
    if trial.row in unsupported:
        return f"not supported here: {unsupported[trial.row]}"
    if trial.id in ledger:
        return f"{ledger[trial.id]['status']}, already in the ledger"
    failed = failed_repeat(ledger, trial)
    return None if failed is None else f"not run, since {failed['trial']} ended as {failed['status']}"


def _expectation(expected: Expected | None, planned_peak_bytes: int | None) -> str:
    if expected is None:
        return f"duration {NOT_AVAILABLE}, predicted memory {gib(planned_peak_bytes)}"
    said = f"{_from_to(expected.low, expected.high)} {SAID_BY[expected.source]}"
    return f"duration {said}; predicted memory {gib(planned_peak_bytes)}"


def _whole(left: Sequence[tuple[Trial, Expected | None]], price_per_gpu_hour: float | None) -> str:
    """Seconds of all trials that are left, and what their GPUs cost in that time."""
    known = [(trial.num_processes, expected) for trial, expected in left if expected is not None]
    if len(known) < len(left):
        return NOT_AVAILABLE + ("" if price_per_gpu_hour is None else f", at {NOT_AVAILABLE}")
    said = _from_to(sum(expected.low for _, expected in known), sum(expected.high for _, expected in known))
    if price_per_gpu_hour is None:
        return said
    costs = [
        sum(n * bound for n, bound in bounds_of) / SECONDS_PER_HOUR * price_per_gpu_hour
        for bounds_of in ([(n, e.low) for n, e in known], [(n, e.high) for n, e in known])
    ]
    low, high = (number(cost, 2) for cost in costs)
    return f"{said}, at {low if low == high else f'{low} to {high}'}"


def _sources(comparison: Comparison, expected: Sequence[Expected | None], gpu: Gpu | None) -> list[str]:
    """What a duration counts, and why there is none."""
    said = []
    if any(found is not None and found.source == "planner" for found in expected):
        said.append(
            f"durations by the planner are of steps on {gpu.name if gpu else NOT_AVAILABLE}, with rows of full length;"
            " starting, loading and saving come on top, and are known after a first trial"
        )
    if any(found is None for found in expected) and comparison.cpu:
        said.append("on a CPU no duration is known before a first trial: run it, stop it, and look again")
    elif any(found is None for found in expected):
        said.append("no duration is known before a first trial: the planner needs a GPU that it lists, and --max_steps")
    return said


def _from_to(low: float, high: float) -> str:
    return seconds(low) if seconds(low) == seconds(high) else f"{seconds(low)} to {seconds(high)}"


def _command(comparison: Comparison, trial: Trial, folder: Path) -> str:
    argv = comparison.training_argv(trial.preset, trial.num_processes, folder / "trials" / trial.id)
    preset = load_preset(comparison.loads[trial.preset])
    return launch_command(preset, num_processes=trial.num_processes, training_argv=argv, cpu=comparison.cpu).shown
