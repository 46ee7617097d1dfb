"""`--profile_steps A:B`: a Chrome trace a rank and where each step's time went; `--memory_snapshot` on CUDA.

Read from the trace's own events. On a GPU compute is the kernels and copies that are not NCCL's, communication the
NCCL kernels. On a CPU compute is torch's operators (`aten::`) on any thread, communication the time from the start of
a collective to its end, as gloo says it. Data wait is fetching batches, as far as nothing else ran. Idle is the rest:
Python, the engine's own code, and waiting for another rank before a collective starts.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from toolkit.runs.switches import profiled_steps
from toolkit.train.intervals import Interval, step_parts, without
from toolkit.train.timeline import rank_timeline

DATA_WAIT = "toolkit.data_wait"
STEP = "ProfilerStep#"
COLLECTIVES = ("gloo:", "nccl:", "c10d::", "record_param_comms", "deepspeed_shm_comm", "_c10d_functional::")
PARTS = ("compute", "communication", "exposed_communication", "data_wait", "idle")


class Profiler(TrainerCallback):  # type: ignore[misc]
    """Profiles optimizer steps A to B on every rank."""

    def __init__(self, trainer: Any, steps: str, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.first, self.last = profiled_steps(steps)
        self.running: Any = None
        self.own: dict[str, Any] = {"steps": [], "timeline": None}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def trace(self) -> Path:
        return self.folder / f"rank{self.trainer.args.process_index}.json.gz"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step + 1 == self.first:
            self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self.trainer.meter.profiled = False
        if self.running is not None:
            self.running.step()
            if state.global_step == self.last:
                self._stop()
        elif state.global_step + 1 == self.first:
            self._start()
        if self.running is not None:
            self.trainer.meter.profiled = True
        self.trainer.meter.restart_clock()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.running is not None:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.trainer.meter.profiled = True
        self.running = profile(activities=activities, schedule=lambda _: torch.profiler.ProfilerAction.RECORD)
        self.running.start()
        self.trainer.meter.restart_clock()

    def _stop(self) -> None:
        self.running.stop()
        self.running.export_chrome_trace(str(self.trace))
        self.running = None
        trace = json.loads(gzip.decompress(self.trace.read_bytes()))
        spans = Spans.of(trace["traceEvents"])
        self.own = {
            "steps": step_tables(spans, first=self.first, last=self.last),
            "timeline": timeline(trace, spans, number=self.last - self.first),
        }

    def tables(self) -> dict[str, Any]:
        """Every rank's steps; every rank must call it. Rank 0 prints the table."""
        ranks: list[Any] = [self.own]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self.own)
        rows = [{"rank": rank, **row} for rank, own in enumerate(ranks) for row in own["steps"]]
        drawn = [{"rank": rank, **own["timeline"]} for rank, own in enumerate(ranks) if own["timeline"]]
        if self.trainer.args.process_index == 0:
            print("\n".join(table_lines(rows)), flush=True)
        return {"first_step": self.first, "last_step": self.last, "steps": rows, "timeline": drawn}


class Spans(NamedTuple):
    """A Chrome trace's spans (microseconds) by what they say."""

    steps: list[Interval]
    compute: list[Interval]
    communication: list[Interval]
    data_wait: list[Interval]

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Spans:
        spans = [event for event in events if event.get("ph") == "X" and event.get("dur")]
        host = [event for event in spans if event.get("cat") != "gpu_user_annotation"]
        waits = [event for event in host if event["name"] == DATA_WAIT]
        steps = sorted({interval(event) for event in host if event["name"].startswith(STEP)})
        return cls(steps, *device_time(spans, waits), [interval(event) for event in waits])

    def lanes(self) -> dict[str, list[Interval]]:
        return {name: getattr(self, name) for name in ("compute", "communication", "data_wait")}


def step_tables(spans: Spans, *, first: int, last: int) -> list[dict[str, float]]:
    """One row a step, in seconds."""
    rows = []
    for number, step in zip(range(first, last + 1), spans.steps, strict=False):
        parts = step_parts(step, **spans.lanes())
        rows.append({"step": number} | {f"{part}_seconds": value / 1e6 for part, value in parts.items()})
    return rows


def timeline(trace: dict[str, Any], spans: Spans, *, number: int) -> dict[str, Any] | None:
    """One profiled step, counted from 0, as a picture; the trace counts from its own base time.

    The profiler opens one more step than it was asked for: the last one is empty.
    """
    if len(spans.steps) <= number:
        return None
    epoch = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    return rank_timeline(spans.steps[number], spans.lanes(), epoch_seconds=epoch)


def device_time(spans: list[dict[str, Any]], waits: list[dict[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """When the device computed, and when it communicated."""
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        sent = [e for e in kernels if "nccl" in e["name"].lower()]
        return [interval(e) for e in kernels if e not in sent], [interval(e) for e in sent]
    operators = [e for e in spans if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
    fetching = {e["tid"] for e in waits}
    # collating a batch uses operators too, and is part of the wait for it
    beside = [interval(e) for e in operators if e["tid"] not in fetching]
    within_thread = without((interval(e) for e in operators if e["tid"] in fetching), map(interval, waits))
    return [*beside, *within_thread], [interval(e) for e in spans if e["name"].startswith(COLLECTIVES)]


def interval(event: dict[str, Any]) -> Interval:
    """Start and end of a trace's event."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def table_lines(rows: list[dict[str, float]]) -> list[str]:
    """The table for the log: milliseconds, and the share of the step."""
    lines = [
        "profile (ms):  step  rank"
        + "".join(part.replace("exposed_communication", "exposed").rjust(20) for part in ("step", *PARTS))
    ]
    for row in rows:
        whole = row["step_seconds"]
        cells = [f"{1000 * whole:.1f}".rjust(20)]
        cells += [
            f"{1000 * row[f'{part}_seconds']:.1f} ({row[f'{part}_seconds'] / whole:.0%})".rjust(20) for part in PARTS
        ]
        lines.append(f"               {row['step']:4.0f}  {row['rank']:4.0f}" + "".join(cells))
    return lines


class MemorySnapshot(TrainerCallback):  # type: ignore[misc]
    """CUDA's allocations of the whole training, as https://pytorch.org/memory_viz reads them."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.path = folder / f"memory_rank{rank}.pickle"

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)
