"""Profiles of some steps: a Chrome trace per rank and a breakdown of each step; a memory snapshot on CUDA."""

from __future__ import annotations

import gzip
import json
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from transformers import TrainerCallback

from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.step_breakdown import PARTS, TraceIntervals, step_rows, step_timeline
from toolkit.observe.timer import StepTimer


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
