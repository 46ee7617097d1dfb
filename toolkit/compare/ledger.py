"""The ledger: one JSON line per finished run of a comparison, on disk before the next run starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its run is repeated. Any other
line that is no record is an error; nothing is left out silently. A record knows which row it belongs to, and whether it
is a trial, a probe of a micro-batch, or a side run that no speed counts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import ValidationError, model_validator

from toolkit.compare.result_values import Count, PositiveCount, RowKey
from toolkit.compare.trial_figures import (
    CommunicationFraction,
    ExposedCommunicationFraction,
    SaveBytes,
    SaveSeconds,
    TimelineOrNone,
    TrialResult,
    contradiction,
)
from toolkit.errors import ToolkitError
from toolkit.files.json_lines import JsonLine, complete_bytes, line_name, read_json_lines
from toolkit.files.validation import explain
from toolkit.files.value_limits import shown
from toolkit.record.folder import lock_file
from toolkit.units import MIB

LOCK_FILE = "comparison.lock"
LEDGER_FILE = "ledger.jsonl"
# A trial of 10,000 steps on eight ranks takes 2.5 MiB.
MAX_LEDGER_BYTES = 512 * MIB
MAX_RECORDS = 10_000
DAMAGED_LINE = "move the line to another file, and `--resume` repeats its run or reads it from its run folder"
SideRunKind = Literal["profile", "save"]


class RunRecord(TrialResult):
    """What one run measured, with the values per step that only the parity check reads."""

    step_non_padding_tokens: tuple[Count, ...] = ()
    step_supervised_tokens: tuple[Count, ...] = ()
    batch_sha256: tuple[tuple[str, ...], ...] = ()
    """Per step, the digest of each rank's batches."""

    @classmethod
    def of(cls, record: RunRecord, **changes: Any) -> Self:
        """Return what another kind of record measured as a record of this kind, with other values of some fields."""
        return cls.model_validate({key: getattr(record, key) for key in RunRecord.model_fields} | changes)

    @property
    def result(self) -> TrialResult:
        """The trial as `results.json` has it."""
        return TrialResult.model_validate({key: getattr(self, key) for key in TrialResult.model_fields})


class TrialRecord(RunRecord):
    """A trial: one repeat of a row."""

    kind: Literal["trial"] = "trial"

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        return _named(self, f"{self.key.name}-r{self.repeat}")


class ProbeRecord(RunRecord):
    """A short run at one micro-batch, from the search for the largest that runs."""

    kind: Literal["probe"] = "probe"
    per_device_train_batch_size: PositiveCount

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        return _named(self, f"{self.key.name}-b{self.per_device_train_batch_size}")


class SideRunRecord(RunRecord):
    """A run that no speed counts: with a profile, a complete checkpoint, or both."""

    kind: Literal["side_run"] = "side_run"
    kinds: tuple[SideRunKind, ...]
    communication_fraction: CommunicationFraction = None
    exposed_communication_fraction: ExposedCommunicationFraction = None
    save_seconds: SaveSeconds = None
    save_bytes: SaveBytes = None
    timeline: TimelineOrNone = None


_Named = TypeVar("_Named", bound=RunRecord)


def _named(record: _Named, name: str) -> _Named:
    """A record is found by its name, and belongs to a row by its other keys: both must agree."""
    if record.trial != name:
        raise ValueError(f"trial is {shown(record.trial)}, expected {shown(name)} by its other keys")
    return record


LedgerRecord = TrialRecord | ProbeRecord | SideRunRecord
_KINDS: dict[str, type[LedgerRecord]] = {"trial": TrialRecord, "probe": ProbeRecord, "side_run": SideRunRecord}


