"""When rank 0 and its launcher began what: the lines of `timeline.jsonl`, appended as it happens.

A process that is killed leaves the lines before, so that the time of every start in a run folder is accounted for
(`toolkit.record.goodput`). Unix times are those of one node: rank 0's.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.json_files import complete_bytes
from toolkit.files.reading import read_bytes
from toolkit.record.heartbeat import read_heartbeats

# Beside the phases of rank 0 (`toolkit.observe.progress`):
LAUNCH = "launch"
"""The launcher starts the ranks."""
RESTART = "restart"
"""The ranks have ended in a fault, and the launcher starts them again."""
STOPPED = "stopped"
"""A signal ended training, after a checkpoint if the run saves any."""
ENDED = "ended"
"""No process of the run is left."""

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Moment(BaseModel):
    """The beginning of a phase."""

    model_config = ConfigDict(frozen=True)

    unix: Seconds
    phase: str
    step: NonNegativeInt = 0
    """Completed optimizer steps."""
    lost_steps: NonNegativeInt = 0
    """Steps that were trained, are in no checkpoint, and are trained again."""
    lost_seconds: Seconds = 0.0
    """What these steps took on rank 0."""
    restarted: bool = False
    """True for the `start` of a process that a launcher of others (torchrun) started again after a fault."""


def add_moment(path: Path, phase: str, *, unix: float | None = None, **facts: Any) -> None:
    """Append a line, after one that a killed process has cut off. A full disk is left to others to report."""
    moment = Moment(unix=time.time() if unix is None else unix, phase=phase, **facts)
    line = json.dumps(moment.model_dump(exclude_defaults=True)) + "\n"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            end = complete_bytes(path)
            file.write((line if end == file.tell() else "\n" + line).encode())


def read_timeline(path: Path) -> list[Moment]:
    """Return the lines of a file, without those that are damaged or cut off; empty without a file."""
    moments = []
    try:
        lines = read_bytes(path).splitlines()
    except ToolkitError:
        return []
    for line in lines:
        with contextlib.suppress(ValidationError):
            moments.append(Moment.model_validate_json(line))
    return moments


def close_timeline(path: Path, ranks: Path) -> None:
    """Add the end of processes that could not: the last heartbeat that one of them wrote to the folder `ranks`."""
    moments = read_timeline(path)
    if moments and moments[-1].phase != ENDED:
        heartbeats = [heartbeat.written_unix for heartbeat in read_heartbeats(ranks)]
        add_moment(path, ENDED, unix=max([moments[-1].unix, *heartbeats]))
