"""What a row says beside speed and parity: memory at each moment, energy, communication, saving.

    >>> highest_of([{"allocator_retries": 2}, {"allocator_retries": None}], "allocator_retries")
    2

A trial's are read from its run folder; a row's are made of its trials' and of the profiled run's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.runs.folder import RunFolder, read_json
from toolkit.runs.ladder import highest
from toolkit.runs.steps import Measured

Facts = dict[str, Any]
Trials = Sequence[Mapping[str, Any]]


def trial_readings(folder: RunFolder, measured: Measured) -> Facts:
    """The readings of one trial."""
    attested = read_json(folder.attestation_json) or {}
    failure = read_json(folder.failure_json) or {}
    return {
        "non_padding_tokens_per_second": measured.non_padding_tokens_per_second,
        "peak_driver_bytes": measured.peak_driver_bytes,
        "allocator_retries": measured.allocator_retries,
        "memory_ladder": measured.memory_ladder or failure.get("memory_ladder"),
        "energy_joules": measured.energy_joules,
        "throttle_reasons": measured.throttle_reasons,
        "attestation_sha256": attested.get("sha256"),
    }


def row_readings(row: Mapping[str, Any], trials: Trials) -> Facts:
    """A row's readings over its repeats."""
    shown = next((trial for trial in trials if trial["run_folder"] == row["run_folder"]), None)
    speed, padding = row["tokens_per_second"], row["padding_fraction"]
    reasons = [trial["throttle_reasons"] for trial in trials if trial.get("throttle_reasons") is not None]
    return {
        "non_padding_tokens_per_second": None if speed is None or padding is None else speed * (1 - padding),
        "peak_driver_bytes": highest_of(trials, "peak_driver_bytes"),
        "allocator_retries": highest_of(trials, "allocator_retries"),
        "memory_ladder": highest(trial.get("memory_ladder") for trial in trials),
        "energy_joules": median_of(trials, "energy_joules"),
        "throttle_reasons": sorted({reason for said in reasons for reason in said}) if reasons else None,
        "attestation_sha256": None if shown is None else shown.get("attestation_sha256"),
        "startup_seconds": median_of(trials, "startup_seconds"),
    }


def highest_of(trials: Trials, key: str) -> int | None:
    """The largest known value."""
    return max((trial[key] for trial in trials if trial.get(key) is not None), default=None)


def median_of(trials: Trials, key: str) -> float | None:
    """The median of the known values."""
    known = [trial[key] for trial in trials if trial.get(key) is not None]
    return statistics.median(known) if known else None


def extra_readings(folder: RunFolder | None) -> Facts:
    """What the one run that no speed counts shows: a profile, a save, or both. Everything is None without one."""
    run = {} if folder is None else folder.read_run() or {}
    steps = (run.get("profile") or {}).get("steps") or []
    saved: Facts = next((save for save in run.get("saves") or [] if save["kind"] == "checkpoint"), {})
    return {
        "communication_fraction": share_of_steps(steps, "communication_seconds"),
        "exposed_communication_fraction": share_of_steps(steps, "exposed_communication_seconds"),
        "timeline": timeline_of(run.get("profile") or {}),
        "save_seconds": saved.get("seconds"),
        "save_bytes": saved.get("bytes"),
    }


def share_of_steps(steps: Sequence[Mapping[str, float]], part: str) -> float | None:
    """Seconds of a part over the seconds of the same steps: every rank's steps are equally long, or nearly."""
    whole = sum(step["step_seconds"] for step in steps)
    return sum(step[part] for step in steps) / whole if whole else None


def timeline_of(profile: Mapping[str, Any]) -> Facts | None:
    """The last profiled step, each rank's start counted from the earliest rank's."""
    ranks = profile.get("timeline") or []
    if not ranks:
        return None
    earliest = min(rank["start_unix"] for rank in ranks)
    drawn = [
        {
            "rank": rank["rank"],
            "start_seconds": round(rank["start_unix"] - earliest, 6),
            "seconds": rank["seconds"],
            "lanes": rank["lanes"],
        }
        for rank in ranks
    ]
    return {"step": profile["last_step"], "ranks": drawn}
