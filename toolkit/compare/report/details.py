"""The job, the machine and the failures of a comparison, as words.

>>> dict(job_facts(results))["seed"]                     # doctest: +SKIP
'42'
"""

from __future__ import annotations

import shlex
from collections import Counter

from toolkit.compare.report import facts
from toolkit.compare.results import Results, Row
from toolkit.units import NOT_AVAILABLE, gib, number, seconds


def job_facts(results: Results) -> list[tuple[str, str]]:
    """The job as pairs of name and value."""
    job = results["job"]
    return [
        ("model", job["model"]),
        ("dataset", job["dataset"]),
        ("training arguments", shlex.join(job["training_arguments"])),
        ("per_device_train_batch_size", str(job["per_device_train_batch_size"])),
        ("gradient_accumulation_steps", str(job["gradient_accumulation_steps"])),
        ("compute_dtype", job["compute_dtype"]),
        ("seed", str(job["seed"])),
        ("untimed_steps", str(job["untimed_steps"])),
        ("parameters (trainable)", _parameter_counts(results)),
    ]


def environment_facts(results: Results) -> list[tuple[str, str]]:
    """The machine and its versions as pairs of name and value."""
    environment = results["environment"]
    gpus = Counter(f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in environment["gpus"])
    return [
        ("device", environment["device"]),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("CPU", f"{environment['cpu'] or NOT_AVAILABLE}, {environment['cpu_count'] or NOT_AVAILABLE} cores"),
        ("host memory", gib(environment["host_memory_bytes"])),
        ("Python", environment["python"]),
        *sorted(environment["versions"].items()),
        ("git commit", environment["git_commit"] or NOT_AVAILABLE),
        ("created", results["created"]),
    ]


def failure_facts(results: Results, row: Row) -> str:
    """What a failed row did measure before it ended."""
    said = [f"world_size {row['world_size']}", f"steps with a loss: {len(row['losses'])}"]
    peak = facts.peak_bytes(results, row)
    if peak is not None:
        said.append(f"last measured peak {gib(peak)}")
    if row["peak_rank"] is not None:
        said.append(f"on rank {row['peak_rank']}")
    if row["wall_seconds"] is not None:
        said.append(f"after {seconds(row['wall_seconds'])}")
    return ", ".join([*said, f"folder {facts.one_line(row['run_folder'])}"])


def _parameter_counts(results: Results) -> str:
    counts = {(row["num_params"], row["num_trainable_params"]) for row in results["rows"] if facts.finished(row)}
    return (
        ", ".join(f"{number(total, 0)} ({number(trainable, 0)})" for total, trainable in sorted(counts, key=str))
        or NOT_AVAILABLE
    )
