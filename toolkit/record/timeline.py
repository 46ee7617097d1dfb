"""When rank 0 and its launcher began what, and the goodput that follows: the share of the time in steps that were kept.

The lines of `timeline.jsonl` are appended as it happens. A process that is killed leaves the lines before, so that the
time of every start in a run folder is accounted for, restarts and resumed attempts included. Unix times are those of
one node: rank 0's.
"""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, computed_field

from toolkit.errors import ToolkitError
from toolkit.files.documents import complete_bytes, read_bytes
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import read_heartbeats
from toolkit.record.measurements import StepRow, read_steps

# Beside the phases of rank 0 (`toolkit.observe.progress`):
LAUNCH = "launch"  # the launcher starts the ranks
RESTART = "restart"  # the ranks have ended in a fault, and the launcher starts them again
STOPPED = "stopped"  # a signal ended training, after a checkpoint if the run saves any
ENDED = "ended"  # no process of the run is left
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Moment(BaseModel):
    model_config = ConfigDict(frozen=True)

    unix: Seconds
    phase: str
    step: NonNegativeInt = 0  # completed optimizer steps
    lost_steps: NonNegativeInt = 0  # steps that were trained, are in no checkpoint, and are trained again
    lost_seconds: Seconds = 0.0  # what these steps took on rank 0
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
    with contextlib.suppress(ToolkitError):
        for line in read_bytes(path).splitlines():
            with contextlib.suppress(ValidationError):
                moments.append(Moment.model_validate_json(line))
    return moments


def close_timeline(path: Path, ranks: Path) -> None:
    """Add the end of processes that could not: the last heartbeat that one of them wrote to the folder `ranks`."""
    moments = read_timeline(path)
    if moments and moments[-1].phase != ENDED:
        heartbeats = [heartbeat.written_unix for heartbeat in read_heartbeats(ranks)]
        add_moment(path, ENDED, unix=max([moments[-1].unix, *heartbeats]))


# -- goodput


