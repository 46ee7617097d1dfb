"""Profiles of some steps: a Chrome trace per rank, where the time of each step went, and a memory snapshot on CUDA.

On a GPU compute is the kernels and copies that are not NCCL's, communication the NCCL kernels. On a CPU compute is
torch's operators (`aten::`) on any thread, communication the time from the start of a collective to its end, as gloo
reports it. Data wait is fetching batches, as far as nothing else ran. Idle is the rest: Python, the engine's own code,
and waiting for another rank before a collective starts.

Intervals are (start, end); those of a trace are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from transformers import TrainerCallback

from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.timer import StepTimer

Interval = tuple[float, float]

DATA_WAIT_EVENT = "toolkit.data_wait"
STEP_EVENT_PREFIX = "ProfilerStep#"
COLLECTIVE_PREFIXES = ("gloo:", "nccl:", "c10d::", "record_param_comms", "deepspeed_shm_comm", "_c10d_functional::")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
PARTS = ("compute", "communication", "exposed_communication", "data_wait", "idle")
# Finer than a pixel of the report's timeline: closer intervals are joined, shorter ones left out.
TIMELINE_RESOLUTION = 1 / 500


class Profiler(TrainerCallback):  # type: ignore[misc]
    """Profiles optimizer steps `first` to `last` on every rank, and records their breakdown in run.json."""

    def __init__(self, run: ObservedRun, timer: StepTimer, *, first: int, last: int) -> None:
        self.run, self.timer, self.first, self.last = run, timer, first, last
        self.trace = run.folder.path / "profile" / f"rank{run.rank}.json.gz"
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        self.running: Any = None
        self.breakdown: dict[str, Any] = {"steps": [], "timeline": None}
        """This rank's profiled steps, and one of them as a timeline."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step + 1 == self.first:
            self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self.timer.profiled = False
        if self.running is not None:
            self.running.step()
            if state.global_step == self.last:
                self._stop()
        elif state.global_step + 1 == self.first:
            self._start()
        if self.running is not None:
            self.timer.profiled = True
        self.timer.restart_clock()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.running is not None:
            self._stop()
        ranks = self.run.gather(self.breakdown)
        rows = [{"rank": rank, **own} for rank, breakdown in enumerate(ranks) for own in breakdown["steps"]]
        timelines = [{"rank": rank, **own["timeline"]} for rank, own in enumerate(ranks) if own["timeline"]]
        if self.run.writes:
            print("\n".join(table_lines(rows)), flush=True)
            facts = {"first_step": self.first, "last_step": self.last, "steps": rows, "timeline": timelines}
            self.run.folder.update_run(profile=facts)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.timer.profiled = True
        self.running = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        self.running.start()
        self.timer.restart_clock()

    def _stop(self) -> None:
        self.running.stop()
        self.running.export_chrome_trace(str(self.trace))
        self.running = None
        trace = json.loads(gzip.decompress(self.trace.read_bytes()))
        intervals = TraceIntervals.from_events(trace["traceEvents"])
        epoch_seconds = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
        self.breakdown = {
            "steps": step_rows(intervals, first=self.first, last=self.last),
            "timeline": step_timeline(intervals, index=self.last - self.first, epoch_seconds=epoch_seconds),
        }


def table_lines(rows: list[dict[str, float]]) -> list[str]:
    """Return the log's table: milliseconds of each part, and its share of the step."""
    columns = ("step", *(part.replace("exposed_communication", "exposed") for part in PARTS))
    lines = ["profile (ms):  step  rank" + "".join(column.rjust(20) for column in columns)]
    for row in rows:
        step_seconds = row["step_seconds"]
        parts = [f"{1000 * row[f'{part}_seconds']:.1f} ({row[f'{part}_seconds'] / step_seconds:.0%})" for part in PARTS]
        fields = "".join(field.rjust(20) for field in (f"{1000 * step_seconds:.1f}", *parts))
        lines.append(f"               {row['step']:4.0f}  {row['rank']:4.0f}{fields}")
    return lines


class MemorySnapshot(TrainerCallback):  # type: ignore[misc]
    """Records CUDA's allocations of the whole training for https://pytorch.org/memory_viz."""

    def __init__(self, run: ObservedRun) -> None:
        self.path = run.folder.path / "profile" / f"memory_rank{run.rank}.pickle"

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)


# -- where the time of a step went


