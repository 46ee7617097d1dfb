"""The job, the node, the method and the failures of a comparison, as names and values in words."""

from __future__ import annotations

import shlex
from collections import Counter

from toolkit.compare.results import InstalledGpu, Results
from toolkit.compare.rows import NOT_SUPPORTED, Failure, Row
from toolkit.report.tables import one_line
from toolkit.units import NOT_AVAILABLE, gib, number, seconds

NamesAndValues = list[tuple[str, str]]


def job_details(results: Results) -> NamesAndValues:
    """Return the job's names and values."""
    job = results.job
    counts = {(row.num_params, row.num_trainable_params) for row in results.rows if row.completed}
    parameters = [f"{number(total, 0)} ({number(trainable, 0)})" for total, trainable in sorted(counts, key=str)]
    return [
        ("model", job.model),
        ("dataset", job.dataset),
        ("training arguments", shlex.join(job.training_arguments)),
        ("per_device_train_batch_size", str(job.per_device_train_batch_size)),
        ("gradient_accumulation_steps", str(job.gradient_accumulation_steps)),
        ("compute_dtype", job.compute_dtype),
        ("seed", str(job.seed)),
        ("untimed_steps", str(job.untimed_steps)),
        ("parameters (trainable)", ", ".join(parameters) or NOT_AVAILABLE),
    ]


def environment_details(results: Results) -> NamesAndValues:
    """Return the names and values of the node and its versions."""
    environment, disk = results.environment, results.environment.disk
    limits = [] if environment.memory_limit_bytes is None else [f"memory {gib(environment.memory_limit_bytes)}"]
    limits += [] if environment.cpu_limit is None else [f"{environment.cpu_limit:g} CPU cores"]
    gpus = Counter(_gpu(gpu) for gpu in environment.gpus)
    return [
        ("device", environment.device),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("CPU", f"{environment.cpu or NOT_AVAILABLE}, {environment.cpu_count or NOT_AVAILABLE} cores"),
        ("host memory", gib(environment.host_memory_bytes)),
        ("container limits", ", ".join(limits) or "none found"),
        (
            "disk",
            f"{disk.filesystem or NOT_AVAILABLE}, {gib(disk.free_bytes)} free of {gib(disk.total_bytes)}"
            if disk
            else NOT_AVAILABLE,
        ),
        ("Python", environment.python),
        *sorted(environment.versions.items()),
        ("git commit", environment.git_commit or NOT_AVAILABLE),
        ("created", results.created),
    ]


def method_details(results: Results) -> NamesAndValues:
    """Return how the rows were measured, as names and values."""
    method, target = results.method, results.method.target_interval
    early = "all steps ran" if target is None else f"within {100 * target:g} % of the median (95 %), or all steps"
    return [
        ("repeats", f"{method.repeats}, in an order drawn with seed {method.order_seed}"),
        ("timed steps", early),
        ("intervals", method.interval),
        ("confidence of a ratio", f"{100 * method.ratio_confidence:.4g} %"),
        ("scaling", method.scaling or NOT_AVAILABLE),
    ]


def replay_command(row: Row) -> str:
    """Return the toolkit's command that runs a row again."""
    return f"toolkit compare --replay DIR --row {shlex.quote(one_line(row.trial))}"


def failure_details(results: Results, row: Row) -> str:
    """Return what a failed row measured before it ended; nothing for one that cannot run on this node."""
    if row.status == NOT_SUPPORTED:
        return ""
    failure = row.failure or Failure(kind=row.status, measured_bytes=results.peak_bytes(row))
    parts = {
        f"world_size {row.world_size}": True,
        f"steps with a loss: {len(row.losses)}": True,
        f"in phase {failure.phase}": failure.phase,
        f"predicted peak {gib(failure.predicted_bytes)}": failure.predicted_bytes is not None,
        f"last measured peak {gib(failure.measured_bytes)}": failure.measured_bytes is not None,
        f"on rank {row.peak_rank}": row.peak_rank is not None,
        f"after {seconds(row.wall_seconds)}": row.wall_seconds is not None,
        f"folder {one_line(row.run_folder)}": True,
    }
    return ", ".join(part for part, is_known in parts.items() if is_known)


def probes_note(results: Results) -> str:
    """Return what the table of probes shows."""
    peaks = "; on a CPU nothing is predicted, and the measured peak is resident memory (RSS) of the rank that failed"
    probes = "Each size ran for two steps that begin with the longest rows; none was tried twice"
    return f"{probes}{peaks if results.on_cpu else ''}."


def _gpu(gpu: InstalledGpu) -> str:
    """`NVIDIA H100 (79.65 GiB; driver 570.86.15; power limit 700 W; clocks up to 1980 and 2619 MHz)`."""
    parts = [gib(gpu.memory_bytes)] + ([f"driver {gpu.driver}"] if gpu.driver else [])
    if gpu.power_limit_watts is not None:
        parts.append(f"power limit {gpu.power_limit_watts:g} W")
    if gpu.max_sm_clock_mhz is not None and gpu.max_memory_clock_mhz is not None:
        parts.append(f"clocks up to {gpu.max_sm_clock_mhz} (SM) and {gpu.max_memory_clock_mhz} MHz (memory)")
    return f"{gpu.name} ({'; '.join(parts)})"
