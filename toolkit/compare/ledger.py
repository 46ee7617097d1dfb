"""The ledger: one JSON line per finished run of a comparison, read from its run folder before the next run starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its run is repeated. Any other
line that is no record is an error; nothing is left out silently. A record knows which row it belongs to, and whether it
is a trial, a probe of a per-GPU batch, or a side run that no speed counts.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from toolkit.compare.rows import RowKey, Run, SideRunFigures, Timeline, TimelineRank, TrainedProblem, Trial
from toolkit.errors import ToolkitError
from toolkit.files.documents import complete_bytes, explain, read_json_lines
from toolkit.parallel.layout import DIMENSIONS, ParallelLayout
from toolkit.record import run_files, status
from toolkit.record.columns import PositiveCount
from toolkit.record.folder import RunFolder, lock_file
from toolkit.record.kernel_table import kernels_summary
from toolkit.record.measurements import measure, read_steps
from toolkit.record.reading import RankReading

LOCK_FILE = "comparison.lock"
LEDGER_FILE = "ledger.jsonl"
DAMAGED_LINE = "move the line to another file, and `--resume` repeats its run or reads it from its run folder"
SideRunKind = Literal["profile", "save"]
# What the training script understood, defaults included; every other fact of a problem is attested by each rank.
SPECIFIED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"),
    *("learning_rate", "seed", "max_steps"),
)
# What ranks read of both: bytes are those of the fullest rank, everything else is the first one's.
READ_OF_RUN = RankReading.model_fields.keys() & Run.model_fields.keys() - {"layout", "kernels"}
READ_OF_PROBLEM = RankReading.model_fields.keys() & TrainedProblem.model_fields.keys() - {"layout", *SPECIFIED}


class LedgerRecord(SideRunFigures, Run):
    """A run as a line of the ledger."""

    kind: Literal["trial", "probe", "side_run"] = "trial"
    """A repeat of a row; a short run at one per-GPU batch, from the search for the largest that runs; or a run that no
    speed counts: with a profile, a complete checkpoint, or both."""
    per_device_train_batch_size: PositiveCount | None = None
    """The batch of a probe."""
    kinds: tuple[SideRunKind, ...] = ()
    """What a side run measures."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.kind == "probe" and self.per_device_train_batch_size is None:
            raise ValueError("it has no per_device_train_batch_size")
        last = max(self.timed_step_numbers, default=0)
        needed = (self.step_seconds, self.step_tokens)
        counts = (self.step_non_padding_tokens, self.step_supervised_tokens)
        if any(len(each) < last for each in needed) or any(0 < len(each) < last for each in counts):
            raise ValueError(f"step_seconds and the counts of tokens must reach the last timed step, {last}")
        return self


