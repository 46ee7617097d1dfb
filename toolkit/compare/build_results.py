"""Build the results of a comparison from its ledger, its specification and this node.

A row is made of its trials (`aggregate.py`); here the planner, the batch search, the side runs, the GPU's peak and the
price add their columns.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.compare.aggregate import aggregate_trials
from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, SideRunKind, probes_of, side_runs_of, trials_of
from toolkit.compare.predictions import planned_memory, read_shape
from toolkit.compare.results import ComparedJob, ComparisonMethod, Environment, Results
from toolkit.compare.rows import FlopsPerToken, Probe, Row, RowKey, RunRecord
from toolkit.compare.significance import METHOD, confidence_of
from toolkit.compare.specification import BATCH_ARGUMENT, ComparisonSpec
from toolkit.hardware.disks import disk_facts
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.gpus import gpu_topology
from toolkit.hardware.node import cpu_limit, describe_node, git_commit, library_versions, memory_limit_bytes
from toolkit.job.job import Job
from toolkit.models.flops import flops_of, mfu
from toolkit.models.shape import ModelShape
from toolkit.units import NOT_AVAILABLE, SECONDS_PER_HOUR

# The columns that each kind of side run measures.
SIDE_RUN_COLUMNS: dict[SideRunKind, tuple[str, ...]] = {
    "profile": ("communication_fraction", "exposed_communication_fraction", "timeline"),
    "save": ("save_seconds", "save_bytes"),
}
GPU_TABLE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def build_results(
    spec: ComparisonSpec, folder: Path, unsupported: Mapping[str, str], *, price_per_gpu_hour: float | None = None
) -> Results:
    """Return the results of the comparison in `folder`. `unsupported`: name of a row that cannot run, to reason."""
    records = Ledger(folder / LEDGER_FILE).read()
    aggregated, trials = aggregate_trials(records, spec, unsupported)
    environment, shape = _environment(spec, folder), read_shape(spec.model)
    rows = [_with_derived_columns(row, records, spec, shape, environment) for row in aggregated]
    job = Job.from_argv(spec.training_arguments)
    compute_dtypes = sorted({row.compute_dtype for row in rows if row.compute_dtype})
    results = Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        reference=spec.reference,
        environment=environment,
        job=ComparedJob(
            model=spec.model,
            dataset=", ".join(job.dataset),
            training_arguments=spec.training_arguments,
            untimed_steps=spec.untimed_steps,
            seed=job.seed,
            per_device_train_batch_size=job.per_device_train_batch_size,
            gradient_accumulation_steps=job.gradient_accumulation_steps,
            compute_dtype=", ".join(compute_dtypes) or NOT_AVAILABLE,
        ),
        rows=tuple(rows),
        trials=tuple(trials),
        method=ComparisonMethod(
            repeats=spec.repeats,
            order_seed=spec.order_seed,
            interval=METHOD if spec.repeats > 1 else "none: single runs",
            ratio_confidence=confidence_of(rows),
            target_interval=spec.target_interval,
            scaling=spec.scaling,
        ),
    )
    return results if price_per_gpu_hour is None else at_price(results, price_per_gpu_hour)


def at_price(results: Results, price_per_gpu_hour: float) -> Results:
    """Return the same results with each row's cost at another price."""
    rows = [
        row.updated(cost_per_million_tokens=row_cost(row, on_cpu=results.on_cpu, price_per_gpu_hour=price_per_gpu_hour))
        for row in results.rows
    ]
    return results.updated(rows=rows, price_per_gpu_hour=price_per_gpu_hour)


def row_cost(row: Row, *, on_cpu: bool, price_per_gpu_hour: float) -> float | None:
    """Return the cost of a million tokens without padding; None without a speed, and on a CPU: no GPU is rented."""
    speed = row.non_padding_tokens_per_second
    return None if on_cpu or not speed else price_per_gpu_hour * row.world_size / SECONDS_PER_HOUR / speed * 10**6


def _with_derived_columns(
    row: Row,
    records: Mapping[str, LedgerRecord],
    spec: ComparisonSpec,
    shape: ModelShape | None,
    environment: Environment,
) -> Row:
    peak_bytes, allocated_bytes = planned_memory(spec, row.key, shape=shape)
    row = row.updated(
        planned_peak_bytes=peak_bytes,
        planned_allocated_bytes=allocated_bytes,
        failure=row.failure and row.failure.updated(predicted_bytes=peak_bytes),
        per_device_train_batch_size=spec.job(row.key).per_device_train_batch_size,
        probes=_probes(spec, row.key, records, shape),
        **side_run_columns(records, row.key),
    )
    return with_efficiency(row, trials_of(records, row.key), shape=shape, environment=environment)


