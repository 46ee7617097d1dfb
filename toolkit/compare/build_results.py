"""Build the results of a comparison from its ledger, its specification and this node.

Each trial is checked against the baseline's, and the trials of a row are combined. Every speed of a row counts the same
steps: those that all trials with its number of processes have timed. The planner, the batch search, the side runs, the
GPU's peak and the price add their columns.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.compare import significance
from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, SideRunKind, probes_of, side_runs_of
from toolkit.compare.parity import check_parity, design_group
from toolkit.compare.predictions import planned_columns, read_shape
from toolkit.compare.results import RESULTS_FILE, ComparedJob, ComparisonMethod, Environment, Results, load_results
from toolkit.compare.rows import NOT_SUPPORTED, Failure, FlopsPerToken, Probe, Row, RowKey, Run, TrainedProblem
from toolkit.compare.specification import SPEC_FILE, ComparisonSpec, with_largest_batches
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json_object
from toolkit.hardware.disks import disk_facts
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.gpus import gpu_topology
from toolkit.hardware.node import cpu_limit, describe_node, git_commit, library_versions, memory_limit_bytes
from toolkit.job.global_batch import BATCH_ARGUMENT
from toolkit.job.job import Job
from toolkit.models.flops import flops_of, mfu
from toolkit.models.shape import ModelShape
from toolkit.record.columns import Repeats, column_of
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import MemoryByPhase, max_memory_by_phase, percentile
from toolkit.record.run_files import read_run
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR

# What a row takes from one of its repeats: every key that both have.
FROM_TRIAL = tuple(key for key in Row.model_fields if key in Run.model_fields)
# The rules that combine repeats: where all completed, and where some failed too.
OF_COMPLETED = (Repeats.GEOMETRIC_MEAN, Repeats.MEDIAN, Repeats.LARGEST)
OF_ALL = (Repeats.MEDIAN_OF_ALL, Repeats.LARGEST_OF_ALL, Repeats.UNION_OF_ALL)
# The columns that each kind of side run measures.
SIDE_RUN_COLUMNS: dict[SideRunKind, tuple[str, ...]] = {
    "profile": ("communication_fraction", "exposed_communication_fraction", "timeline"),
    "save": ("save_seconds", "save_bytes"),
}
# Of the job, or of the Trainer of somebody's own script.
NUMBERS_OF_JOB = ("seed", "per_device_train_batch_size", "gradient_accumulation_steps")
GPU_TABLE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def is_search(folder: Path) -> bool:
    """Return True for a folder of `toolkit tune`, whose settings have as many trials as the search needed."""
    return (folder / "tune.json").is_file()


def unfinished_results(folder: Path, price_per_gpu_hour: float | None) -> Results | None:
    """Return the results of a stopped comparison; None for a complete one. Raises ToolkitError without a trial."""
    if not (folder / SPEC_FILE).is_file():
        return None
    spec = ComparisonSpec.model_validate(read_json_object(folder / SPEC_FILE))
    records = Ledger(folder / LEDGER_FILE).read()
    trials = [record for record in records.values() if record.kind == "trial"]
    if (folder / RESULTS_FILE).exists() and len(load_results(folder).trials) >= len(trials):
        return None
    if not trials:
        raise ToolkitError(f"no trial of {folder} has finished", hint="the same `toolkit compare` with `--resume`")
    run = read_run(RunFolder(folder / trials[0].run_folder))
    node = dict(run.hardware or {}, device="cpu" if spec.cpu else "cuda", git_commit=run.git_commit)
    node |= {"versions": {name: version for name, version in (run.versions or {}).items() if version}}
    environment = Environment.model_validate(node | ({"gpus": []} if spec.cpu else {}))
    spec = with_largest_batches(spec, records)
    return build_results(spec, folder, {}, price_per_gpu_hour=price_per_gpu_hour, stopped_on=environment)


def build_results(
    spec: ComparisonSpec,
    folder: Path,
    unsupported: Mapping[str, str],
    *,
    price_per_gpu_hour: float | None = None,
    stopped_on: Environment | None = None,
) -> Results:
    """Return the results in `folder`. `unsupported`: row name to reason; `stopped_on`: node of an unfinished one."""
    records = Ledger(folder / LEDGER_FILE).read()
    aggregated, trials = aggregate_trials(records, spec, unsupported)
    job = spec.own_job
    environment, shape = stopped_on or _environment(spec, folder), read_shape(job)
    rows = [
        with_efficiency(
            _with_derived_columns(row, trials, records, spec, shape),
            [trial for trial in trials if trial.key == row.key],
            shape=shape,
            environment=environment,
        )
        for row in aggregated
    ]
    numbers = job or _numbers(spec, spec.baseline(spec.world_sizes[0]), trials)
    results = Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        reference=spec.reference,
        unfinished=stopped_on is not None and not is_search(folder),
        environment=environment,
        job=ComparedJob(
            script=spec.script_or_module,
            script_sha256=spec.script_sha256,
            model=None if job is None else str(job.model_name_or_path),
            dataset=None if job is None else ", ".join(job.dataset),
            training_arguments=spec.training_arguments,
            stop_after_steps=spec.stop_after_steps,
            untimed_steps=spec.untimed_steps,
            **{name: getattr(numbers, name) for name in NUMBERS_OF_JOB},
            compute_dtype=", ".join(sorted({row.compute_dtype for row in rows if row.compute_dtype})) or NOT_AVAILABLE,
        ),
        rows=tuple(rows),
        trials=tuple(trials),
        method=ComparisonMethod(
            repeats=spec.repeats,
            order_seed=spec.order_seed,
            search=is_search(folder),
            interval=significance.METHOD if spec.repeats > 1 else "none: single runs",
            ratio_confidence=significance.confidence_of(rows),
            target_interval=spec.target_interval,
            scaling=spec.scaling,
            ranks_per_gpu=spec.ranks_per_gpu,
        ),
    )
    return results if price_per_gpu_hour is None else at_price(results, price_per_gpu_hour)


def at_price(results: Results, price_per_gpu_hour: float) -> Results:
    """Return the results with each row's cost of a million tokens; unknown without a speed, and on a CPU."""
    rows = []
    for row in results.rows:
        speed = row.non_padding_tokens_per_second
        gpus_per_token = None if results.on_cpu or not speed else row.world_size / SECONDS_PER_HOUR / speed * 10**6
        rows.append(row.updated(cost_per_million_tokens=gpus_per_token and price_per_gpu_hour * gpus_per_token))
    return results.updated(rows=tuple(rows), price_per_gpu_hour=price_per_gpu_hour)