@dataclass(frozen=True, slots=True)
class Ledger:
    """A comparison's finished runs."""

    path: Path

    def read(self) -> dict[str, LedgerRecord]:
        """Return records by name, the last of each name. Raises ToolkitError for a line that is not a record."""
        records: dict[str, LedgerRecord] = {}
        if not self.path.exists():
            return records
        for name, content in read_json_lines(self.path, hint=DAMAGED_LINE):
            try:
                record = LedgerRecord.model_validate(content)
            except ValidationError as error:
                raise ToolkitError(f"{name}: {explain(error)}", hint=DAMAGED_LINE) from None
            records[record.trial] = record
        return records

    def append(self, record: LedgerRecord) -> None:
        """Add a record, flushed to the disk when this returns. Raises ToolkitError for a disk that takes no more."""
        try:
            if self.path.exists():
                os.truncate(self.path, complete_bytes(self.path))  # a line cut off by a kill would corrupt this one
            with self.path.open("ab") as file:
                file.write(record.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            hint = f"{record.run_folder} has the run, and `--resume` reads it from there"
            raise ToolkitError(f"{self.path} cannot be written: {error.strerror}", hint=hint) from None


def trials_of(records: Mapping[str, LedgerRecord], row: RowKey) -> list[LedgerRecord]:
    """Return a row's trials by repeat."""
    trials = [record for record in records.values() if record.kind == "trial" and record.key == row]
    return sorted(trials, key=lambda trial: trial.repeat)


def failed_repeat(records: Mapping[str, LedgerRecord], trial: Trial) -> LedgerRecord | None:
    """Return another repeat of the trial's row that failed; what ran out of memory once would do so again."""
    repeats = trials_of(records, trial.row)
    return next((record for record in repeats if record.trial != trial.id and not record.completed), None)


def probes_of(records: Mapping[str, LedgerRecord], row: RowKey) -> dict[int, LedgerRecord]:
    """Return a row's probes by per-GPU batch, ascending."""
    probes = [record for record in records.values() if record.kind == "probe" and record.key == row]
    sizes = {probe.per_device_train_batch_size: probe for probe in probes}
    return {size: sizes[size] for size in sorted(size for size in sizes if size is not None)}


def completed_sizes(probes: Mapping[int, LedgerRecord]) -> list[int]:
    """Return the per-GPU batches that ran."""
    return [size for size, probe in probes.items() if probe.completed]


def side_runs_of(records: Mapping[str, LedgerRecord], row: RowKey, kind: SideRunKind) -> list[LedgerRecord]:
    """Return a row's side runs of one kind, in the order in which they ended."""
    return [record for record in records.values() if kind in record.kinds and record.key == row]


@contextlib.contextmanager
def comparison_lock(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder. Raises ToolkitError while another process runs the same comparison."""
    hint = "wait for it, or name another folder: `--output-dir DIR`"
    descriptor = lock_file(folder / LOCK_FILE, holds="a comparison", hint=hint)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read_run_record(
    trial: Trial, folder: RunFolder, comparison_folder: Path, *, untimed_steps: int, position: int = 0
) -> LedgerRecord:
    """Return everything that a finished run's folder shows. Raises ToolkitError for a damaged file in it."""
    run = run_files.read_run(folder)
    failure = run_files.read_run_file(folder.failure_json, run_files.RecordedFailure)
    attestation = run_files.read_run_file(folder.attestation_json, run_files.RecordedAttestation)
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
    speed, goodput, ranks = measured.tokens_per_second, run.goodput, attestation.ranks or (RankReading(),)
    failed_at = {"kind": run.status, "phase": failure.phase, "step": failure.step, "rank": failure.rank}
    peak_bytes = measured.peak_allocated_bytes or measured.peak_host_bytes
    failed_at["measured_bytes"] = largest((failure.peak_bytes, peak_bytes))
    begun = next((when for phase, when in run.phases or () if phase == "train"), None)
    startup = None if begun is None or run.started_unix is None else begun - run.started_unix
    try:
        problem = trained_problem(run, attestation)
        return LedgerRecord.model_validate(
            {
                **dict(measured),
                **{
                    name: largest(getattr(rank, name) for rank in ranks)
                    if name.endswith("_bytes")
                    else getattr(ranks[0], name)
                    for name in READ_OF_RUN
                },
                **({} if goodput is None else goodput.model_dump()),
                "goodput_fraction": None if goodput is None else goodput.fraction,
                "trial": trial.id,
                "preset": trial.row.preset,
                "world_size": trial.row.world_size,
                "repeat": trial.repeat,
                "position": position,
                "status": run.status,
                "message": failure.message or "; ".join(run.warnings) or None,
                "phase": failure.phase,
                "failure": None if run.status == status.COMPLETED else failed_at,
                "tokens_per_second_per_gpu": None if speed is None else speed / trial.row.world_size,
                "memory_by_phase": measured.memory_by_phase or failure.memory_by_phase,
                "layout": problem.layout if isinstance(problem.layout, str) else None,
                "num_nodes": len(run.nodes) or None,
                "attestation_sha256": attestation.sha256,
                "kernels": kernels_summary(attestation.kernels),
                "startup_seconds": startup if startup is None or startup >= 0 else None,  # a clock was set back
                "wall_seconds": run.wall_seconds,
                "run_folder": str(folder.path.relative_to(comparison_folder)),
                "command": run.command,
                "problem": problem,
            }
        )
    except ValidationError as error:
        raise ToolkitError(f"{folder.path}: {explain(error)}", hint=run_files.damaged_hint(folder.run_json)) from None


def read_side_run(record: LedgerRecord, name: str, folder: RunFolder, kinds: Sequence[SideRunKind]) -> LedgerRecord:
    """Return a side run's record; its timeline is of the last profiled step, from the earliest rank's start on."""
    run = run_files.read_run(folder)
    profile = run.profile or run_files.Profile()
    steps, drawn = profile.steps or (), profile.timeline or ()
    total = sum(step.step_seconds for step in steps) or None
    saved = next((save for save in run.saves or () if save.kind == "checkpoint"), None)
    earliest = min((rank.start_unix for rank in drawn), default=0.0)
    ranks = tuple(
        TimelineRank(
            rank=rank.rank, start_seconds=round(rank.start_unix - earliest, 6), seconds=rank.seconds, lanes=rank.lanes
        )
        for rank in drawn
    )
    return record.updated(
        trial=name,
        kind="side_run",
        kinds=tuple(kinds),
        communication_fraction=total and sum(step.communication_seconds for step in steps) / total,
        exposed_communication_fraction=total and sum(step.exposed_communication_seconds for step in steps) / total,
        timeline=Timeline(step=profile.last_step, ranks=ranks) if ranks else None,
        save_seconds=saved and saved.seconds,
        save_bytes=saved and saved.bytes,
    )


def trained_problem(run: run_files.RecordedRun, attestation: run_files.RecordedAttestation) -> TrainedProblem:
    """Return what was trained, from what the ranks attest and from the arguments that the script understood."""
    ranks, spec = attestation.ranks or (), run.spec or {}
    facts: dict[str, Any] = {name: _shared([getattr(rank, name) for rank in ranks]) for name in READ_OF_PROBLEM}
    facts |= {fact: spec.get(fact) for fact in SPECIFIED}
    masters = attestation.expected.master_dtype if attestation.expected else None
    degrees = [rank.layout and {name: rank.layout.get(name, 1) for name in DIMENSIONS} for rank in ranks]
    layout = _shared([None if own is None else str(ParallelLayout(**own)) for own in degrees])
    return TrainedProblem(**facts, layout=layout, ranks=len(ranks), expected_masters=masters)


def largest(sizes: Iterable[int | None]) -> int | None:
    """Return the largest of the sizes that are known."""
    return max((size for size in sizes if size is not None), default=None)


def _shared(values: list[Any]) -> Any:
    """The value of all ranks, or the list of theirs where they differ."""
    return values[0] if values and values.count(values[0]) == len(values) else (values or None)
