"""Read results.json, the one dict that a comparison hands to its report.

    >>> load_results("out/comparison")["reference"]          # doctest: +SKIP
    'ddp'

The keys are documented in docs/results.md and checked by results.schema.json beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from toolkit.errors import ToolkitError

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
NOT_SUPPORTED = "not_supported"
"""Status of a row that cannot run here; no run has it."""
OLD_PARITY = {"differs": "parity failed"}

RowStatus = Literal[
    "completed",
    "out_of_memory",
    "host_out_of_memory",
    "timed_out",
    "diverged",
    "attestation_failed",
    "failed",
    "interrupted",
    "not_supported",
]
Parity = Literal["reference", "agrees", "parity failed"]
Difference = Literal["reference", "faster", "slower", "no difference seen"]
Scaling = Literal["strong", "weak"]
Interval = list[float]
"""`[low, high]`."""


class Gpu(TypedDict):
    """One GPU of the machine, as the driver names it."""

    name: str
    memory_bytes: int | None
    driver: NotRequired[str | None]
    power_limit_watts: NotRequired[float | None]
    max_sm_clock_mhz: NotRequired[int | None]
    max_memory_clock_mhz: NotRequired[int | None]


class Disk(TypedDict):
    """The disk that the comparison wrote to."""

    filesystem: str | None
    total_bytes: int | None
    free_bytes: int | None


class Environment(TypedDict):
    """The machine and the versions that every row ran on."""

    device: str
    gpus: list[Gpu]
    cpu: str | None
    cpu_count: int | None
    host_memory_bytes: int | None
    versions: dict[str, str]
    python: str
    git_commit: str | None
    disk: Disk | None
    links: str | None
    memory_limit_bytes: int | None
    cpu_limit: float | None


class Job(TypedDict):
    """The one fine-tuning job that every row trains."""

    model: str
    dataset: str
    training_arguments: list[str]
    untimed_steps: int
    seed: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    compute_dtype: str


class Failure(TypedDict):
    """Why a row did not complete, as facts."""

    kind: str
    phase: str | None
    step: int | None
    rank: int | None
    predicted_bytes: int | None
    measured_bytes: int | None


class Ladder(TypedDict):
    """Bytes of the largest rank at four moments of its first step."""

    bytes_of: str
    load: int | None
    forward: int | None
    backward: int | None
    step: int | None


class FlopsPerToken(TypedDict):
    """Operations of one token, counted in each way that is in use."""

    num_params: int
    seq_length: int
    causal: int
    full_attention: int
    without_embeddings: int
    hardware: int


class Timeline(TypedDict):
    """One profiled step on every rank."""

    step: int
    ranks: list[dict[str, Any]]


class Figures(TypedDict):
    """What a trial and a row both have. A figure that was not measured is None; bytes are of the largest rank."""

    trial: str
    preset: str
    world_size: int
    status: RowStatus
    message: str | None
    parity: Parity | None
    parity_message: str | None
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    tokens_per_cpu_second: float | None
    supervised_tokens_per_second: float | None
    padding_fraction: float | None
    timed_steps: int
    step_seconds_median: float | None
    step_seconds_p90: float | None
    num_params: int | None
    num_trainable_params: int | None
    parameter_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_host_bytes: int | None
    peak_rank: int | None
    first_loss: float | None
    last_loss: float | None
    ratio_to_reference: float | None
    wall_seconds: float | None
    timed_seconds: float | None
    losses: list[float | None]
    step_seconds: list[float | None]
    grad_norms: list[float | None]
    run_folder: str
    command: str


class TrialRow(Figures):
    """One trial: one repeat of a row in fresh processes."""

    repeat: int
    position: int
    startup_seconds: float | None
    step_tokens: list[int]
    timed_step_numbers: list[int]
    non_padding_tokens_per_second: float | None
    peak_driver_bytes: int | None
    allocator_retries: int | None
    memory_ladder: Ladder | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    attestation_sha256: str | None


class Row(Figures):
    """One preset with one number of processes, over all its repeats."""

    group: str | None
    repeats: int
    step_seconds_interval: Interval | None
    tokens_per_second_interval: Interval | None
    ratio_interval: Interval | None
    difference: Difference | None
    rank: int | None
    rank_skew: float | None
    failure: Failure | None
    speed_up: float | None
    scaling_efficiency: float | None
    non_padding_tokens_per_second: float | None
    peak_driver_bytes: int | None
    allocator_retries: int | None
    memory_ladder: Ladder | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    attestation_sha256: str | None
    startup_seconds: float | None
    planned_peak_bytes: int | None
    planned_allocated_bytes: int | None
    flops_per_token: FlopsPerToken | None
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    cost_per_million_tokens: float | None
    communication_fraction: float | None
    exposed_communication_fraction: float | None
    save_seconds: float | None
    save_bytes: int | None
    timeline: Timeline | None


SPEEDS = (
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tokens_per_cpu_second",
    "supervised_tokens_per_second",
    "step_seconds_median",
    "step_seconds_p90",
    "step_seconds_interval",
    "tokens_per_second_interval",
    "ratio_to_reference",
    "ratio_interval",
    "difference",
    "rank",
    "speed_up",
    "scaling_efficiency",
    "non_padding_tokens_per_second",
    "mfu",
    "mfu_full_attention",
    "hfu",
    "cost_per_million_tokens",
)
"""What is withheld from a row that trained another problem: its `step_seconds` too, which are then empty."""


def withheld(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row or a trial without its speeds."""
    return {key: None if key in SPEEDS else value for key, value in row.items()} | {"step_seconds": []}