@dataclass(frozen=True, slots=True)
class Ledger:
    """A comparison's finished runs."""

    path: Path

    def read(self) -> dict[str, LedgerRecord]:
        """Return records by name; of a run that was repeated under one name, the last.

        Raises ToolkitError for a line that is not a record.
        """
        if not os.path.lexists(self.path):
            return {}
        lines = read_json_lines(self.path, max_bytes=MAX_LEDGER_BYTES, max_lines=MAX_RECORDS, hint=DAMAGED_LINE)
        return {record.trial: record for record in map(self._parse, lines)}

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
            raise ToolkitError(
                f"{self.path} cannot be written: {error.strerror}",
                hint=f"{record.run_folder} has the run, and `--resume` reads it from there",
            ) from None

    def _parse(self, line: JsonLine) -> LedgerRecord:
        name, content = line_name(self.path, line.number), _with_kind(line.content)
        if not isinstance(kind := content["kind"], str) or kind not in _KINDS:
            raise ToolkitError(f"{name}: kind is {shown(kind)}, expected {', '.join(_KINDS)}", hint=DAMAGED_LINE)
        try:
            record = _KINDS[kind].model_validate(content)
        except ValidationError as error:
            raise ToolkitError(f"{name}: {explain(error)}", hint=DAMAGED_LINE) from None
        if problem := _contradiction(record):
            raise ToolkitError(f"{name}: {problem}", hint=DAMAGED_LINE)
        return record


def _contradiction(record: LedgerRecord) -> str | None:
    if record.timed_step_numbers and not (record.step_seconds and record.step_tokens):
        return "timed_step_numbers needs step_seconds and step_tokens"
    return contradiction(record)


def _with_kind(line: dict[str, Any]) -> dict[str, Any]:
    """Complete a line of an earlier version, in which a record's kind followed from its name."""
    if "kind" in line:
        return line
    if "kinds" in line:
        return line | {"kind": "side_run"}
    name = RowKey(preset=str(line.get("preset")), world_size=line.get("world_size", 0)).name
    if probe := re.fullmatch(re.escape(name) + r"-b(\d{1,9})", str(line.get("trial"))):
        return line | {"kind": "probe", "per_device_train_batch_size": int(probe[1])}
    return line | {"kind": "trial"}


def check_rows(records: Mapping[str, LedgerRecord], rows: Collection[RowKey], ledger: Path) -> None:
    """Raise ToolkitError for a run of a row that the comparison does not have."""
    for record in records.values():
        if record.key not in rows:
            raise ToolkitError(
                f"{ledger} has {shown(record.trial)}, a run of {shown(record.key.name)}, which is no row of this"
                " comparison",
                hint="name the folder of its comparison, or move the line to another file",
            )


def trials_of(records: Mapping[str, LedgerRecord], row: RowKey) -> list[TrialRecord]:
    """Return a row's trials by repeat."""
    found = [record for record in records.values() if isinstance(record, TrialRecord) and record.key == row]
    return sorted(found, key=lambda trial: trial.repeat)


def probes_of(records: Mapping[str, LedgerRecord], row: RowKey) -> dict[int, ProbeRecord]:
    """Return a row's probes by micro-batch, ascending."""
    found = [record for record in records.values() if isinstance(record, ProbeRecord) and record.key == row]
    return {probe.per_device_train_batch_size: probe for probe in sorted(found, key=_micro_batch)}


def _micro_batch(probe: ProbeRecord) -> int:
    return probe.per_device_train_batch_size


def side_runs_of(records: Mapping[str, LedgerRecord], row: RowKey, kind: SideRunKind) -> list[SideRunRecord]:
    """Return a row's side runs of one kind, in the order in which they ended."""
    found = [record for record in records.values() if isinstance(record, SideRunRecord) and record.key == row]
    return [record for record in found if kind in record.kinds]


@contextlib.contextmanager
def comparison_lock(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder; the kernel releases the lock when this process ends, however it does.

    Raises ToolkitError while another process runs the same comparison.
    """

    def held(holder: str) -> ToolkitError:
        return ToolkitError(
            f"{folder} holds a comparison that is still running (process {holder})",
            hint="wait for it, or name another folder: `--output-dir DIR`",
        )

    try:
        descriptor = lock_file(folder / LOCK_FILE, held=held)
    except OSError as error:
        raise ToolkitError(f"{folder / LOCK_FILE} cannot be locked: {error.strerror}") from None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