class Goodput(BaseModel):
    """Seconds of a run by what they were spent on, as run.json has them; `PARTS` add up to `wall_seconds`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    productive_seconds: float
    """Steps that were kept, without `waiting_seconds`."""
    startup_seconds: float
    """From the first launch to the first step, and its checks."""
    checkpoint_seconds: float
    """Training stood still for a save."""
    evaluation_seconds: float
    """Evaluations."""
    restart_seconds: float
    """From each fault to the first step of the next start."""
    lost_seconds: float
    """Steps that were trained again, and the time until the fault."""
    waiting_seconds: float
    """In kept steps: the shortest wait of any rank for its batch, and how far the slowest is behind the median rank."""
    other_seconds: float
    """Logging, and the end of the processes."""
    wall_seconds: float
    """While processes of the run existed."""
    idle_seconds: float
    """Between attempts, not part of `wall_seconds`."""
    lost_steps: int
    """Steps that were trained again."""
    starts: int
    """Starts of the processes."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fraction(self) -> float | None:
        """`productive_seconds` over `wall_seconds`."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    def describe(self) -> str:
        """Return one line: the goodput, and each other part of half a percent or more."""
        if self.fraction is None:
            return "goodput n/a"
        shares = {
            name: round(100 * getattr(self, f"{part}_seconds") / self.wall_seconds)
            for part, name in list(PARTS.items())[1:]
        }
        rest = ", ".join(f"{name} {share} %" for name, share in shares.items() if share)
        return f"goodput {100 * self.fraction:.0f} % of {self.wall_seconds:.0f} s" + (f" ({rest})" if rest else "")


PARTS = {
    "productive": "productive",
    "startup": "start-up",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "restart": "restarts",
    "lost": "lost steps",
    "waiting": "waiting",
    "other": "other",
}
"""What the wall time is divided into, and what a log calls it."""
_PART_OF_PHASE = {
    "train": "train",
    "save": "checkpoint",
    "evaluate": "evaluation",
    "end": "other",
    STOPPED: "other",
    RESTART: "restart",
    ENDED: "restart",
}


def read_goodput(folder: RunFolder) -> Goodput | None:
    """Return the goodput of a run folder; None for one without a timeline, or with damaged rows."""
    try:
        steps = read_steps(folder)
    except ToolkitError:
        return None
    timeline = read_timeline(folder.timeline)
    return measure_goodput(timeline, steps) if timeline else None


def measure_goodput(timeline: Sequence[Moment], steps: Sequence[list[StepRow]]) -> Goodput:
    """Divide the time of a timeline; `steps` are the rows of the steps that were kept, by step and rank."""
    processes, idle = _divide(timeline)
    for step in steps:
        trained = [one for one in processes if one.resumed_step is not None and one.resumed_step < step[0].step]
        if trained:
            trained[-1].kept.append(step)
    parts = dict.fromkeys(PARTS, 0.0)
    for process in processes:
        for part, seconds in process.parts().items():
            parts[part] += seconds
    return Goodput(
        **{f"{part}_seconds": seconds for part, seconds in parts.items()},
        wall_seconds=math.fsum(parts.values()),
        idle_seconds=idle,
        lost_steps=sum(moment.lost_steps for moment in timeline),
        starts=sum(moment.phase == "start" for moment in timeline),
    )


@dataclass(slots=True)
class _Process:
    seconds: dict[str, float] = field(default_factory=dict)  # by part; `train` is still to be divided
    resumed_step: int | None = None  # none until it trains
    lost_seconds: float = 0.0
    ended_well: bool = False
    kept: list[list[StepRow]] = field(default_factory=list)
    """Rows of the steps that it trained and that were kept, all ranks."""

    def parts(self) -> dict[str, float]:
        """Divide the time in which the process trained, and return all parts. None is more than what is left."""
        parts = dict(self.seconds)
        left = parts.pop("train", 0.0)
        kept = min(left, math.fsum(step[0].seconds for step in self.kept))
        waiting = min(kept, math.fsum(map(waiting_seconds, self.kept)))
        lost = min(left - kept, self.lost_seconds)
        parts |= {"productive": kept - waiting, "waiting": waiting, "lost": lost}
        rest = "other" if self.ended_well else "lost"
        parts[rest] = parts.get(rest, 0.0) + left - kept - lost
        return parts


def _divide(timeline: Sequence[Moment]) -> tuple[list[_Process], float]:
    processes, idle, began = [_Process()], 0.0, False
    for moment, following in pairwise([*timeline, *timeline[-1:]]):
        if moment.phase in ("start", LAUNCH) and began:
            processes.append(_Process())
        began = moment.phase != LAUNCH and (began or moment.phase == "start")
        process = processes[-1]
        if moment.lost_seconds:  # the launcher notes them after the process, a new process for the one before it
            earlier = processes if moment.phase == RESTART else processes[:-1] or processes
            owner = next((one for one in reversed(earlier) if one.resumed_step is not None), earlier[-1])
            owner.lost_seconds += moment.lost_seconds
        if moment.phase == "train" and process.resumed_step is None:
            process.resumed_step = moment.step
        process.ended_well |= moment.phase in ("end", STOPPED)
        seconds = max(0.0, following.unix - moment.unix)
        if moment.phase == ENDED and not following.restarted:
            idle += seconds
        else:
            part = _PART_OF_PHASE.get(moment.phase, "startup" if len(processes) == 1 else "restart")
            process.seconds[part] = process.seconds.get(part, 0.0) + seconds
    return processes, idle


def waiting_seconds(step: list[StepRow]) -> float:
    """Return how long the ranks waited in a step: all for their batches, and the median rank for the slowest.

    The lower median is used: of two ranks, the faster.

    >>> times = [{"data_seconds": 0.5, "own_seconds": 1.0}, {"data_seconds": 0.25, "own_seconds": 3.0}]
    >>> waiting_seconds([StepRow.model_construct(**rank) for rank in times])
    2.25
    """
    data = [row.data_seconds or 0.0 for row in step]
    own = [row.own_seconds or 0.0 for row in step]
    return float(min(data) + max(own) - statistics.median_low(own))