class Method(TypedDict):
    """How the rows were measured and compared."""

    repeats: int
    order_seed: int
    interval: str
    ratio_confidence: float
    target_interval: float | None
    scaling: Scaling | None


class Results(TypedDict):
    """A comparison: one job under several presets, on one machine."""

    schema_version: int
    created: str
    reference: str
    environment: Environment
    job: Job
    rows: list[Row]
    trials: list[TrialRow]
    method: Method
    price_per_gpu_hour: float | None


_READINGS = (
    "non_padding_tokens_per_second",
    "peak_driver_bytes",
    "allocator_retries",
    "memory_ladder",
    "energy_joules",
    "throttle_reasons",
    "attestation_sha256",
)
# Keys that came later under the same schema version; where they are missing, they are unknown.
LATER = {
    "results": ("price_per_gpu_hour",),
    "environment": ("disk", "links", "memory_limit_bytes", "cpu_limit"),
    "trials": _READINGS,
    "rows": (
        *_READINGS,
        "startup_seconds",
        "planned_peak_bytes",
        "planned_allocated_bytes",
        "flops_per_token",
        "mfu",
        "mfu_full_attention",
        "hfu",
        "cost_per_million_tokens",
        "communication_fraction",
        "exposed_communication_fraction",
        "save_seconds",
        "save_bytes",
        "timeline",
    ),
}


def load_results(path: str | Path) -> Results:
    """The results in a file, or in a comparison's folder; ToolkitError when they cannot be used."""
    file = Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)
    found = _read_json(file)
    if not isinstance(found, dict) or "schema_version" not in found:
        raise ToolkitError(f"{file} is not a comparison's {RESULTS_FILE}: it has no schema_version")
    _check_version(file, found["schema_version"])
    if "trials" not in found:
        found = _with_single_trials(found)
    found = _with_later_keys(found)
    _check_keys(file, found)
    return cast(Results, found)


def _read_json(file: Path) -> object:
    try:
        return cast(object, json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ToolkitError(
            f"cannot read {file}: {error.strerror}",
            hint=f"name a folder of `toolkit compare` that holds {RESULTS_FILE}",
        ) from error
    except json.JSONDecodeError as error:
        raise ToolkitError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ToolkitError(f"{file} is not text in UTF-8 (byte {error.start})") from error


def _with_single_trials(found: dict[str, object]) -> dict[str, object]:
    """Results from before trials were repeated: each row is its only trial, and claims no interval."""
    rows, job = found.get("rows"), found.get("job")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return found
    none = dict.fromkeys(key for key in Row.__annotations__ if key not in Figures.__annotations__)
    untimed = job.get("untimed_steps", 0) if isinstance(job, dict) else 0
    renamed = [row | {"parity": OLD_PARITY.get(row.get("parity"), row.get("parity"))} for row in rows]
    renamed = [withheld(row) if row["parity"] == "parity failed" else row for row in renamed]
    method = dict.fromkeys(Method.__annotations__) | {"repeats": 1, "order_seed": 0, "ratio_confidence": 0.99}
    return found | {
        "rows": [none | row | {"repeats": int(row.get("status") == "completed")} for row in renamed],
        "trials": [_single_trial(row, position, untimed) for position, row in enumerate(renamed)],
        "method": method | {"interval": "none: single runs"},
    }


def _with_later_keys(found: dict[str, Any]) -> dict[str, Any]:
    """Results from before a key was there: it is unknown."""
    filled: dict[str, Any] = dict.fromkeys(LATER["results"]) | found
    for place in ("rows", "trials"):
        if isinstance(rows := filled.get(place), list):
            none = dict.fromkeys(LATER[place])
            filled[place] = [none | row if isinstance(row, dict) else row for row in rows]
    if isinstance(environment := filled.get("environment"), dict):
        filled["environment"] = dict.fromkeys(LATER["environment"]) | environment
    return filled


def _single_trial(row: dict[str, object], position: int, untimed_steps: int) -> dict[str, object]:
    steps = row.get("step_seconds")
    timed = list(range(untimed_steps + 1, len(steps) + 1)) if isinstance(steps, list) else []
    added: dict[str, object] = {"repeat": 0, "position": position, "startup_seconds": None, "step_tokens": []}
    return row | added | {"timed_step_numbers": timed}


def _check_version(file: Path, version: object) -> None:
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ToolkitError(
            f"{file} has schema_version {version!r}; this toolkit reads {SCHEMA_VERSION}",
            hint="read it with the version of finetune-toolkit that wrote it",
        )


def _check_keys(file: Path, found: Mapping[str, object]) -> None:
    _require(file, "results", found, Results)
    _require(file, "environment", found["environment"], Environment)
    _require(file, "job", found["job"], Job)
    _require(file, "method", found["method"], Method)
    for name, shape in (("rows", Row), ("trials", TrialRow)):
        rows = found[name]
        if not isinstance(rows, list):
            raise ToolkitError(f"{file}: {name} is not a list")
        for index, row in enumerate(rows):
            _require(file, f"{name}[{index}]", row, shape)


def _require(file: Path, place: str, found: object, shape: type) -> None:
    """Every key of the TypedDict `shape` must be there; keys that it does not know are welcome."""
    if not isinstance(found, dict):
        raise ToolkitError(f"{file}: {place} is not an object")
    missing = [key for key in shape.__annotations__ if key not in found]
    if missing:
        raise ToolkitError(f"{file}: {place} has no {', '.join(missing)}", hint="docs/results.md lists the keys")
