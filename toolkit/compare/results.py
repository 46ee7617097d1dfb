"""Read results.json, the one dict that a comparison hands to its report.

    >>> load_results("out/comparison")["reference"]          # doctest: +SKIP
    'ddp'

The keys are documented in docs/results.md and checked by results.schema.json beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict, cast

from toolkit.errors import ToolkitError

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"

RowStatus = Literal[
    "completed",
    "out_of_memory",
    "host_out_of_memory",
    "timed_out",
    "diverged",
    "attestation_failed",
    "failed",
    "interrupted",
]
Parity = Literal["reference", "agrees", "differs"]


class Gpu(TypedDict):
    """One GPU of the machine, as the driver names it."""

    name: str
    memory_bytes: int | None


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


class Row(TypedDict):
    """One trial. A figure that was not measured is None; bytes are of one rank, the largest."""

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


class Results(TypedDict):
    """A comparison: one job under several presets, on one machine."""

    schema_version: int
    created: str
    reference: str
    environment: Environment
    job: Job
    rows: list[Row]


def load_results(path: str | Path) -> Results:
    """The results in a file, or in a comparison's folder; ToolkitError when they cannot be used."""
    file = Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)
    found = _read_json(file)
    if not isinstance(found, dict) or "schema_version" not in found:
        raise ToolkitError(f"{file} is not a comparison's {RESULTS_FILE}: it has no schema_version")
    _check_version(file, found["schema_version"])
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
    if not isinstance(found["rows"], list):
        raise ToolkitError(f"{file}: rows is not a list")
    for index, row in enumerate(found["rows"]):
        _require(file, f"rows[{index}]", row, Row)


def _require(file: Path, place: str, found: object, shape: type) -> None:
    """Every key of the TypedDict `shape` must be there; keys that it does not know are welcome."""
    if not isinstance(found, dict):
        raise ToolkitError(f"{file}: {place} is not an object")
    missing = [key for key in shape.__annotations__ if key not in found]
    if missing:
        raise ToolkitError(f"{file}: {place} has no {', '.join(missing)}", hint="docs/results.md lists the keys")
