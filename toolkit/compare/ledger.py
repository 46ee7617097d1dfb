"""The ledger: one JSON line per finished run of a comparison, on disk before the next run starts.

Killed at any byte it can be read again: a last line that was cut off is dropped, and its run is repeated. Any other
line that is no record is an error; nothing is left out silently. A record knows which row it belongs to, and whether it
is a trial, a probe of a micro-batch, or a side run that no speed counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from toolkit.compare.rows import RowKey, RunRecord, SideRunFigures, Trial
from toolkit.errors import ToolkitError
from toolkit.files.documents import complete_bytes, explain, read_json_lines, shown
from toolkit.record.columns import PositiveCount
from toolkit.record.folder import lock_file

LOCK_FILE = "comparison.lock"
LEDGER_FILE = "ledger.jsonl"
DAMAGED_LINE = "move the line to another file, and `--resume` repeats its run or reads it from its run folder"
SideRunKind = Literal["profile", "save"]


class _Record(RunRecord):
    @classmethod
    def of(cls, run: RunRecord, **changes: Any) -> Self:
        """Return what a run measured as a record of this kind, with other values of some fields."""
        return cls.model_validate({key: getattr(run, key) for key in RunRecord.model_fields} | changes)


class TrialRecord(_Record):
    """A trial: one repeat of a row."""

    kind: Literal["trial"] = "trial"


class ProbeRecord(_Record):
    """A short run at one micro-batch, from the search for the largest that runs."""

    kind: Literal["probe"] = "probe"
    per_device_train_batch_size: PositiveCount


class SideRunRecord(SideRunFigures, _Record):
    """A run that no speed counts: with a profile, a complete checkpoint, or both."""

    kind: Literal["side_run"] = "side_run"
    kinds: tuple[SideRunKind, ...]


LedgerRecord = TrialRecord | ProbeRecord | SideRunRecord
_KINDS: dict[str, type[LedgerRecord]] = {"trial": TrialRecord, "probe": ProbeRecord, "side_run": SideRunRecord}


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
            kind = content.get("kind")
            if not isinstance(kind, str) or kind not in _KINDS:
                raise ToolkitError(f"{name}: kind is {shown(kind)}, expected {', '.join(_KINDS)}", hint=DAMAGED_LINE)
            try:
                record = _KINDS[kind].model_validate(content)
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
            raise ToolkitError(
                f"{self.path} cannot be written: {error.strerror}",
                hint=f"{record.run_folder} has the run, and `--resume` reads it from there",
            ) from None


def trials_of(records: Mapping[str, LedgerRecord], row: RowKey) -> list[TrialRecord]:
    """Return a row's trials by repeat."""
    found = [record for record in records.values() if isinstance(record, TrialRecord) and record.key == row]
    return sorted(found, key=lambda trial: trial.repeat)


def probes_of(records: Mapping[str, LedgerRecord], row: RowKey) -> dict[int, ProbeRecord]:
    """Return a row's probes by micro-batch, ascending."""
    found = [record for record in records.values() if isinstance(record, ProbeRecord) and record.key == row]
    sizes = {probe.per_device_train_batch_size: probe for probe in found}
    return dict(sorted(sizes.items()))


def side_runs_of(records: Mapping[str, LedgerRecord], row: RowKey, kind: SideRunKind) -> list[SideRunRecord]:
    """Return a row's side runs of one kind, in the order in which they ended."""
    found = [record for record in records.values() if isinstance(record, SideRunRecord) and record.key == row]
    return [record for record in found if kind in record.kinds]


@contextlib.contextmanager
def comparison_lock(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder. Raises ToolkitError while another process runs the same comparison."""

    def held(holder: str) -> ToolkitError:
        message = f"{folder} holds a comparison that is still running (process {holder})"
        return ToolkitError(message, hint="wait for it, or name another folder: `--output-dir DIR`")

    descriptor = lock_file(folder / LOCK_FILE, held=held)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def failed_repeat(records: Mapping[str, LedgerRecord], trial: Trial) -> TrialRecord | None:
    """Return another repeat of the trial's row that failed; what ran out of memory once would do so again."""
    repeats = trials_of(records, trial.row)
    return next((record for record in repeats if record.trial != trial.id and not record.completed), None)


def completed_sizes(probes: Iterable[ProbeRecord]) -> list[int]:
    """Return the micro-batches that ran."""
    return [probe.per_device_train_batch_size for probe in probes if probe.completed]
