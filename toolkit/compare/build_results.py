"""Build the results of a comparison from its ledger, its specification and this node.

A row is made of its trials (`aggregate.py`); here the planner, the batch search, the side runs, the GPU's peak and the
price add their columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.compare.aggregate import aggregate_trials
from toolkit.compare.efficiency import row_cost, with_efficiency
from toolkit.compare.ledger import (
    LEDGER_FILE,
    Ledger,
    LedgerRecord,
    SideRunKind,
    check_rows,
    probes_of,
    side_runs_of,
    trials_of,
)
from toolkit.compare.predictions import planned_memory, read_shape
from toolkit.compare.results import ComparedJob, ComparisonMethod, Environment, Results
from toolkit.compare.rows import Probe, Row, RowKey
from toolkit.compare.significance import METHOD, confidence_of
from toolkit.compare.specification import BATCH_ARGUMENT, ComparisonSpec
from toolkit.hardware.disks import disk_facts
from toolkit.hardware.gpus import gpu_topology
from toolkit.hardware.node import cpu_limit, describe_node, git_commit, library_versions, memory_limit_bytes
from toolkit.job.job import Job
from toolkit.models.shape import ModelShape

# The columns that each kind of side run measures.
SIDE_RUN_COLUMNS: dict[SideRunKind, tuple[str, ...]] = {
    "profile": ("communication_fraction", "exposed_communication_fraction", "timeline"),
    "save": ("save_seconds", "save_bytes"),
}


def build_results(
    spec: ComparisonSpec, folder: Path, unsupported: Mapping[str, str], *, price_per_gpu_hour: float | None = None
) -> Results:
    """Return the results of the comparison in `folder`, rows in the order of the options.

    `unsupported` maps the name of a row that cannot run on this node to the reason.
    """
    ledger = Ledger(folder / LEDGER_FILE)
    records = ledger.read()
    check_rows(records, set(spec.rows()), ledger.path)
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
            compute_dtype=", ".join(compute_dtypes) or "n/a",
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


def _with_derived_columns(
    row: Row,
    records: Mapping[str, LedgerRecord],
    spec: ComparisonSpec,
    shape: ModelShape | None,
    environment: Environment,
) -> Row:
    planned = planned_memory(spec, row.key, shape=shape)
    row = row.updated(
        planned_peak_bytes=planned.peak_bytes,
        planned_allocated_bytes=planned.allocated_bytes,
        failure=row.failure and row.failure.updated(predicted_bytes=planned.peak_bytes),
        per_device_train_batch_size=spec.job(row.key).per_device_train_batch_size,
        probes=probes_tried(spec, row.key, records, shape=shape),
        **side_run_columns(records, row.key),
    )
    return with_efficiency(row, trials_of(records, row.key), shape=shape, environment=environment)


def probes_tried(
    spec: ComparisonSpec, row: RowKey, records: Mapping[str, LedgerRecord], *, shape: ModelShape | None
) -> list[Probe] | None:
    """Return the sizes that a batch search tried, each failure with its planned peak; None without a search."""
    if spec.find_max_batch is None:
        return None
    tried = []
    for size, probe in probes_of(records, row).items():
        failure = probe.failure
        if failure is not None:
            at_size = spec.with_batches({row.name: {BATCH_ARGUMENT: size}})
            planned = planned_memory(at_size, row, shape=shape)
            failure = failure.updated(predicted_bytes=planned.peak_bytes)
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
