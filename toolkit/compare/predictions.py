"""What is known of a comparison before it runs: each trial's command, memory, duration and cost.

The memory is the planner's. The duration comes from trials in the ledger, else from the planner's step time; on a CPU
none is known before a first trial.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, completed_sizes, failed_repeat, probes_of
from toolkit.compare.options import CompareOptions
from toolkit.compare.rows import MODEL_STATES, RowKey, Trial
from toolkit.compare.specification import ComparisonSpec, with_largest_batches
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.gpus import gpu_names
from toolkit.job.job import Job
from toolkit.launch.preflight import check_dataset
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.planned_job import PlannedJob, check_planned_job, with_workspaces
from toolkit.plan.step_time import step_time
from toolkit.plan.training_setup import TrainingSetup
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR, counted, gib, number, seconds

# When the training script ends a run early (toolkit/observe/early_stopping.py): it decides after every fifth step
# once ten steps are timed, and all ranks end two steps later.
MIN_TIMED_STEPS, DECISION_INTERVAL, STEPS_AFTER_DECISION = 10, 5, 2
# Sources of a duration, as the dry run names them.
SOURCE_TEXTS = {
    "trials": "by its trials in the ledger",
    "other trials": "by other rows' trials in the ledger",
    "planner": "of steps, by the planner",
}


class ExpectedDuration(NamedTuple):
    """Seconds of one trial, and their source."""

    low: float
    high: float
    source: Literal["trials", "planner", "other trials"]


def read_shape(job: Job | None) -> ModelShape | None:
    """Return the shape of a job's model; None if its configuration cannot be read or its architecture is unknown."""
    with contextlib.suppress(ToolkitError, OSError, ImportError):
        return None if job is None else read_model(str(job.model_name_or_path))
    return None


def planned_memory(
    spec: ComparisonSpec, row: RowKey, *, shape: ModelShape | None, gpu: Gpu | None = None
) -> MemoryPlan | None:
    """Return a row's plan for sequences of full length, on `gpu` or this node's; None if nothing is planned."""
    if shape is None:
        return None
    with contextlib.suppress(ToolkitError):
        job, preset = spec.job(row), spec.preset(row.preset)
        planned_job = PlannedJob.of(job)
        check_planned_job(planned_job, shape)
        if gpu is None and not spec.cpu:
            gpu = common_gpu(gpu_names())
        if gpu is not None:
            planned_job = with_workspaces(planned_job, gpu)
        mixed_precision = "no" if "bf16" in job.given and not job.bf16 else None
        return plan_memory(shape, preset, world_size=row.world_size, job=planned_job, mixed_precision=mixed_precision)
    return None


def planned_columns(
    spec: ComparisonSpec, row: RowKey, *, shape: ModelShape | None, gpu: Gpu | None = None
) -> dict[str, int]:
    """Return the row's columns that the planner knows: on a CPU, which has no such peak, the model states of a GPU."""
    if (plan := planned_memory(spec, row, shape=shape, gpu=gpu)) is None:
        return {}
    states = {f"planned_gpu_{part}": int(getattr(plan.states, part)) for part in MODEL_STATES}
    peak = {"planned_peak_bytes": plan.planned_peak_bytes, "planned_allocated_bytes": plan.peak.allocated_bytes}
    return states if spec.cpu else states | peak


def expected_duration(
    row: RowKey,
    records: Mapping[str, LedgerRecord],
    spec: ComparisonSpec,
    *,
    shape: ModelShape | None = None,
    gpu: Gpu | None = None,
) -> ExpectedDuration | None:
    """Return a trial's seconds: by the row's own trials, by the plan, or by others' trials; None if unknown."""
    trials = [record for record in records.values() if record.kind == "trial" and record.completed]
    own, others = (
        [trial.wall_seconds for trial in trials if trial.wall_seconds and (trial.key == row) is is_own]
        for is_own in (True, False)
    )
    if own:
        return ExpectedDuration(min(own), max(own), "trials")
    if planned := _planned_duration(row, spec, shape, gpu):
        return planned
    return ExpectedDuration(min(others), max(others), "other trials") if others else None


