"""Read `results.json` of this version of the toolkit or an earlier one; what an earlier one lacks is unknown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.compare.result_values import PARITY_FAILED
from toolkit.compare.results import MAX_ROWS, MAX_TRIALS, RESULTS_FILE, SCHEMA_VERSION, Results
from toolkit.compare.rows import Row
from toolkit.compare.trial_figures import Figures, contradiction
from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json
from toolkit.files.reading import OverLimit, user_path
from toolkit.files.validation import explain
from toolkit.files.value_limits import shown
from toolkit.units import MIB

OLD_PARITY_FAILED = "differs"
"""The word of earlier versions for `parity failed`."""
# Rows and trials have six values per step, one per line.
MAX_RESULTS_BYTES = 256 * MIB


KEYS_HINT = "docs/reference/results.md lists the keys"


def load_results(path: str | Path) -> Results:
    """Return the results in a file, or in a comparison's folder. Raises ToolkitError where they cannot be used."""
    file = results_file(path)
    document = read_json(file, max_bytes=MAX_RESULTS_BYTES)
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ToolkitError(f"{file} is not a comparison's {RESULTS_FILE}: it has no schema_version")
    version = document["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ToolkitError(
            f"{file} has schema_version {shown(version)}; this toolkit reads {SCHEMA_VERSION}",
            hint="read it with the version of finetune-toolkit that wrote it",
        )
    _check_lengths(document, file)
    try:
        results = Results.model_validate(document if "trials" in document else _with_single_trials(document))
    except ValidationError as error:
        raise ToolkitError(f"{file}: {explain(error)}", hint=KEYS_HINT) from None
    _check_references(results, file)
    return results


def results_file(path: str | Path, *, write: bool = False) -> Path:
    """Return the file with a comparison's results, from its path or its folder's.

    Raises ToolkitError for none; and with `write`, where the report would replace another comparison's files.
    """
    given = user_path(path)
    file = given / RESULTS_FILE if given.is_dir() else given
    if not os.path.lexists(file):
        raise ToolkitError(
            f"no such file: {file}", hint=f"name a folder of `toolkit compare` that holds {RESULTS_FILE}"
        )
    if write and file.name != RESULTS_FILE:
        raise ToolkitError(
            f"{file} has another name than {RESULTS_FILE}: its report would replace that of its folder",
            hint=f"copy it into a folder of its own, as {RESULTS_FILE}",
        )
    return file


def _check_lengths(document: Mapping[str, Any], file: Path) -> None:
    """Refuse more rows than any comparison has, before time is spent on each."""
    for key, most in {"rows": MAX_ROWS, "trials": MAX_TRIALS}.items():
        items = document.get(key)
        if isinstance(items, list) and len(items) > most:
            raise OverLimit(f"{file} has {len(items):,} {key}, expected at most {most:,}")


def _check_references(results: Results, file: Path) -> None:
    """Names are unique, every trial belongs to a row, and the baseline is among the rows."""
    rows = {row.key for row in results.rows}
    names = {"rows": [row.trial for row in results.rows], "trials": [trial.trial for trial in results.trials]}
    for key, found in names.items():
        name, count = next(iter(Counter(found).most_common(1)), ("", 0))
        if count > 1:
            raise ToolkitError(f"{file}: {key} has {shown(name)} {count} times, expected each once", hint=KEYS_HINT)
    for index, trial in enumerate(results.trials):
        if trial.key not in rows:
            raise ToolkitError(
                f"{file}: trials[{index}] is of {shown(trial.key.name)}, which is not among the rows", hint=KEYS_HINT
            )
        if problem := contradiction(trial):
            raise ToolkitError(f"{file}: trials[{index}]: {problem}", hint=KEYS_HINT)
    if results.rows and results.reference not in {row.preset for row in results.rows}:
        raise ToolkitError(
            f"{file}: reference is {shown(results.reference)}, which is not among the rows", hint=KEYS_HINT
        )


def _with_single_trials(document: dict[str, Any]) -> dict[str, Any]:
    """Complete results from before trials were repeated: each row is its only trial and has no interval."""
    rows, job = document.get("rows"), document.get("job")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return document
    unknown = dict.fromkeys(key for key in Row.model_fields if key not in Figures.model_fields)
    found = job.get("untimed_steps") if isinstance(job, dict) else None
    untimed_steps = found if isinstance(found, int) and found >= 0 else 0  # another value is refused afterwards
    rows = [row | {"parity": PARITY_FAILED} if row.get("parity") == OLD_PARITY_FAILED else row for row in rows]
    return document | {
        "rows": [unknown | row | {"repeats": int(row.get("status") == "completed")} for row in rows],
        "trials": [_single_trial(row, position, untimed_steps) for position, row in enumerate(rows)],
        "method": {"repeats": 1, "order_seed": 0, "ratio_confidence": 0.99, "interval": "none: single runs"},
    }


def _single_trial(row: dict[str, Any], position: int, untimed_steps: int) -> dict[str, Any]:
    steps = row.get("step_seconds")
    timed = list(range(untimed_steps + 1, len(steps) + 1)) if isinstance(steps, list) else []
    return row | {"repeat": 0, "position": position, "step_tokens": [], "timed_step_numbers": timed}
