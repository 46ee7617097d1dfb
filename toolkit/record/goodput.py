"""Goodput: the share of a run's time that went into steps which were kept, and where the rest went.

    goodput = read_goodput(RunFolder(Path("out")))
    goodput.fraction, goodput.describe()

It covers every start in the folder: restarts after faults and resumed attempts. The clock is rank 0's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import StepRow, read_steps
from toolkit.record.timeline import ENDED, LAUNCH, RESTART, STOPPED, Moment, read_timeline

PARTS = ("productive", "startup", "checkpoint", "evaluation", "restart", "lost", "waiting", "other")
"""What the wall time is divided into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds of a run by what they were spent on; `PARTS` add up to `wall_seconds`."""

    productive_seconds: float
    """Steps that were kept, without `waiting_seconds`."""
    startup_seconds: float
    """From the first launch to the first step, and the checks after it."""
    checkpoint_seconds: float
    """Training stood still for a save; the trained model at the end included."""
    evaluation_seconds: float
    restart_seconds: float
    """The same as `startup_seconds` for each later start, and the time between a fault and that start."""
    lost_seconds: float
    """Steps that were trained again, and what followed a process's last step until a fault ended it."""
    waiting_seconds: float
    """In kept steps: until every rank had its batch, and for the slowest rank."""
    other_seconds: float
    """Logging between steps, and the end of the processes."""
    wall_seconds: float
    """While processes of the run existed."""
    idle_seconds: float
    """Between the end of one attempt and the start of the next; not part of `wall_seconds`."""
    lost_steps: int
    starts: int
    """Times that the processes were started."""

    @property
    def fraction(self) -> float | None:
        """Return the productive part of the wall time; None for a run without any."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    def facts(self) -> dict[str, Any]:
        """Return what run.json records."""
        return {"fraction": self.fraction, **asdict(self)}

    def describe(self) -> str:
        """Return one line: the goodput, and each other part of half a percent or more."""
        if self.fraction is None:
            return "goodput n/a"
        parts = {
            "start-up": self.startup_seconds,
            "checkpoints": self.checkpoint_seconds,
            "evaluation": self.evaluation_seconds,
            "restarts": self.restart_seconds,
            "lost steps": self.lost_seconds,
            "waiting": self.waiting_seconds,
            "other": self.other_seconds,
        }
        shares = {name: round(100 * seconds / self.wall_seconds) for name, seconds in parts.items()}
        rest = ", ".join(f"{name} {share} %" for name, share in shares.items() if share)
        return f"goodput {100 * self.fraction:.0f} % of {self.wall_seconds:.0f} s" + (f" ({rest})" if rest else "")


def read_goodput(folder: RunFolder) -> Goodput | None:
    """Return the goodput of a run folder; None for one without a timeline, or with damaged rows."""
    try:
        steps = read_steps(folder)
    except ToolkitError:
        return None
    timeline = read_timeline(folder.timeline)
    return measure_goodput(timeline, steps) if timeline else None


@dataclass(slots=True)
class _Process:
    """One start of rank 0."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By part; `train` is still to be divided."""
    resumed_step: int | None = None
    """None until it trains."""
    lost_seconds: float = 0.0
    ended_well: bool = False
    kept: list[list[StepRow]] = field(default_factory=list)
    """Rows of the steps that it trained and that were kept, all ranks."""

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


_PARTS = {
    "train": "train",
    "save": "checkpoint",
    "evaluate": "evaluation",
    "end": "other",
    STOPPED: "other",
    RESTART: "restart",
}


def measure_goodput(timeline: Sequence[Moment], steps: Sequence[list[StepRow]]) -> Goodput:
    """Divide the time of a timeline; `steps` are the rows of the steps that were kept, by step and rank."""
    processes, idle = _divide(timeline)
    for step in steps:
        trained = [one for one in processes if one.resumed_step is not None and one.resumed_step < step[0].step]
        if trained:
            trained[-1].kept.append(step)
    parts = dict.fromkeys(PARTS, 0.0)
    for process in processes:
        for part, seconds in _parts(process).items():
            parts[part] += seconds
    return Goodput(
        **{f"{part}_seconds": seconds for part, seconds in parts.items()},
        wall_seconds=math.fsum(parts.values()),
        idle_seconds=idle,
        lost_steps=sum(moment.lost_steps for moment in timeline),
        starts=sum(moment.phase == "start" for moment in timeline),
    )


def _divide(timeline: Sequence[Moment]) -> tuple[list[_Process], float]:
    """Return the processes with their seconds by part, and the idle seconds between attempts."""
    processes, idle = [_Process()], 0.0
    began = False
    for moment, following in pairwise([*timeline, *timeline[-1:]]):
        if moment.phase in ("start", LAUNCH) and began:
            processes.append(_Process())
        began = moment.phase != LAUNCH and (began or moment.phase == "start")
        process = processes[-1]
        _add_losses(processes, moment)
        if moment.phase == "train" and process.resumed_step is None:
            process.resumed_step = moment.step
        process.ended_well |= moment.phase in ("end", STOPPED)
        seconds = max(0.0, following.unix - moment.unix)
        if moment.phase == ENDED and not following.restarted:
            idle += seconds
            continue
        process.add(_part(moment, first=len(processes) == 1), seconds)
    return processes, idle


def _part(moment: Moment, *, first: bool) -> str:
    if moment.phase == ENDED:
        return "restart"
    return _PARTS.get(moment.phase, "startup" if first else "restart")


def _add_losses(processes: list[_Process], moment: Moment) -> None:
    """The launcher notes them when a process has ended; a new process notes those of the one before."""
    if moment.lost_seconds:
        earlier = processes if moment.phase == RESTART else processes[:-1] or processes
        owner = next((one for one in reversed(earlier) if one.resumed_step is not None), earlier[-1])
        owner.lost_seconds += moment.lost_seconds


def _parts(process: _Process) -> dict[str, float]:
    """Divide the time in which a process trained, and return all of its parts. None is more than what is left."""
    parts = {part: seconds for part, seconds in process.seconds.items() if part != "train"}
    left = process.seconds.get("train", 0.0)
    kept = min(left, math.fsum(step[0].seconds for step in process.kept))
    waiting = min(kept, math.fsum(map(waiting_seconds, process.kept)))
    lost = min(left - kept, process.lost_seconds)
    rest = left - kept - lost
    parts |= {"productive": kept - waiting, "waiting": waiting, "lost": lost + (0.0 if process.ended_well else rest)}
    parts["other"] = parts.get("other", 0.0) + (rest if process.ended_well else 0.0)
    return parts


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