def _planned_duration(
    row: RowKey, spec: ComparisonSpec, shape: ModelShape | None, gpu: Gpu | None
) -> ExpectedDuration | None:
    """The steps alone, with sequences of full length; what comes before and after them is not planned."""
    steps = fewest = spec.job(row).max_steps
    if spec.cpu or spec.ranks_per_gpu > 1 or shape is None or gpu is None or steps <= 0:
        return None
    with contextlib.suppress(ToolkitError):
        job, preset = PlannedJob.of(spec.job(row)), spec.preset(row.preset)
        setup = TrainingSetup(shape=shape, preset=preset, world_size=row.world_size, job=job)
        per_node = spec.processes_per_node or job.gpus_per_node
        planned = step_time(setup, Interconnect(gpu=gpu, world_size=row.world_size, gpus_per_node=per_node))
        if planned is not None:
            low, high = planned.step_seconds
            if spec.target_interval is not None:
                decisions = math.ceil((spec.untimed_steps + MIN_TIMED_STEPS) / DECISION_INTERVAL)
                fewest = min(steps, decisions * DECISION_INTERVAL + STEPS_AFTER_DECISION)
            limit = math.inf if spec.trial_minutes is None else 60 * spec.trial_minutes
            return ExpectedDuration(low * fewest, min(high * steps, limit), "planner")
    return None


