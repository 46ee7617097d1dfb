"""Rows over repeats: figures with intervals, parity, what may be claimed, and ranks.

    rows, trials = compared(ledger_rows, comparison, unsupported={})

A trial is judged alone and beside the reference; a row is what its trials are together. Every figure of speed of a
row counts the same steps, those that all trials with its number of processes have timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.compare import results
from toolkit.compare.claims import beside, common_steps, has_speed, rank_of, speeds_of
from toolkit.compare.intervals import centre, interval
from toolkit.compare.results import NOT_SUPPORTED, SPEEDS, Failure, withheld
from toolkit.compare.trials import Comparison, row_name
from toolkit.compare.verdicts import group_of, judged
from toolkit.runs import status
from toolkit.runs.steps import percentile

Row = dict[str, Any]

# How a key of a row comes from its repeats; any other key is that of the repeat whose speed is the middle one.
CENTRES = ("tokens_per_cpu_second", "supervised_tokens_per_second", "rank_skew")
MEDIANS = ("wall_seconds", "timed_seconds")
LARGEST = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
# Of each step, for parity alone: in the ledger, not in results.json.
ONLY_JUDGED = ("batch_sha256", "step_non_padding_tokens", "step_supervised_tokens")
OF_A_TRIAL = ("repeat", "position", "startup_seconds", "step_tokens", "timed_step_numbers", "problem", *ONLY_JUDGED)
NOTHING: Row = {
    "ratio_interval": None,
    "difference": None,
    "rank": None,
    "speed_up": None,
    "scaling_efficiency": None,
}


def compared(
    finished: Mapping[str, Row], comparison: Comparison, unsupported: Mapping[str, str]
) -> tuple[list[Row], list[Row]]:
    """Rows as asked for, and trials in the running order. `unsupported` is a row's name and why it cannot run."""
    trials = [finished[trial.id] for trial in comparison.trials() if trial.id in finished]
    by_row: dict[str, list[Row]] = {row_name(*row): [] for row in comparison.rows()}
    by_row |= _grouped(trials)
    common = {n: common_steps([t for t in trials if t["world_size"] == n]) for n in comparison.num_processes}
    rows = []
    for preset, n in comparison.rows():
        name = row_name(preset, n)
        group = group_of(comparison, preset, n, by_row[name])
        if name in unsupported:
            rows.append(_unsupported(preset, n, unsupported[name]) | {"group": group})
        elif by_row[name]:
            rows.append(_row(name, by_row[name], common[n]) | {"group": group})
    said = {row["trial"]: judged(row, by_row, comparison) for row in rows}
    rows = [row | said[row["trial"]] for row in rows]
    rows = [withheld(row) if row["parity"] == "parity failed" else row for row in rows]
    speeds = {
        row["trial"]: speeds_of(by_row[row["trial"]], common[row["world_size"]]) for row in rows if has_speed(row)
    }
    rows = [row | beside(row, rows, speeds, comparison) for row in rows]
    rows = [row | {"rank": rank_of(row, rows, speeds)} for row in rows]
    return rows, [_shown_trial(trial, said.get(trial["trial"].rpartition("-r")[0], {})) for trial in trials]


def _grouped(trials: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for trial in sorted(trials, key=lambda trial: trial["repeat"]):
        found.setdefault(row_name(trial["preset"], trial["world_size"]), []).append(trial)
    return found


def _row(name: str, trials: Sequence[Row], steps: int) -> Row:
    """One row from its repeats; completed if all that ran are."""
    completed = [trial for trial in trials if trial["status"] == status.COMPLETED]
    failed = next((trial for trial in trials if trial["status"] != status.COMPLETED), None)
    if failed is not None:
        row = _without_trial_keys(failed) | {"trial": name, "repeats": len(completed)} | NOTHING
        message = f"{len(completed)} of {len(trials)} repeats completed; {failed['message']}"
        none = {"step_seconds_interval": None, "tokens_per_second_interval": None}
        return row | none | ({"message": message} if completed else {})
    row = _without_trial_keys(_middle(trials, steps)) | {"trial": name, "repeats": len(trials)} | NOTHING
    row |= {key: _reduced(centre, trials, key) for key in CENTRES}
    row |= {key: _reduced(statistics.median, trials, key) for key in MEDIANS}
    row |= _largest(trials)
    return row | _row_speeds(trials, steps)


def _row_speeds(trials: Sequence[Row], steps: int) -> Row:
    """Of the first timed steps; unknown where none is timed, or where no tokens were counted."""
    speeds = speeds_of(trials, steps) if steps else []
    if not speeds or min(speeds) <= 0:
        return dict.fromkeys(SPEEDS)
    timed = [[t["step_seconds"][number - 1] for number in t["timed_step_numbers"][:steps]] for t in trials]
    medians = [statistics.median(seconds) for seconds in timed]
    return {
        "timed_steps": steps,
        "tokens_per_second": centre(speeds),
        "tokens_per_second_per_gpu": centre(speeds) / trials[0]["world_size"],
        "tokens_per_second_interval": interval(speeds),
        "step_seconds_median": centre(medians),
        "step_seconds_p90": centre([percentile(seconds, 0.9) or 0.0 for seconds in timed]),
        "step_seconds_interval": interval(medians),
    }


def _middle(trials: Sequence[Row], steps: int) -> Row:
    """The repeat whose speed is the middle one, the slower of two."""
    if not steps:
        return trials[0]
    order = sorted(zip(speeds_of(trials, steps), range(len(trials)), strict=True))
    return trials[order[(len(order) - 1) // 2][1]]


def _reduced(reduce: Any, trials: Sequence[Row], key: str) -> float | None:
    values = [trial[key] for trial in trials]
    return None if any(value is None for value in values) or 0 in values else reduce(values)


def _largest(trials: Sequence[Row]) -> Row:
    """Peaks over all repeats, and the rank of the highest."""
    found: Row = {key: max((t[key] for t in trials if t[key] is not None), default=None) for key in LARGEST}
    deciding = "peak_allocated_bytes" if found["peak_allocated_bytes"] is not None else "peak_host_bytes"
    holder = next((t["peak_rank"] for t in trials if t[deciding] == found[deciding]), None)
    return found | {"peak_rank": holder}


def _without_trial_keys(trial: Row) -> Row:
    return {key: value for key, value in trial.items() if key not in OF_A_TRIAL}


def _shown_trial(trial: Row, said: Row) -> Row:
    """A trial as results.json has it: with its row's parity, and without a speed that is withheld."""
    shown = {key: value for key, value in trial.items() if key not in ONLY_JUDGED}
    shown |= {key: said[key] for key in ("parity", "parity_message") if key in said}
    return withheld(shown) if shown["parity"] == "parity failed" else shown


def _unsupported(preset: str, num_processes: int, why: str) -> Row:
    """A row that cannot run here, with the reason."""
    facts = dict.fromkeys(Failure.__annotations__) | {"kind": NOT_SUPPORTED}
    return dict.fromkeys(results.Row.__annotations__) | {
        "trial": row_name(preset, num_processes),
        "preset": preset,
        "world_size": num_processes,
        "status": NOT_SUPPORTED,
        "message": why,
        "timed_steps": 0,
        "repeats": 0,
        "failure": facts,
        **{key: [] for key in ("losses", "step_seconds", "grad_norms")},
        **{key: "" for key in ("run_folder", "command")},
    }
