"""Seconds that a run needs between SIGTERM and its end: from measured saves, or an assumed value that is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.options import JobOptions
from toolkit.errors import ToolkitError
from toolkit.run.folder import RunFolder

# Assumed where nothing was measured: 96 GB (8B parameters and Adam's states, in fp32) at 0.8 GB/s.
ASSUMED_SAVE_SECONDS = 120.0
# Ranks agree on the last step through a store, and close files and process groups after the save.
MARGIN_SECONDS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTime:
    """How long a checkpoint takes, and how that is known."""

    seconds: float
    step_seconds: float
    """A signal waits for the step in progress; 0 where steps were not measured."""
    source: str

    @property
    def grace_seconds(self) -> int:
        """Seconds to wait for the ranks after SIGTERM: twice the step in progress and the save, and a margin."""
        return math.ceil(2 * (self.seconds + self.step_seconds)) + MARGIN_SECONDS


def save_time(options: JobOptions, output_dir: Path | None) -> SaveTime:
    """Return the time of a save as given, as measured in a run folder, or as assumed.

    Raises ToolkitError for a `--saves-of` that has measured none.
    """
    if options.save_seconds is not None:
        return SaveTime(seconds=options.save_seconds, step_seconds=0.0, source="--save-seconds")
    if options.saves_of is not None:
        measured = measured_save_time(options.saves_of)
        if measured is None:
            raise ToolkitError(
                f"--saves-of {options.saves_of} has no measured save: no run.json with `saves`",
                hint="name the folder of a completed run that saved checkpoints, or give `--save-seconds 60`",
            )
        return measured
    measured = None if output_dir is None else measured_save_time(output_dir)
    return measured or SaveTime(
        seconds=ASSUMED_SAVE_SECONDS, step_seconds=0.0, source="assumed; `--saves-of RUN` measures it"
    )


def measured_save_time(path: Path) -> SaveTime | None:
    """Return the slowest save that run.json records, or None where it records none."""
    run = RunFolder(path).read_run() or {}
    found = run.get("saves")
    saves = [each["seconds"] for each in found if _is_save(each)] if isinstance(found, list) else []
    if not saves:
        return None
    measured = run.get("measured")
    step = measured.get("step_seconds_median") if isinstance(measured, dict) else None
    return SaveTime(
        seconds=max(saves),
        step_seconds=float(step) if isinstance(step, int | float) and math.isfinite(step) else 0.0,
        source=f"the slowest of {len(saves)} in {path}",
    )


def _is_save(save: object) -> bool:
    seconds = save.get("seconds") if isinstance(save, dict) else None
    return isinstance(seconds, int | float) and 0 <= seconds < math.inf