def search_bounds(spec: ComparisonSpec, row: RowKey) -> tuple[int, int]:
    """Return where a row's search starts (the job's own per-GPU batch) and ends (what the option or the data allow)."""
    job, cap = spec.job(row), spec.find_max_batch or 1
    dataset_rows = check_dataset(job)
    if dataset_rows is not None:
        cap = max(1, min(cap, dataset_rows // (spec.data_parallel_size(row) * job.gradient_accumulation_steps)))
    return min(job.per_device_train_batch_size, cap), cap


def dry_run(options: CompareOptions, spec: ComparisonSpec, unsupported: Mapping[str, str]) -> dict[str, Any]:
    """Return what `--dry-run --json` prints: every trial in running order. `unsupported`: row to reason."""
    records, rows = Ledger(options.output_dir / LEDGER_FILE).read(), list[dict[str, Any]]()
    at_largest = with_largest_batches(spec, records)
    named = None if options.gpu is None else find_gpu(options.gpu)
    gpu = named if named or options.on_cpu else common_gpu(gpu_names())
    allocation, shape = spec.allocation(), read_shape(spec.own_job)
    for trial in spec.trials():
        command, duration, planned = None, None, dict[str, int]()
        if trial.row.name not in unsupported:
            words = at_largest.command(at_largest.train_options(trial.row, options.output_dir / "trials" / trial.id))
            command = (words if allocation is None else allocation.spread(words)).shown
        if (not_run := _reason_to_skip(trial, records, unsupported)) is None:
            duration = expected_duration(trial.row, records, at_largest, shape=shape, gpu=gpu)
            planned = planned_columns(at_largest, trial.row, shape=shape, gpu=named)
        facts = {"preset": trial.row.preset, "world_size": trial.row.world_size, "repeat": trial.repeat}
        facts |= {"trial": trial.label, "not_run": not_run, "command": command}
        facts |= {"seconds": duration and duration[:2], "source": duration and duration.source}
        rows.append(facts | {"planned_peak_bytes": planned.get("planned_peak_bytes")})
    searched = [] if spec.find_max_batch is None else [row for row in spec.rows() if row.name not in unsupported]
    searches = [_search_line(spec, row, records) for row in searched]
    return {"trials": rows, "searches": searches, "gpu": gpu and gpu.name}


def dry_run_text(planned: Mapping[str, Any], spec: ComparisonSpec, price_per_gpu_hour: float | None) -> str:
    """Return a dry run as lines, with duration and cost of the trials that are left."""
    lines, trials = list(planned["searches"]), planned["trials"]
    for place, facts in enumerate(trials, 1):
        outlook = facts["not_run"]
        if outlook is None:
            span, source = facts["seconds"], facts["source"]
            known = f"{NOT_AVAILABLE}," if span is None else f"{_range(*span)} {SOURCE_TEXTS[source]};"
            outlook = f"duration {known} predicted memory {gib(facts['planned_peak_bytes'])}"
        lines.append(f"[{place}/{len(trials)}] {facts['trial']}: {outlook}")
        lines += [] if facts["command"] is None else [f"    {facts['command']}"]
    left = [(facts["world_size"], facts["seconds"]) for facts in trials if facts["not_run"] is None]
    total = _total(left, price_per_gpu_hour)
    lines.append(f"{len(left)} of {len(trials)} trials to run, in {total}; nothing was started")
    if any(facts["source"] == "planner" for facts in trials):
        lines.append(
            f"durations by the planner are of steps on {planned['gpu'] or NOT_AVAILABLE}, with rows of full length;"
            " starting, loading and saving come on top, and are known after a first trial"
        )
    if None in (span for _, span in left):
        why = "the planner needs a GPU that it lists, for each rank, and --max_steps"
        where = "of a script" if spec.script_or_module else "on a CPU"
        on_cpu = f"{where} no duration is known before a first trial: run one, stop, and repeat the dry run"
        unplanned = spec.cpu or spec.script_or_module
        lines.append(on_cpu if unplanned else f"no duration is known before a first trial: {why}")
    return "\n".join(lines)


def announcement(options: CompareOptions, spec: ComparisonSpec, unsupported: Mapping[str, str]) -> str:
    """Return how many trials are left to run, why so many, and how long they take, as far as that is known."""
    records, shape = Ledger(options.output_dir / LEDGER_FILE).read(), read_shape(spec.own_job)
    gpu = None if options.on_cpu else common_gpu(gpu_names())
    left = [trial.row for trial in spec.trials() if _reason_to_skip(trial, records, unsupported) is None]
    spans = [expected_duration(row, records, spec, shape=shape, gpu=gpu) for row in left]
    total = _total([(row.world_size, span) for row, span in zip(left, spans, strict=True)], None)
    rows = counted(len(spec.rows()) - len(unsupported), "preset" if len(spec.world_sizes) == 1 else "row")
    known = "how long is known after the first" if total == NOT_AVAILABLE else f"{total} in all"
    why = "; repeats tell a difference from noise, `--repeats 1` makes single runs" if spec.repeats > 1 else ""
    return f"{rows} x {counted(spec.repeats, 'repeat')}, {counted(len(left), 'trial')} to run: {known}{why}"


def _search_line(spec: ComparisonSpec, row: RowKey, records: Mapping[str, LedgerRecord]) -> str:
    (start, cap), probes = search_bounds(spec, row), probes_of(records, row)
    if not probes:
        return f"{row.name}: its largest per-GPU batch is searched first, from {start} to {cap}, in runs of two steps"
    largest, tried = max(completed_sizes(probes), default=None), ", ".join(map(str, probes))
    return f"{row.name}: of per-GPU batches up to {cap}, {tried} were tried, and {largest or 'none'} runs"


def _reason_to_skip(trial: Trial, records: Mapping[str, LedgerRecord], unsupported: Mapping[str, str]) -> str | None:
    if trial.row.name in unsupported:
        return f"not supported here: {unsupported[trial.row.name]}"
    if trial.id in records:
        return f"{records[trial.id].status}, already in the ledger"
    failed = failed_repeat(records, trial)
    return None if failed is None else f"not run, since {failed.label} ended as {failed.status}"


def _total(durations: Sequence[tuple[int, Sequence[Any] | None]], price_per_gpu_hour: float | None) -> str:
    ends = [(size, *span[:2]) for size, span in durations if span is not None]
    if len(ends) < len(durations):
        return NOT_AVAILABLE + ("" if price_per_gpu_hour is None else f", at {NOT_AVAILABLE}")
    total = _range(sum(low for _, low, _ in ends), sum(high for _, _, high in ends))
    if price_per_gpu_hour is None:
        return total
    costs = (
        number(sum(size * span[end] for size, *span in ends) / SECONDS_PER_HOUR * price_per_gpu_hour, 2)
        for end in (0, 1)
    )
    return f"{total}, at {' to '.join(dict.fromkeys(costs))}"


def _range(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys((seconds(low), seconds(high))))
