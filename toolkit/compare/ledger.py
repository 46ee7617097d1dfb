"""The ledger: one JSON line per finished run of a comparison, on disk before the next run starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its run is repeated. A record
knows which row it belongs to, and whether it is a trial, a probe of a micro-batch, or a side run that no speed counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from toolkit.compare.read_results import explain
from toolkit.compare.result_values import RowKey
from toolkit.compare.trial_figures import (
    CommunicationFraction,
    ExposedCommunicationFraction,
    SaveBytes,
    SaveSeconds,
    TimelineOrNone,
    TrialResult,
)
from toolkit.errors import ToolkitError
from toolkit.run.folder import lock_file

LOCK_FILE = "comparison.lock"
LEDGER_FILE = "ledger.jsonl"
SideRunKind = Literal["profile", "save"]


class RunRecord(TrialResult):
    """What one run measured, with the values per step that only the parity check reads."""

    step_non_padding_tokens: tuple[int, ...] = ()
    step_supervised_tokens: tuple[int, ...] = ()
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


class ProbeRecord(RunRecord):
    """A short run at one micro-batch, from the search for the largest that runs."""

    kind: Literal["probe"] = "probe"
    per_device_train_batch_size: PositiveInt


class SideRunRecord(RunRecord):
    """A run that no speed counts: with a profile, a complete checkpoint, or both."""

    kind: Literal["side_run"] = "side_run"
    kinds: tuple[SideRunKind, ...]
    communication_fraction: CommunicationFraction = None
    exposed_communication_fraction: ExposedCommunicationFraction = None
    save_seconds: SaveSeconds = None
    save_bytes: SaveBytes = None
    timeline: TimelineOrNone = None


LedgerRecord = TrialRecord | ProbeRecord | SideRunRecord
_RECORD: TypeAdapter[LedgerRecord] = TypeAdapter(Annotated[LedgerRecord, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Ledger:
    """A comparison's finished runs."""

    path: Path

    def read(self) -> dict[str, LedgerRecord]:
        """Return records by name; of a run that was repeated under one name, the last.

        Raises ToolkitError for a line that is not a record.
        """
        records = (self._parse(line, number) for number, line in enumerate(self._complete_lines(), 1))
        return {record.trial: record for record in records}

    def append(self, record: LedgerRecord) -> None:
        """Add a record, flushed to the disk when this returns."""
        self._drop_incomplete_line()
        with self.path.open("ab") as file:
            file.write(record.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _parse(self, line: bytes, number: int) -> LedgerRecord:
        try:
            return _RECORD.validate_python(_with_kind(json.loads(line)))
        except ValidationError as error:
            raise ToolkitError(f"{self.path}, line {number}: {explain(error)}") from None
        except ValueError as error:
            raise ToolkitError(f"{self.path}, line {number}: not JSON ({error})") from None

    def _complete_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        return self.path.read_bytes().split(b"\n")[:-1]

    def _drop_incomplete_line(self) -> None:
        """Truncate a line without its newline, cut off by a kill: appending to it would corrupt the next one."""
        complete = sum(len(line) + 1 for line in self._complete_lines())
        if self.path.exists() and self.path.stat().st_size > complete:
            os.truncate(self.path, complete)


def _with_kind(line: Any) -> Any:
    """Complete a line of an earlier version, in which a record's kind followed from its name."""
    if not isinstance(line, dict) or "kind" in line:
        return line
    if "kinds" in line:
        return line | {"kind": "side_run"}
    name = RowKey(preset=str(line.get("preset")), world_size=line.get("world_size", 0)).name
    if probe := re.fullmatch(re.escape(name) + r"-b(\d+)", str(line.get("trial"))):
        return line | {"kind": "probe", "per_device_train_batch_size": int(probe[1])}
    return line | {"kind": "trial"}


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

    descriptor = lock_file(folder / LOCK_FILE, held=held)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
