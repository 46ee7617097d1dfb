"""What a comparison would do, before anything starts: each trial's command, predicted memory, duration and cost."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, completed_sizes, failed_repeat, probes_of
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import ExpectedDuration, expected_duration, planned_memory, read_shape, search_bounds
from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.specification import ComparisonSpec, with_largest_batches
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.gpus import gpu_names
from toolkit.launch.command import launch_command
from toolkit.presets.preset import load_preset
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR, gib, number, seconds

SOURCE_TEXTS = {
    "trials": "by its trials in the ledger",
    "other trials": "by other rows' trials in the ledger",
    "planner": "of steps, by the planner",
}


def dry_run_text(options: CompareOptions, spec: ComparisonSpec, unsupported: Mapping[str, str]) -> str:
    """Return every trial in running order, with duration and cost of those left. `unsupported`: row to reason."""
    ledger = Ledger(options.output_dir / LEDGER_FILE)
    records, at_largest = ledger.read(), with_largest_batches(spec, ledger)
    if options.gpu is not None:
        gpu: Gpu | None = find_gpu(options.gpu)
    else:
        gpu = None if options.on_cpu else common_gpu(gpu_names())
    trials, allocation, shape = spec.trials(), spec.allocation(), read_shape(spec.model)
    durations: dict[Trial, ExpectedDuration | None] = {}
    searched = [] if spec.find_max_batch is None else [row for row in spec.rows() if row.name not in unsupported]
    lines = [_search_line(spec, row, records) for row in searched]
    for place, trial in enumerate(trials, 1):
        outlook = _reason_to_skip(trial, records, unsupported)
        if outlook is None:
            durations[trial] = duration = expected_duration(trial.row, records, at_largest, shape=shape, gpu=gpu)
            memory = f"predicted memory {gib(planned_memory(at_largest, trial.row, shape=shape)[0])}"
            outlook = f"duration {NOT_AVAILABLE}, {memory}"
            if duration is not None:
                span, source = _range(duration.low, duration.high), SOURCE_TEXTS[duration.source]
                outlook = f"duration {span} {source}; {memory}"
        lines.append(f"[{place}/{len(trials)}] {trial.id}: {outlook}")
        if trial.row.name not in unsupported:
            argv = at_largest.training_argv(trial.row, options.output_dir / "trials" / trial.id)
            preset, size = load_preset(spec.preset_sources[trial.row.preset]), trial.row.world_size
            command = launch_command(preset, num_processes=size, training_argv=argv, cpu=spec.cpu)
            lines.append(f"    {(command if allocation is None else allocation.spread(command)).shown}")
    total = _total(durations, options.price_per_gpu_hour)
    lines.append(f"{len(durations)} of {len(trials)} trials to run, in {total}; nothing was started")
    if any(duration is not None and duration.source == "planner" for duration in durations.values()):
        lines.append(
            f"durations by the planner are of steps on {gpu.name if gpu else NOT_AVAILABLE}, with rows of full length;"
            " starting, loading and saving come on top, and are known after a first trial"
        )
    if None in durations.values():
        why = "the planner needs a GPU that it lists, and --max_steps"
        on_cpu = "on a CPU no duration is known before a first trial: run one, stop, and repeat the dry run"
        lines.append(on_cpu if spec.cpu else f"no duration is known before a first trial: {why}")
    return "\n".join(lines)


def _search_line(spec: ComparisonSpec, row: RowKey, records: Mapping[str, LedgerRecord]) -> str:
    """One line for a row whose largest micro-batch is searched before its trials."""
    (start, cap), probes = search_bounds(spec, row), probes_of(records, row)
    if not probes:
        return f"{row.name}: its largest micro-batch is searched first, from {start} to {cap}, in runs of two steps"
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


def _range(low: float, high: float) -> str:
    return seconds(low) if seconds(low) == seconds(high) else f"{seconds(low)} to {seconds(high)}"