def _environment(spec: ComparisonSpec, folder: Path) -> Environment:
    return Environment.model_validate(
        {
            **describe_node(),
            "device": "cpu" if spec.cpu else "cuda",
            **({"gpus": []} if spec.cpu else {}),
            "versions": {name: version for name, version in library_versions().items() if version is not None},
            "git_commit": git_commit(Path(__file__).parent),
            "disk": disk_facts(folder),
            "links": None if spec.cpu else gpu_topology(),
            "memory_limit_bytes": memory_limit_bytes(),
            "cpu_limit": cpu_limit(),
        }
    )


def aggregate_trials(
    records: Mapping[str, LedgerRecord], spec: ComparisonSpec, unsupported: Mapping[str, str]
) -> tuple[list[Row], list[Run]]:
    """Return rows in the order of the options, and trials in running order. `unsupported`: row name to reason."""
    by_row: dict[RowKey, list[Run]] = {row: [] for row in spec.rows()}
    trials = list[Run]()
    for trial in spec.trials():
        record = records.get(trial.id)
        if record is not None and record.kind == "trial":
            by_row[trial.row].append(record)
            trials.append(record)
    common = {
        size: significance.common_steps([trial for trial in trials if trial.world_size == size])
        for size in spec.world_sizes
    }
    rows = []
    for key, repeats in by_row.items():
        if key.name in unsupported:
            row = Row(
                trial=key.name,
                preset=key.preset,
                world_size=key.world_size,
                status=NOT_SUPPORTED,
                message=unsupported[key.name],
                failure=Failure(kind=NOT_SUPPORTED),
            )
        elif repeats:
            row = _row(key, repeats, common[key.world_size])
        else:
            continue
        rows.append(row.updated(group=design_group(spec, key, repeats)))
    rows = [row.with_parity(*check_parity(row, by_row, spec)) for row in rows]
    speeds = {
        row.key: significance.speeds_of(by_row[row.key], common[row.world_size], padding=False)
        for row in rows
        if row.has_speed
    }
    rows = [
        row.updated(**significance.compare_with_baseline(row, rows, speeds, spec.baseline(row.world_size)))
        for row in rows
    ]
    rows = [row.updated(rank=significance.rank_of(row, rows, speeds)) for row in rows]
    parity = {row.key: (row.parity, row.parity_message) for row in rows}
    return rows, [trial.with_parity(*parity[trial.key]) if parity[trial.key][0] else trial for trial in trials]