class TraceIntervals(NamedTuple):
    """The intervals of one rank's trace, by what happened in them."""

    steps: list[Interval]
    compute: list[Interval]
    communication: list[Interval]
    data_wait: list[Interval]

    @classmethod
    def from_events(cls, events: Iterable[dict[str, Any]]) -> TraceIntervals:
        """Read the complete events of a Chrome trace."""
        complete = [event for event in events if event.get("ph") == "X" and event.get("dur")]
        host = [event for event in complete if event.get("cat") != "gpu_user_annotation"]
        waits = [event for event in host if event["name"] == DATA_WAIT_EVENT]
        steps = sorted({_interval(event) for event in host if event["name"].startswith(STEP_EVENT_PREFIX)})
        return cls(steps, *_compute_and_communication(complete, waits), [_interval(event) for event in waits])

    def lanes(self) -> dict[str, list[Interval]]:
        """Return what a step is made of, by name."""
        return {name: getattr(self, name) for name in ("compute", "communication", "data_wait")}


def _compute_and_communication(
    events: list[dict[str, Any]], waits: list[dict[str, Any]]
) -> tuple[list[Interval], list[Interval]]:
    kernels = [event for event in events if event.get("cat") in GPU_CATEGORIES]
    if kernels:
        nccl = [event for event in kernels if "nccl" in event["name"].lower()]
        return [_interval(event) for event in kernels if event not in nccl], [_interval(event) for event in nccl]
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    loading_threads = {event["tid"] for event in waits}
    # Collating a batch uses operators too, and is part of the wait for it.
    other_threads = [_interval(event) for event in operators if event["tid"] not in loading_threads]
    same_threads = subtract(
        (_interval(event) for event in operators if event["tid"] in loading_threads), map(_interval, waits)
    )
    collectives = [_interval(event) for event in events if event["name"].startswith(COLLECTIVE_PREFIXES)]
    return [*other_threads, *same_threads], collectives


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def step_rows(trace: TraceIntervals, *, first: int, last: int) -> list[dict[str, float]]:
    """Return the breakdown of each profiled step, in seconds, by step number."""
    rows = []
    for number, step in zip(range(first, last + 1), trace.steps, strict=False):
        parts = step_parts(step, **trace.lanes())
        rows.append({"step": number} | {f"{part}_seconds": value / 1e6 for part, value in parts.items()})
    return rows


def step_parts(
    step: Interval, *, compute: Iterable[Interval], communication: Iterable[Interval], data_wait: Iterable[Interval]
) -> dict[str, float]:
    """Divide a step so that compute + exposed_communication + data_wait + idle = step.

    `communication` is all of it; what overlaps with compute is hidden, the rest is exposed.

    >>> parts = step_parts((0, 10), compute=[(0, 4)], communication=[(3, 6)], data_wait=[(6, 7)])
    >>> parts["communication"], parts["exposed_communication"], parts["idle"]
    (3, 2, 3)
    """
    computing, communicating, waiting = (clip(part, step) for part in (compute, communication, data_wait))
    exposed = subtract(communicating, computing)
    only_waiting = subtract(waiting, [*computing, *communicating])
    return {
        "step": step[1] - step[0],
        "compute": total_length(computing),
        "communication": total_length(communicating),
        "exposed_communication": total_length(exposed),
        "data_wait": total_length(only_waiting),
        "idle": step[1] - step[0] - total_length([*computing, *communicating, *only_waiting]),
    }


def step_timeline(trace: TraceIntervals, *, index: int, epoch_seconds: float) -> dict[str, Any] | None:
    """Return one profiled step, counted from 0, for a report to draw; None where the trace has no such step.

    `start_unix` is the start of the step, `seconds` its length, and `lanes` has intervals in seconds from its start.
    `epoch_seconds` is the Unix time of the trace's zero.
    """
    if len(trace.steps) <= index:  # the profiler opens one step more than it was asked for: the last one is empty
        return None
    step = trace.steps[index]
    lanes = {
        name: [(start - step[0], end - step[0]) for start, end in coarsen(intervals, step)]
        for name, intervals in trace.lanes().items()
    }
    return {
        "start_unix": epoch_seconds + step[0] / 1e6,
        "seconds": (step[1] - step[0]) / 1e6,
        "lanes": {name: [[round(at / 1e6, 7) for at in pair] for pair in pairs] for name, pairs in lanes.items()},
    }


def coarsen(intervals: Iterable[Interval], step: Interval) -> list[Interval]:
    """Return the intervals within the step at the resolution of a drawing.

    >>> coarsen([(0.0, 1.0), (1.001, 2.0), (5.0, 5.0001)], (0.0, 10.0))
    [(0.0, 2.0)]
    """
    finest = (step[1] - step[0]) * TIMELINE_RESOLUTION
    joined: list[Interval] = []
    for start, end in clip(intervals, step):
        if joined and start - joined[-1][1] < finest:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return [(start, end) for start, end in joined if end - start >= finest]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time in order and without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return the time of the first that is not in the second.

    >>> subtract([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    left: list[Interval] = []
    holes = union(removed)
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if end > start:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of the intervals within a window."""
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return union((start, end) for start, end in clipped if end > start)


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the time covered, counting overlaps once."""
    return sum(end - start for start, end in union(intervals))
