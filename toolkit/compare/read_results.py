"""Read `results.json` of this version of the toolkit or an earlier one; what an earlier one lacks is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.compare.results import RESULTS_FILE, SCHEMA_VERSION, Results
from toolkit.compare.rows import Row
from toolkit.compare.trial_figures import Figures
from toolkit.errors import ToolkitError

# Words of earlier versions for `parity`.
OLD_PARITY = {"differs": "parity failed"}


def load_results(path: str | Path) -> Results:
    """Return the results in a file, or in a comparison's folder. Raises ToolkitError where they cannot be used."""
    file = Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)
    document = _read_json(file)
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ToolkitError(f"{file} is not a comparison's {RESULTS_FILE}: it has no schema_version")
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ToolkitError(
            f"{file} has schema_version {version!r}; this toolkit reads {SCHEMA_VERSION}",
            hint="read it with the version of finetune-toolkit that wrote it",
        )
    if "trials" not in document:
        document = _with_single_trials(document)
    try:
        return Results.model_validate(document)
    except ValidationError as error:
        raise ToolkitError(f"{file}: {explain(error)}", hint="docs/reference/results.md lists the keys") from None


def explain(error: ValidationError) -> str:
    """Return the first place where a document does not match its type, with all keys that are missing there.

    >>> try:
    ...     Results.model_validate({"reference": "ddp"})
    ... except ValidationError as error:
    ...     explain(error)
    'results has no created, environment, job, rows, trials, method'
    """
    errors = error.errors(include_url=False)
    place = errors[0]["loc"][:-1]
    missing = [str(found["loc"][-1]) for found in errors if found["type"] == "missing" and found["loc"][:-1] == place]
    if missing:
        return f"{_path(place)} has no {', '.join(missing)}"
    return f"{_path(errors[0]['loc'])} is {errors[0]['input']!r}: {errors[0]['msg']}"


def _path(place: tuple[int | str, ...]) -> str:
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return words.removeprefix(".") or "results"


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolkitError(
            f"cannot read {file}: {error.strerror}",
            hint=f"name a folder of `toolkit compare` that holds {RESULTS_FILE}",
        ) from error
    except json.JSONDecodeError as error:
        raise ToolkitError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ToolkitError(f"{file} is not text in UTF-8 (byte {error.start})") from error


def _with_single_trials(document: dict[str, Any]) -> dict[str, Any]:
    """Complete results from before trials were repeated: each row is its only trial and has no interval."""
    rows, job = document.get("rows"), document.get("job")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return document
    unknown = dict.fromkeys(key for key in Row.model_fields if key not in Figures.model_fields)
    untimed_steps = job.get("untimed_steps", 0) if isinstance(job, dict) else 0
    rows = [row | {"parity": OLD_PARITY.get(row.get("parity"), row.get("parity"))} for row in rows]
    return document | {
        "rows": [unknown | row | {"repeats": int(row.get("status") == "completed")} for row in rows],
        "trials": [_single_trial(row, position, untimed_steps) for position, row in enumerate(rows)],
        "method": {"repeats": 1, "order_seed": 0, "ratio_confidence": 0.99, "interval": "none: single runs"},
    }


def _single_trial(row: dict[str, Any], position: int, untimed_steps: int) -> dict[str, Any]:
    steps = row.get("step_seconds")
    timed = list(range(untimed_steps + 1, len(steps) + 1)) if isinstance(steps, list) else []
    return row | {"repeat": 0, "position": position, "step_tokens": [], "timed_step_numbers": timed}