def _probes(
    spec: ComparisonSpec, row: RowKey, records: Mapping[str, LedgerRecord], shape: ModelShape | None
) -> list[Probe] | None:
    """The sizes that a batch search tried, each failure with its planned peak; None without a search."""
    if spec.find_max_batch is None:
        return None
    tried = []
    for size, probe in probes_of(records, row).items():
        peak_bytes, _ = planned_memory(spec.with_batches({row.name: {BATCH_ARGUMENT: size}}), row, shape=shape)
        failure = probe.failure and probe.failure.updated(predicted_bytes=peak_bytes)
        tried.append(
            Probe(per_device_train_batch_size=size, status=probe.status, message=probe.message, failure=failure)
        )
    return tried


def side_run_columns(records: Mapping[str, LedgerRecord], row: RowKey) -> dict[str, Any]:
    """Return the columns of the row's last completed side run of each kind; None for those that none measured."""
    columns: dict[str, Any] = {}
    for kind, names in SIDE_RUN_COLUMNS.items():
        runs = [run for run in side_runs_of(records, row, kind) if run.completed]
        columns |= {name: getattr(runs[-1], name) if runs else None for name in names}
    return columns


def _environment(spec: ComparisonSpec, folder: Path) -> Environment:
    machine = describe_node()
    return Environment.model_validate(
        {
            "device": "cpu" if spec.cpu else "cuda",
            "gpus": [] if spec.cpu else machine["gpus"],
            **{key: machine[key] for key in ("cpu", "cpu_count", "host_memory_bytes", "python", "system")},
            "versions": {name: version for name, version in library_versions().items() if version is not None},
            "git_commit": git_commit(Path(__file__).parent),
            "disk": disk_facts(folder),
            "links": None if spec.cpu else gpu_topology(),
            "memory_limit_bytes": memory_limit_bytes(),
            "cpu_limit": cpu_limit(),
        }
    )


# FLOPs and their share of the GPU's peak


def with_efficiency(
    row: Row, trials: Sequence[RunRecord], *, shape: ModelShape | None, environment: Environment
) -> Row:
    """Return the row with its FLOPs per token and their shares of the GPU's peak; what is unknown is None.

    The sequence length (tokens of the timed steps, padding included, over their sequences) and the activation
    checkpointing are those of its first trial with timed steps.
    """
    trial = next((trial for trial in trials if trial.timed_step_numbers and trial.step_tokens), None)
    sequences = trial.problem.global_batch_size if trial and trial.problem else None
    if shape is None or trial is None or row.num_params is None or not isinstance(sequences, int) or not sequences:
        return row
    tokens = [trial.step_tokens[number - 1] or 0 for number in trial.timed_step_numbers]
    flops = flops_per_token(
        shape,
        num_params=row.num_params,
        num_trainable_params=row.num_trainable_params,
        seq_length=round(statistics.fmean(tokens) / sequences),
        activation_checkpointing=bool(trial.problem and trial.problem.activation_checkpointing),
    )
    peak, speed = peak_flops(environment, trial.compute_dtype), row.tokens_per_second_per_gpu
    if speed is None:
        return row.updated(flops_per_token=flops)
    counted = {"mfu": flops.causal, "mfu_full_attention": flops.full_attention, "hfu": flops.hardware}
    shares = {
        name: mfu(tokens_per_second_per_gpu=speed, flops_per_token=of_token, peak_flops=peak)
        for name, of_token in counted.items()
    }
    return row.updated(flops_per_token=flops, **shares)


def flops_per_token(
    shape: ModelShape,
    *,
    num_params: int,
    num_trainable_params: int | None,
    seq_length: int,
    activation_checkpointing: bool,
) -> FlopsPerToken:
    """Return the operations of one token in each way of counting. The parameter counts include adapters."""
    trainable = None if num_trainable_params == num_params else num_trainable_params
    adapters = max(0, num_params - shape.num_params) if trainable is not None else 0
    counted = functools.partial(
        flops_of,
        shape,
        seq_length=seq_length,
        num_trainable_params=trainable,
        num_adapter_params=adapters,
        recompute=activation_checkpointing,
    )
    causal = counted(causal=True)
    return FlopsPerToken(
        num_params=shape.num_active_params + adapters,
        seq_length=seq_length,
        causal=causal.model_flops,
        full_attention=counted(causal=False).model_flops,
        without_embeddings=counted(causal=True, count_embeddings=False).model_flops,
        hardware=causal.hardware_flops,
    )


def peak_flops(environment: Environment, compute_dtype: str | None) -> float | None:
    """Return the dense peak of one GPU in the compute dtype; None on a CPU, and for unlisted or mixed GPUs."""
    gpu = None if environment.device == "cpu" else common_gpu(gpu.name for gpu in environment.gpus)
    dtype = GPU_TABLE_DTYPES.get(compute_dtype or "")
    return None if gpu is None or dtype is None else gpu.peak_flops(dtype)
