"""Read what one run measured, and the facts of the problem that it trained, from its run folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.compare.ledger import SideRunKind, SideRunRecord
from toolkit.compare.rows import Failure, RunRecord, Timeline, TimelineRank, TrainedProblem, Trial
from toolkit.errors import ToolkitError
from toolkit.files.documents import explain
from toolkit.parallel.layout import DIMENSIONS, ParallelLayout
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import Measurements, measure, read_steps
from toolkit.record.run_files import (
    AttestedRank,
    Profile,
    RecordedAttestation,
    RecordedFailure,
    RecordedRun,
    damaged_hint,
    read_run,
    read_run_file,
)

# What the training script understood, defaults included; every other fact of a problem is attested by each rank.
SPECIFIED = ("global_batch_size", "learning_rate", "seed", "max_steps")
COMPUTED = ("layout", "ranks", "expected_masters")
ATTESTED = tuple(key for key in TrainedProblem.model_fields if key not in (*SPECIFIED, *COMPUTED))
# Of the rank that holds most of each.
MODEL_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "accumulated_gradient_bytes")


def read_run_record(
    trial: Trial, folder: RunFolder, comparison_folder: Path, *, untimed_steps: int, position: int = 0
) -> RunRecord:
    """Return everything that a finished run's folder shows. Raises ToolkitError for a damaged file in it."""
    run = read_run(folder)
    failure = read_run_file(folder.failure_json, RecordedFailure)
    attestation = read_run_file(folder.attestation_json, RecordedAttestation)
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
    speed, goodput = measured.tokens_per_second, run.goodput
    ranks = attestation.ranks or (AttestedRank(),)
    try:
        problem = trained_problem(run, attestation)
        return RunRecord.model_validate(
            {
                **dict(measured),
                **{part: largest(getattr(rank, part) for rank in ranks) for part in MODEL_STATES},
                "num_params": ranks[0].num_params,
                "num_trainable_params": ranks[0].num_trainable_params,
                "compute_dtype": ranks[0].compute_dtype,
                "accumulate": ranks[0].accumulate,
                **({} if goodput is None else goodput.model_dump()),
                "goodput_fraction": None if goodput is None else goodput.fraction,
                "trial": trial.id,
                "preset": trial.row.preset,
                "world_size": trial.row.world_size,
                "repeat": trial.repeat,
                "position": position,
                "status": run.status,
                "message": failure.message,
                "phase": failure.phase,
                "failure": read_failure(run, failure, measured),
                "tokens_per_second_per_gpu": None if speed is None else speed / trial.row.world_size,
                "memory_by_phase": measured.memory_by_phase or failure.memory_by_phase,
                "layout": problem.layout if isinstance(problem.layout, str) else None,
                "num_nodes": len(run.nodes) or None,
                "attestation_sha256": attestation.sha256,
                "startup_seconds": startup_seconds(run),
                "wall_seconds": run.wall_seconds,
                "run_folder": str(folder.path.relative_to(comparison_folder)),
                "command": run.command,
                "problem": problem,
            }
        )
    except ValidationError as error:
        raise ToolkitError(f"{folder.path}: {explain(error)}", hint=damaged_hint(folder.run_json)) from None


def read_side_run(record: RunRecord, folder: RunFolder, kinds: Sequence[SideRunKind]) -> SideRunRecord:
    """Return a side run's record, with its profile and its checkpoint as far as it has them."""
    run = read_run(folder)
    profile = run.profile or Profile()
    steps = profile.steps or ()
    total = sum(step.step_seconds for step in steps) or None
    saved = next((save for save in run.saves or () if save.kind == "checkpoint"), None)
    return SideRunRecord.of(
        record,
        kinds=kinds,
        communication_fraction=total and sum(step.communication_seconds for step in steps) / total,
        exposed_communication_fraction=total and sum(step.exposed_communication_seconds for step in steps) / total,
        timeline=read_timeline(profile),
        save_seconds=saved and saved.seconds,
        save_bytes=saved and saved.bytes,
    )


def startup_seconds(run: RecordedRun) -> float | None:
    """Return the time from launch until training begins; None where a time is unknown or the clock was set back."""
    begun = next((when for phase, when in run.phases or () if phase == "train"), None)
    if begun is None or run.started_unix is None or begun < run.started_unix:
        return None
    return begun - run.started_unix


def read_failure(run: RecordedRun, failure: RecordedFailure, measured: Measurements) -> Failure | None:
    """Return kind, phase and bytes of a run that did not complete; None for one that did."""
    if run.status == status.COMPLETED:
        return None
    return Failure(
        kind=run.status,
        phase=failure.phase,
        step=failure.step,
        rank=failure.rank,
        measured_bytes=largest((failure.peak_bytes, measured.peak_allocated_bytes or measured.peak_host_bytes)),
    )


def trained_problem(run: RecordedRun, attestation: RecordedAttestation) -> TrainedProblem:
    """Return what was trained, from what the ranks attest and from the arguments that the script understood."""
    ranks, spec = attestation.ranks or (), run.spec or {}
    facts: dict[str, Any] = {fact: _shared([getattr(rank, fact, None) for rank in ranks]) for fact in ATTESTED}
    facts |= {fact: spec.get(fact) for fact in SPECIFIED}
    masters = attestation.expected.master_dtype if attestation.expected else None
    degrees = [rank.layout and {name: rank.layout.get(name, 1) for name in DIMENSIONS} for rank in ranks]
    layout = _shared([None if own is None else str(ParallelLayout(**own)) for own in degrees])
    return TrainedProblem(**facts, layout=layout, ranks=len(ranks), expected_masters=masters)


def read_timeline(profile: Profile) -> Timeline | None:
    """Return the last profiled step, each rank's start relative to the earliest rank's."""
    ranks = profile.timeline or ()
    if not ranks:
        return None
    earliest = min(rank.start_unix for rank in ranks)
    shown = [
        TimelineRank(start_seconds=round(rank.start_unix - earliest, 6), **rank.model_dump(exclude={"start_unix"}))
        for rank in ranks
    ]
    return Timeline(step=profile.last_step, ranks=tuple(shown))


def largest(sizes: Iterable[int | None]) -> int | None:
    """Return the largest of the sizes that are known."""
    return max((size for size in sizes if size is not None), default=None)


def _shared(values: list[Any]) -> Any:
    """The value of all ranks, or the list of theirs where they differ."""
    return values[0] if values and all(value == values[0] for value in values) else (values or None)
