"""Read results.json, of this version of the toolkit or of an earlier one; what an earlier one lacked is unknown.

>>> load_results("out/comparison")["reference"]          # doctest: +SKIP
'ddp'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from toolkit.compare.results import (
    RESULTS_FILE,
    SCHEMA_VERSION,
    Environment,
    Figures,
    Job,
    Method,
    Results,
    Row,
    TrialRow,
    withheld,
)
from toolkit.errors import ToolkitError

OLD_PARITY = {"differs": "parity failed"}

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
        "per_device_train_batch_size",
        "probes",
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