def _row(key: RowKey, trials: Sequence[Run], steps: int) -> Row:
    failed = next((trial for trial in trials if not trial.completed), None)
    order = sorted(zip(significance.speeds_of(trials, steps), range(len(trials)), strict=True))
    middle = trials[order[(len(order) - 1) // 2][1] if steps else 0]  # of the median speed, the slower of two
    values = {key: getattr(failed or middle, key) for key in FROM_TRIAL}
    values |= {"trial": key.name, "repeats": sum(trial.completed for trial in trials)}
    for column in FROM_TRIAL:
        rule = column_of(Row, column).repeats
        if rule in OF_ALL or (failed is None and rule in OF_COMPLETED):
            values[column] = _combined(rule, [getattr(trial, column) for trial in trials])
    if failed is None:
        values |= _speeds(trials, steps)
        values["message"] = next((trial.message for trial in trials if trial.message), None)
        by_peak = "peak_host_bytes" if values["peak_allocated_bytes"] is None else "peak_allocated_bytes"
        values["peak_rank"] = max(trials, key=lambda trial: getattr(trial, by_peak) or 0).peak_rank
    elif values["repeats"]:
        values["message"] = f"{values['repeats']} of {len(trials)} repeats completed; {failed.message}"
    speed, padding = values["tokens_per_second"], values["padding_fraction"]
    values["non_padding_tokens_per_second"] = None if speed is None or padding is None else speed * (1 - padding)
    return Row.model_validate(values)


def _combined(rule: Repeats | None, values: list[Any]) -> Any:
    if rule in (Repeats.GEOMETRIC_MEAN, Repeats.MEDIAN):  # unknown if it is, or is zero, in one repeat
        mean = statistics.geometric_mean if rule is Repeats.GEOMETRIC_MEAN else statistics.median
        return mean(values) if all(values) else None
    known = [value for value in values if value is not None]
    if not known:
        return None
    if rule is Repeats.MEDIAN_OF_ALL:
        return statistics.median(known)
    if rule is Repeats.UNION_OF_ALL:
        return sorted(set().union(*known))
    return max_memory_by_phase(known) if isinstance(known[0], MemoryByPhase) else max(known)


def _speeds(trials: Sequence[Run], steps: int) -> dict[str, Any]:
    """Speeds over the first timed steps; unknown where none is timed, or where no tokens were counted."""
    speeds = significance.speeds_of(trials, steps) if steps else []
    uncounted = not any(count for trial in trials for count in trial.step_tokens)  # a script's batches do not show them
    unknown = {key: None for key in FROM_TRIAL if column_of(Row, key).is_speed}
    timed = [[trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps]] for trial in trials]
    medians = [statistics.median(seconds) for seconds in timed if seconds]
    if not speeds or min(medians) <= 0 or (min(speeds) <= 0 and not uncounted):
        return unknown
    times = {
        "timed_steps": steps,
        "step_seconds_median": statistics.geometric_mean(medians),
        "step_seconds_p90": statistics.geometric_mean([percentile(seconds, 0.9) or 0.0 for seconds in timed]),
        "step_seconds_interval": significance.mean_interval(medians),
    }
    if uncounted:
        return unknown | times
    return times | {
        "tokens_per_second": statistics.geometric_mean(speeds),
        "tokens_per_second_per_gpu": statistics.geometric_mean(speeds) / trials[0].world_size,
        "tokens_per_second_interval": significance.mean_interval(speeds),
    }


def _with_derived_columns(
    row: Row, trials: Sequence[Run], records: Mapping[str, LedgerRecord], spec: ComparisonSpec, shape: ModelShape | None
) -> Row:
    def with_plan(failure: Failure | None, planned: Mapping[str, int]) -> Failure | None:
        return failure and failure.updated(predicted_bytes=planned.get("planned_peak_bytes"))

    probes = []
    for size, probe in probes_of(records, row.key).items():
        at_size = spec.with_batches({row.key.name: {BATCH_ARGUMENT: size}})
        failure = with_plan(probe.failure, planned_columns(at_size, row.key, shape=shape))
        probes.append(
            Probe(per_device_train_batch_size=size, status=probe.status, message=probe.message, failure=failure)
        )
    planned = planned_columns(spec, row.key, shape=shape)
    return row.updated(
        **planned,
        failure=with_plan(row.failure, planned),
        per_device_train_batch_size=_numbers(spec, row.key, trials).per_device_train_batch_size,
        probes=None if spec.find_max_batch is None else tuple(probes),
        **side_run_columns(records, row.key),
    )


def _numbers(spec: ComparisonSpec, row: RowKey, trials: Sequence[Run]) -> Job | TrainedProblem:
    if not spec.script_or_module:
        return spec.job(row)
    return next((trial.problem for trial in trials if trial.key == row and trial.problem), TrainedProblem())


def side_run_columns(records: Mapping[str, LedgerRecord], row: RowKey) -> dict[str, Any]:
    """Return the columns of the row's last completed side run of each kind; None for those that none measured."""
    columns: dict[str, Any] = {}
    for kind, names in SIDE_RUN_COLUMNS.items():
        runs = [run for run in side_runs_of(records, row, kind) if run.completed]
        columns |= {name: getattr(runs[-1], name) if runs else None for name in names}
    return columns


def with_efficiency(row: Row, trials: Sequence[Run], *, shape: ModelShape | None, environment: Environment) -> Row:
    """Return the row with its FLOPs per token and their shares of the GPU's dense peak; what is unknown is None.

    The sequence length (tokens of the timed steps, padding included, over their sequences), the activation
    checkpointing and the compute dtype are those of its first trial with timed steps. The row's numbers of parameters
    include adapters. A peak is unknown on a CPU, and for unlisted or mixed GPUs.
    """
    trial = next((trial for trial in trials if trial.timed_step_numbers and trial.step_tokens), None)
    problem = None if trial is None else trial.problem
    if shape is None or trial is None or problem is None or row.num_params is None:
        return row
    sequences = problem.global_batch_size
    if not isinstance(sequences, int) or not sequences:
        return row
    tokens = [trial.step_tokens[number - 1] or 0 for number in trial.timed_step_numbers]
    seq_length = round(statistics.fmean(tokens) / sequences)
    trainable = None if row.num_trainable_params == row.num_params else row.num_trainable_params
    adapters = max(0, row.num_params - shape.num_params) if trainable is not None else 0
    counted = functools.partial(
        flops_of,
        shape,
        seq_length=seq_length,
        num_trainable_params=trainable,
        num_adapter_params=adapters,
        recompute=bool(problem.activation_checkpointing),
        recompute_attention=not problem.activation_checkpointing_selective,
    )
    causal = counted(causal=True)
    flops = FlopsPerToken(
        num_params=shape.num_active_params + adapters,
        seq_length=seq_length,
        causal=causal.model_flops,
        full_attention=counted(causal=False).model_flops,
        without_embeddings=counted(causal=True, count_embeddings=False).model_flops,
        hardware=causal.hardware_flops,
    )
    gpu, dtype = common_gpu(gpu.name for gpu in environment.gpus), GPU_TABLE_DTYPES.get(trial.compute_dtype or "")
    peak, speed = gpu.peak_flops(dtype) if gpu and dtype else None, row.tokens_per_second_per_gpu
    numerators = {"mfu": flops.causal, "mfu_full_attention": flops.full_attention, "hfu": flops.hardware}
    shares = {
        name: mfu(tokens_per_second_per_gpu=speed, flops_per_token=of_token, peak_flops=peak)
        for name, of_token in numerators.items()
        if speed is not None
    }
    return row.updated(flops_per_token=flops, **shares)
