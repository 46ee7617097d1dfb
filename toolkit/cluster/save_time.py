"""Seconds that a run needs between SIGTERM and its end: from measured saves, or an assumed value that is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.options import JobOptions
from toolkit.errors import ToolkitError
from toolkit.record.folder import RunFolder

# Assumed where nothing was measured: 96 GB (8B parameters and Adam's states, in fp32) at 0.8 GB/s.
ASSUMED_SAVE_SECONDS = 120.0
# Ranks agree on the last step through a store, and close files and process groups after the save.
MARGIN_SECONDS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTime:
    """How long a checkpoint takes, and how that is known."""

    seconds: float
    """From the end of a step until the checkpoint is complete."""
    step_seconds: float = 0.0
    """A signal waits for the step in progress; 0 where steps were not measured."""
    earlier_write_seconds: float = 0.0
    """With `--async_save`, a save first waits for the checkpoint before, whose writing may just have begun."""
    source: str

    @property
    def grace_seconds(self) -> int:
        """Seconds to wait for the ranks after SIGTERM: twice the step in progress and the save, and a margin."""
        return math.ceil(2 * (self.seconds + self.earlier_write_seconds + self.step_seconds)) + MARGIN_SECONDS


def save_time(options: JobOptions, output_dir: Path | None, *, async_save: bool) -> SaveTime:
    """Return the time of a save as given, as measured in a run folder, or as assumed.

    `async_save` is true for a job that writes while it trains. Raises ToolkitError for a `--saves-of` that has measured
    none.
    """
    if options.save_seconds is not None:
        return _one_after_another(options.save_seconds, async_save, source="--save-seconds")
    if options.saves_of is not None:
        measured = measured_save_time(options.saves_of, async_save=async_save)
        if measured is None:
            raise ToolkitError(
                f"--saves-of {options.saves_of} has no measured save: no run.json with `saves`",
                hint="name the folder of a completed run that saved checkpoints, or give `--save-seconds 60`",
            )
        return measured
    measured = None if output_dir is None else measured_save_time(output_dir, async_save=async_save)
    return measured or _one_after_another(
        ASSUMED_SAVE_SECONDS, async_save, source="assumed; `--saves-of RUN` measures it"
    )


def _one_after_another(seconds: float, async_save: bool, *, source: str) -> SaveTime:
    return SaveTime(seconds=seconds, earlier_write_seconds=seconds if async_save else 0.0, source=source)


def measured_save_time(path: Path, *, async_save: bool) -> SaveTime | None:
    """Return the slowest save that run.json records, or None where it records none."""
    run = RunFolder(path).read_run() or {}
    found = run.get("saves")
    saves = [each for each in found if _seconds(each, "seconds")] if isinstance(found, list) else []
    if not saves:
        return None
    measured = run.get("measured")
    return SaveTime(
        seconds=max(map(_save_seconds, saves)),
        step_seconds=_seconds(measured, "step_seconds_median"),
        earlier_write_seconds=max(map(_write_seconds, saves)) if async_save else 0.0,
        source=f"the slowest of {len(saves)} in {path}",
    )


def _save_seconds(save: object) -> float:
    """Return the seconds of one save, with its fingerprint and without waiting for the save before.

    `seconds` begins after the fingerprint and has an asynchronous write; `stall_seconds` is the other way round.
    """
    return max(_seconds(save, "seconds"), _seconds(save, "stall_seconds") - _seconds(save, "waited_seconds"))


def _write_seconds(save: object) -> float:
    return _seconds(save, "write_seconds") or _seconds(save, "seconds")


def _seconds(recorded: object, name: str) -> float:
    """Return a time of run.json; 0 where there is none."""
    value = recorded.get(name) if isinstance(recorded, dict) else None
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else 0.0
