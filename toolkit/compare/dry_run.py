"""What a comparison would do, before anything starts: each trial's command, predicted memory, duration and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.cluster.allocation import Allocation
from toolkit.compare.batch_search import (
    PROBE_STEPS,
    completed_sizes,
    most_probes,
    search_bounds,
    with_largest_batches,
)
from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, ProbeRecord, probes_of
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import ExpectedDuration, expected_duration, planned_memory, read_shape
from toolkit.compare.rows import RowKey
from toolkit.compare.runner import failed_repeat
from toolkit.compare.specification import ComparisonSpec, Trial
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.gpus import gpu_names
from toolkit.launch.command import launch_command
from toolkit.presets import load_preset
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR, gib, number, seconds

SOURCE_TEXTS = {
    "trials": "by its trials in the ledger",
    "other trials": "by other rows' trials in the ledger",
    "planner": "of steps, by the planner",
}


def dry_run_text(options: CompareOptions, spec: ComparisonSpec, unsupported: Mapping[str, str]) -> str:
    """Return every trial in running order, and the duration and cost of those that are left.

    `unsupported` maps the rows that cannot run to the reason.
    """
    ledger = Ledger(options.folder / LEDGER_FILE)
    records, spec_of_trials = ledger.read(), with_largest_batches(spec, ledger)
    trials, gpu, allocation = spec.trials(), gpu_to_predict_for(options), spec.allocation()
    shape = read_shape(spec.model)
    left = [trial for trial in trials if _reason_to_skip(trial, records, unsupported) is None]
    durations = {trial: expected_duration(trial.row, records, spec_of_trials, shape=shape, gpu=gpu) for trial in left}
    searched = [row for row in spec.rows() if spec.find_max_batch is not None and row.name not in unsupported]
    lines = [_search_line(spec, row, probes_of(records, row)) for row in searched]
    for place, trial in enumerate(trials, 1):
        memory = gib(planned_memory(spec_of_trials, trial.row, shape=shape).peak_bytes)
        outlook = _reason_to_skip(trial, records, unsupported) or _outlook(durations[trial], memory)
        lines.append(f"[{place}/{len(trials)}] {trial.id}: {outlook}")
        if trial.row.name not in unsupported:
            lines.append(f"    {_command(spec_of_trials, trial, options.folder, allocation)}")
    total = _total(durations, options.price_per_gpu_hour)
    lines.append(f"{len(left)} of {len(trials)} trials to run, in {total}; nothing was started")
    return "\n".join([*lines, *_notes(spec, list(durations.values()), gpu)])


def gpu_to_predict_for(options: CompareOptions) -> Gpu | None:
    """Return the GPU of `--gpu`, or else of this node if all are of one listed kind; None on a CPU."""
    if options.gpu is not None:
        return find_gpu(options.gpu)
    return None if options.on_cpu else common_gpu(gpu_names())


def _search_line(spec: ComparisonSpec, row: RowKey, probes: Mapping[int, ProbeRecord]) -> str:
    """One line for a row whose largest micro-batch is searched before its trials."""
    start, cap = search_bounds(spec, row)
    if not probes:
        most = most_probes(start=start, cap=cap)
        return (
            f"{row.name}: its largest micro-batch is searched first, from {start} to {cap}: at most {most} runs of"
            f" {PROBE_STEPS} steps"
        )
    largest, tried = max(completed_sizes(probes.values()), default=None), ", ".join(map(str, probes))
    return f"{row.name}: of micro-batches up to {cap}, {tried} were tried, and {largest or 'none'} runs"


def _reason_to_skip(trial: Trial, records: Mapping[str, LedgerRecord], unsupported: Mapping[str, str]) -> str | None:
    """Why the trial would not run; None if it would."""
    if trial.row.name in unsupported:
        return f"not supported here: {unsupported[trial.row.name]}"
    if trial.id in records:
        return f"{records[trial.id].status}, already in the ledger"
    failed = failed_repeat(records, trial)
    return None if failed is None else f"not run, since {failed.trial} ended as {failed.status}"


def _outlook(duration: ExpectedDuration | None, memory: str) -> str:
    if duration is None:
        return f"duration {NOT_AVAILABLE}, predicted memory {memory}"
    source = SOURCE_TEXTS[duration.source]
    return f"duration {_range(duration.low, duration.high)} {source}; predicted memory {memory}"


def _total(durations: Mapping[Trial, ExpectedDuration | None], price_per_gpu_hour: float | None) -> str:
    """Duration of the trials that are left, and the cost of their GPUs for as long."""
    ends = [(trial.row.world_size, span.low, span.high) for trial, span in durations.items() if span is not None]
    if len(ends) < len(durations):
        return NOT_AVAILABLE + ("" if price_per_gpu_hour is None else f", at {NOT_AVAILABLE}")
    total = _range(sum(low for _, low, _ in ends), sum(high for _, _, high in ends))
    if price_per_gpu_hour is None:
        return total
    gpu_seconds = sum(size * low for size, low, _ in ends), sum(size * high for size, _, high in ends)
    low, high = (number(part / SECONDS_PER_HOUR * price_per_gpu_hour, 2) for part in gpu_seconds)
    return f"{total}, at {low if low == high else f'{low} to {high}'}"


def _notes(spec: ComparisonSpec, durations: Sequence[ExpectedDuration | None], gpu: Gpu | None) -> list[str]:
    """What the durations count, and why one is unknown."""
    notes = []
    if any(duration is not None and duration.source == "planner" for duration in durations):
        notes.append(
            f"durations by the planner are of steps on {gpu.name if gpu else NOT_AVAILABLE}, with rows of full length;"
            " starting, loading and saving come on top, and are known after a first trial"
        )
    if None in durations and spec.cpu:
        notes.append("on a CPU no duration is known before a first trial: run one, stop, and repeat the dry run")
    elif None in durations:
        notes.append(
            "no duration is known before a first trial: the planner needs a GPU that it lists, and --max_steps"
        )
    return notes


def _range(low: float, high: float) -> str:
    return seconds(low) if seconds(low) == seconds(high) else f"{seconds(low)} to {seconds(high)}"


def _command(spec: ComparisonSpec, trial: Trial, folder: Path, allocation: Allocation | None) -> str:
    preset = load_preset(spec.preset_sources[trial.row.preset])
    argv = spec.training_argv(trial.row, folder / "trials" / trial.id)
    command = launch_command(preset, num_processes=trial.row.world_size, training_argv=argv, cpu=spec.cpu)
    return command.shown if allocation is None else allocation.spread(command).shown
