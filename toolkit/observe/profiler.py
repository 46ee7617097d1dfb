"""Profiles of some steps: a Chrome trace per rank, where the time of each step went, and a memory snapshot on CUDA.

On a GPU compute is the kernels and copies that are not NCCL's, communication the NCCL kernels. On a CPU compute is
torch's operators (`aten::`) on any thread, communication the time from the start of a collective to its end, as gloo
reports it. Data wait is fetching batches, as far as nothing else ran. Idle is the rest: Python, the engine's own code,
and waiting for another rank before a collective starts.

Intervals are (start, end); those of a trace are in microseconds.
"""

import gzip
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from transformers import TrainerCallback

from toolkit.engines.compiled_ops import SHARED_MEMORY_OP
from toolkit.observe.observed_run import ObservedRun, gather_from_ranks
from toolkit.observe.timer import StepTimer

Interval = tuple[float, float]
Lanes = dict[str, list[Interval]]  # what a step is made of: `compute`, `communication` and `data_wait`

DATA_WAIT_EVENT = "toolkit.data_wait"
STEP_EVENT_PREFIX = "ProfilerStep#"
COLLECTIVE_PREFIXES = ("gloo:", "nccl:", "c10d::", "record_param_comms", SHARED_MEMORY_OP, "_c10d_functional::")
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
        if state.global_step + 1 == self.first:
            self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.running is not None:
            self.running.step()
            if state.global_step == self.last:
                self._stop()
        elif state.global_step + 1 == self.first:
            self._start()
        self.timer.profiled = self.running is not None
        self.timer.restart_clock()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.running is not None:
            self._stop()
        ranks = gather_from_ranks(self.breakdown, single_process=self.run.single_process)
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
        steps, lanes = read_trace(trace["traceEvents"])
        profiled = dict(zip(range(self.first, self.last + 1), steps, strict=False))  # torch adds an empty last step
        self.breakdown["steps"] = [
            {"step": number} | {f"{part}_seconds": value / 1e6 for part, value in step_parts(step, lanes).items()}
            for number, step in profiled.items()
        ]
        if self.last in profiled:
            epoch_seconds = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
            self.breakdown["timeline"] = step_timeline(profiled[self.last], lanes, epoch_seconds=epoch_seconds)


def table_lines(rows: list[dict[str, float]]) -> list[str]:
    """Return the log's table: milliseconds of each part, and its share of the step."""
    columns = ("step", "compute", "communication", "exposed", "data_wait", "idle")
    lines = ["profile (ms):  step  rank" + "".join(column.rjust(20) for column in columns)]
    for row in rows:
        seconds, whole = [row[f"{part}_seconds"] for part in PARTS], row["step_seconds"]
        parts = [f"{1000 * each:.1f} ({each / whole:.0%})" for each in seconds]
        fields = "".join(field.rjust(20) for field in (f"{1000 * whole:.1f}", *parts))
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


def read_trace(events: Iterable[dict[str, Any]]) -> tuple[list[Interval], Lanes]:
    """Return the steps of a Chrome trace, and what they are made of."""
    complete = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    host = [event for event in complete if event.get("cat") != "gpu_user_annotation"]
    waits = [(event["tid"], _interval(event)) for event in host if event["name"] == DATA_WAIT_EVENT]
    steps = sorted({_interval(event) for event in host if event["name"].startswith(STEP_EVENT_PREFIX)})
    if kernels := [event for event in complete if event.get("cat") in GPU_CATEGORIES]:
        communication = [event for event in kernels if "nccl" in event["name"].lower()]
        compute = [event for event in kernels if "nccl" not in event["name"].lower()]
    else:
        communication = [event for event in complete if event["name"].startswith(COLLECTIVE_PREFIXES)]
        operators = [each for each in complete if each.get("cat") == "cpu_op" and each["name"].startswith("aten::")]
        # collating a batch uses operators too, and is part of the wait for it
        compute = [
            each
            for each in operators
            if not any(tid == each["tid"] and start <= each["ts"] < end for tid, (start, end) in waits)
        ]
    lanes = {"compute": list(map(_interval, compute)), "communication": list(map(_interval, communication))}
    return steps, lanes | {"data_wait": [wait for _, wait in waits]}


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def step_parts(step: Interval, lanes: Lanes) -> dict[str, float]:
    """Divide a step so that compute + exposed_communication + data_wait + idle = step.

    `communication` is all of it; what overlaps with compute is hidden, the rest is exposed.

    >>> parts = step_parts((0, 10), {"compute": [(0, 4)], "communication": [(3, 6)], "data_wait": [(6, 7)]})
    >>> parts["communication"], parts["exposed_communication"], parts["idle"]
    (3, 2, 3)
    """

    def covered(*names: str) -> float:
        return sum(end - start for start, end in clip((each for name in names for each in lanes[name]), step))

    compute, working, busy, whole = (
        covered("compute"),
        covered("compute", "communication"),
        covered(*lanes),
        step[1] - step[0],
    )
    return {
        "step": whole,
        "compute": compute,
        "communication": covered("communication"),
        "exposed_communication": working - compute,
        "data_wait": busy - working,
        "idle": whole - busy,
    }


def step_timeline(step: Interval, lanes: Lanes, *, epoch_seconds: float) -> dict[str, Any]:
    """Return one profiled step for a report to draw.

    `start_unix` is the start of the step, `seconds` its length, and `lanes` has intervals in seconds from its start, at
    the resolution of a drawing. `epoch_seconds` is the Unix time of the trace's zero.
    """
    finest = (step[1] - step[0]) * TIMELINE_RESOLUTION

    def drawn(intervals: Iterable[Interval]) -> list[list[float]]:
        joined = clip(intervals, step, gap=finest)
        return [[round((at - step[0]) / 1e6, 7) for at in pair] for pair in joined if pair[1] - pair[0] >= finest]

    return {
        "start_unix": epoch_seconds + step[0] / 1e6,
        "seconds": (step[1] - step[0]) / 1e6,
        "lanes": {name: drawn(intervals) for name, intervals in lanes.items()},
    }


def clip(intervals: Iterable[Interval], window: Interval, *, gap: float = 0.0) -> list[Interval]:
    """Return the time of the intervals within a window, in order and without overlaps; those closer than `gap` joined.

    >>> clip([(3, 4), (0, 2), (1, 3), (6, 9)], (1, 8)), clip([(0, 1), (2, 3)], (0, 8), gap=2)
    ([(1, 4), (6, 8)], [(0, 3)])
    """
    joined: list[Interval] = []
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    for start, end in sorted(pair for pair in clipped if pair[1] > pair[0]):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
