"""The job, the machine and the failures of a comparison, as words.

>>> dict(job_facts(results))["seed"]                     # doctest: +SKIP
'42'
"""

from __future__ import annotations

import shlex
from collections import Counter

from toolkit.compare.report import facts
from toolkit.compare.results import NOT_SUPPORTED, Gpu, Results, Row
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
    gpus = Counter(_gpu(gpu) for gpu in environment["gpus"])
    return [
        ("device", environment["device"]),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("CPU", f"{environment['cpu'] or NOT_AVAILABLE}, {environment['cpu_count'] or NOT_AVAILABLE} cores"),
        ("host memory", gib(environment["host_memory_bytes"])),
        ("container's limits", _limits(results)),
        ("disk", _disk(results)),
        ("Python", environment["python"]),
        *sorted(environment["versions"].items()),
        ("git commit", environment["git_commit"] or NOT_AVAILABLE),
        ("created", results["created"]),
    ]


def method_facts(results: Results) -> list[tuple[str, str]]:
    """How it was measured, as pairs of name and value."""
    method, target = results["method"], results["method"]["target_interval"]
    early = "all steps ran" if target is None else f"within {100 * target:g} % of the median (95 %), or all steps"
    return [
        ("repeats", f"{method['repeats']}, in an order drawn with seed {method['order_seed']}"),
        ("timed steps", early),
        ("intervals", method["interval"]),
        ("confidence of a ratio", f"{100 * method['ratio_confidence']:.4g} %"),
        ("scaling", method["scaling"] or NOT_AVAILABLE),
    ]


def replay_line(row: Row) -> str:
    """The toolkit's own command that runs a row again."""
    return f"toolkit compare --replay DIR --row {shlex.quote(facts.one_line(row['trial']))}"


def _gpu(gpu: Gpu) -> str:
    """`NVIDIA H100 (79.65 GiB; driver 570.86.15; power limit 700 W; clocks up to 1980 and 2619 MHz)`."""
    said = [gib(gpu["memory_bytes"])]
    if driver := gpu.get("driver"):
        said.append(f"driver {driver}")
    if (watts := gpu.get("power_limit_watts")) is not None:
        said.append(f"power limit {watts:g} W")
    clocks = [gpu.get("max_sm_clock_mhz"), gpu.get("max_memory_clock_mhz")]
    if None not in clocks:
        said.append(f"clocks up to {clocks[0]} (SM) and {clocks[1]} MHz (memory)")
    return f"{gpu['name']} ({'; '.join(said)})"


def _limits(results: Results) -> str:
    environment = results["environment"]
    memory, cores = environment["memory_limit_bytes"], environment["cpu_limit"]
    said = [] if memory is None else [f"memory {gib(memory)}"]
    said += [] if cores is None else [f"{cores:g} CPU cores"]
    return ", ".join(said) or "none seen"


def _disk(results: Results) -> str:
    disk = results["environment"]["disk"]
    if disk is None:
        return NOT_AVAILABLE
    return f"{disk['filesystem'] or NOT_AVAILABLE}, {gib(disk['free_bytes'])} free of {gib(disk['total_bytes'])}"


def failure_facts(results: Results, row: Row) -> str:
    """What a failed row did measure before it ended; nothing of one that cannot run here."""
    if row["status"] == NOT_SUPPORTED:
        return ""
    said = [f"world_size {row['world_size']}", f"steps with a loss: {len(row['losses'])}"]
    failure = row["failure"]
    if failure and failure["phase"]:
        said.append(f"in phase {failure['phase']}")
    if failure and failure["predicted_bytes"] is not None:
        said.append(f"predicted peak {gib(failure['predicted_bytes'])}")
    peak = failure["measured_bytes"] if failure else facts.peak_bytes(results, row)
    if peak is not None:
        said.append(f"last measured peak {gib(peak)}")
    if row["peak_rank"] is not None:
        said.append(f"on rank {row['peak_rank']}")
    if row["wall_seconds"] is not None:
        said.append(f"after {seconds(row['wall_seconds'])}")
    return ", ".join([*said, f"folder {facts.one_line(row['run_folder'])}"])


def probes_note(results: Results) -> str:
    """What the table of probes shows."""
    peaks = (
        "on a CPU the planner predicts nothing, and what was measured is resident memory (RSS) of the rank that failed"
    )
    each = "Each size ran for two steps that begin with the longest rows; none was tried twice"
    return f"{each}{f'; {peaks}' if facts.on_cpu(results) else ''}."


def _parameter_counts(results: Results) -> str:
    counts = {(row["num_params"], row["num_trainable_params"]) for row in results["rows"] if facts.finished(row)}
    return (
        ", ".join(f"{number(total, 0)} ({number(trainable, 0)})" for total, trainable in sorted(counts, key=str))
        or NOT_AVAILABLE
    )
