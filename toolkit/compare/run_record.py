"""Read what one run measured, and the facts of the problem that it trained, from its run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from toolkit.compare.ledger import RunRecord, SideRunKind, SideRunRecord
from toolkit.compare.result_values import Fact, Failure, Timeline, TrainedProblem
from toolkit.compare.specification import Trial
from toolkit.run import status
from toolkit.run.folder import RunFolder, read_json
from toolkit.run.measurements import Measurements, measure, read_steps

# What the training script understood, defaults included; every other fact of a problem is attested by each rank.
SPECIFIED = ("global_batch_size", "learning_rate", "seed", "max_steps")
ATTESTED = tuple(key for key in TrainedProblem.model_fields if key not in (*SPECIFIED, "ranks", "promised_masters"))
# What a record takes from the measurements as it is: everything that has the same name.
MEASURED = tuple(item.name for item in fields(Measurements) if item.name in RunRecord.model_fields)


def read_run_record(
    trial: Trial, folder: RunFolder, comparison_folder: Path, *, untimed_steps: int, position: int
) -> RunRecord:
    """Return everything that one finished run shows; nothing but its run folder is read."""
    run = folder.read_run() or {}
    failure = read_json(folder.failure_json) or {}
    attestation = read_json(folder.attestation_json) or {}
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
    speed, losses = measured.tokens_per_second, measured.losses
    return RunRecord.model_validate(
        {
            "trial": trial.id,
            "preset": trial.row.preset,
            "world_size": trial.row.world_size,
            "status": _status(run),
            "message": failure.get("message"),
            "phase": failure.get("phase"),
            "parity": None,
            "parity_message": None,
            "ratio_to_reference": None,
            **{key: getattr(measured, key) for key in MEASURED},
            "tokens_per_second_per_gpu": None if speed is None else speed / trial.row.world_size,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "memory_ladder": measured.memory_ladder or failure.get("memory_ladder"),
            **_model_states(attestation.get("ranks") or [{}]),
            "attestation_sha256": attestation.get("sha256"),
            "wall_seconds": run.get("wall_seconds"),
            "run_folder": str(folder.path.relative_to(comparison_folder)),
            "command": run.get("command", ""),
            "repeat": trial.repeat,
            "position": position,
            "startup_seconds": startup_seconds(run),
            "failure": read_failure(run, failure, measured),
            "problem": trained_problem(run, attestation),
        }
    )


def read_side_run(record: RunRecord, folder: RunFolder, kinds: Sequence[SideRunKind]) -> SideRunRecord:
    """Return a side run's record, with its profile and its checkpoint as far as it has them."""
    run = folder.read_run() or {}
    profile = run.get("profile") or {}
    steps = profile.get("steps") or []
    saved: dict[str, Any] = next((save for save in run.get("saves") or [] if save["kind"] == "checkpoint"), {})
    return SideRunRecord.of(
        record,
        kinds=kinds,
        communication_fraction=fraction_of_steps(steps, "communication_seconds"),
        exposed_communication_fraction=fraction_of_steps(steps, "exposed_communication_seconds"),
        timeline=read_timeline(profile),
        save_seconds=saved.get("seconds"),
        save_bytes=saved.get("bytes"),
    )


def startup_seconds(run: Mapping[str, Any]) -> float | None:
    """Return the time from launch until training begins, attestation of the weights included."""
    begun = next((when for phase, when in run.get("phases") or [] if phase == "train"), None)
    return None if begun is None or "started_unix" not in run else float(begun - run["started_unix"])


def read_failure(run: Mapping[str, Any], failure: Mapping[str, Any], measured: Measurements) -> Failure | None:
    """Return kind, phase and bytes of a run that did not complete; None for one that did."""
    if run.get("status") == status.COMPLETED:
        return None
    peaks = (failure.get("peak_bytes"), measured.peak_allocated_bytes or measured.peak_host_bytes)
    return Failure(
        kind=_status(run),
        phase=failure.get("phase"),
        step=failure.get("step"),
        rank=failure.get("rank"),
        predicted_bytes=None,
        measured_bytes=max((peak for peak in peaks if peak), default=None),
    )


def trained_problem(run: Mapping[str, Any], attestation: Mapping[str, Any]) -> TrainedProblem:
    """Return what was trained, from what the ranks attest and from the arguments that the script understood."""
    ranks, spec = attestation.get("ranks") or [], run.get("spec") or {}
    facts: dict[str, Any] = {fact: _shared([rank.get(fact) for rank in ranks]) for fact in ATTESTED}
    facts |= {fact: spec.get(fact) for fact in SPECIFIED}
    masters = (attestation.get("promised") or {}).get("master_dtype")
    return TrainedProblem(**facts, ranks=len(ranks), promised_masters=masters)


def fraction_of_steps(steps: Sequence[Mapping[str, float]], part: str) -> float | None:
    """Return the seconds of a part over those of the same steps, all ranks together.

    >>> fraction_of_steps([{"step_seconds": 1.0, "communication_seconds": 0.25}], "communication_seconds")
    0.25
    """
    total = sum(step["step_seconds"] for step in steps)
    return sum(step[part] for step in steps) / total if total else None


def read_timeline(profile: Mapping[str, Any]) -> Timeline | None:
    """Return the last profiled step, each rank's start relative to the earliest rank's."""
    ranks = profile.get("timeline") or []
    if not ranks:
        return None
    earliest = min(rank["start_unix"] for rank in ranks)
    return Timeline.model_validate(
        {
            "step": profile["last_step"],
            "ranks": [
                {
                    "rank": rank["rank"],
                    "start_seconds": round(rank["start_unix"] - earliest, 6),
                    "seconds": rank["seconds"],
                    "lanes": rank["lanes"],
                }
                for rank in ranks
            ],
        }
    )


def _status(run: Mapping[str, Any]) -> str:
    """The run's status; a run that never reported how it ended has failed."""
    found = str(run.get("status", status.FAILED))
    return status.FAILED if found in (status.PLANNED, status.RUNNING) else found


def _shared(values: list[Fact]) -> Fact:
    """The value of all ranks, or the list of theirs where they differ."""
    return values[0] if values and all(value == values[0] for value in values) else (values or None)


def _model_states(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Model states of the rank that holds most of each, as attested."""
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return {
        **{part: max((rank[part] for rank in ranks if part in rank), default=None) for part in parts},
        **{key: ranks[0].get(key) for key in ("num_params", "num_trainable_params", "compute_dtype")},
    }
