"""Measure every step on every rank, and add nothing to it: no collective, no wait for the GPU.

A step's clock runs from the end of the step before (or of what was logged, saved or evaluated between) to its own
end, so data loading is inside and the rest is outside. On a GPU the clock is CUDA events, read when they are done.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from toolkit.runs.folder import write_text
from toolkit.runs.steps import read_rows
from toolkit.train.batches import BatchFacts
from toolkit.train.failure import Diverged, Progress
from toolkit.train.ladder import Ladder
from toolkit.train.sensors import Sensors


@dataclass(slots=True)
class _Step:
    """One optimizer step under way: what its batches hold, and the losses that are still on the device."""

    facts: list[BatchFacts] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    grad_norm: Any = None
    memory: dict[str, Any] = field(default_factory=dict)
    profiled: bool = False
    start: Any = None
    own: list[Any] = field(default_factory=list)
    """When this rank began to work by itself, when it began to wait for others, and so on in turns."""
    in_backward: bool = False
    end: Any = None
    cpu_seconds: float = 0.0


class Meter(TrainerCallback):  # type: ignore[misc]
    """Writes one row a step to `ranks/rankR.jsonl`, and prints progress on rank 0."""

    def __init__(
        self, path: Path, *, rank: int, device: torch.device, progress: Progress, resumed_step: int = 0
    ) -> None:
        self.path, self.rank, self.progress = path, rank, progress
        self.max_steps = 0
        self.untimed_steps = 0
        self.timed_seconds: list[float] = []
        """This rank's timed steps so far, as far as the device has finished them."""
        self.scaled = False
        """fp16 skips a step whose gradient overflowed, and lowers its loss scale: no divergence."""
        self.profiled = False
        """Whether the step under way is profiled: its row says so, and it is not timed."""
        self.cuda = device.type == "cuda"
        self.sensors = Sensors(device)
        self.step = _Step()
        self.waiting: deque[tuple[int, _Step]] = deque()
        self.printed_at = 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.resumed_step = resumed_step
        keep_rows(self.path, up_to=resumed_step)

    def add_batch(self, facts: BatchFacts | None) -> None:
        """One micro-step's batch, as the collator counted it."""
        if facts is not None:
            self.step.facts.append(facts)

    def add_loss(self, loss: torch.Tensor) -> None:
        """One micro-step's loss; stays on its device."""
        self.step.losses.append(loss)

    def add_grad_norm(self, grad_norm: Any) -> None:
        """The gradient norm before clipping, over all ranks."""
        self.step.grad_norm = grad_norm

    def enter_backward(self) -> None:
        """The first micro-step's forward has been asked for: from here on ranks wait for each other's gradients."""
        self.wait()
        self.step.in_backward = True

    def wait(self) -> None:
        """What follows is no work of this rank by itself, until `go_on`."""
        if len(self.step.own) % 2 == 1:
            self.step.own.append(self._now())

    def go_on(self) -> None:
        """The wait for other ranks is over; the one that begins with backward ends with the last one."""
        if len(self.step.own) % 2 == 0 and not self.step.in_backward:
            self.step.own.append(self._now())

    def restart_clock(self) -> None:
        """Begin a step's time now: what came before is not part of it."""
        self.step.start, self.step.cpu_seconds = self._now(), time.process_time()
        self.step.own = [self.step.start]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.progress.ladder = Ladder(on_gpu=self.cuda)
        self.progress.ladder.climb("load")
        self.restart_clock()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.step.in_backward = False  # gradients are added up and clipped
        self.go_on()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.scaled = bool(args.fp16)
        self.max_steps = state.max_steps  # known once the Trainer has counted the batches
        finished, self.step = self.step, _Step()
        finished.profiled = self.profiled
        self.restart_clock()  # here, so that what the meter itself costs is part of the next step
        finished.end, finished.memory = self.step.start, self.sensors.read()
        finished.cpu_seconds = self.step.cpu_seconds - finished.cpu_seconds
        if state.global_step == self.resumed_step + 1 and self.progress.ladder is not None:
            self.progress.ladder.climb("step")
            finished.memory["memory_ladder"] = self.progress.ladder.facts()
        self.progress.step = state.global_step
        self.waiting.append((state.global_step, finished))
        self.flush(wait=control.should_save)  # a step that diverged is not saved

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """What the Trainer logs, means over all ranks; its own speeds, which count untimed steps, are left out."""
        del args, control
        shown = {name: value for name, value in (logs or {}).items() if name not in ("epoch", "total_flos")}
        if state.is_world_process_zero and not shown.keys() & {"train_runtime", "eval_loss"}:
            words = "  ".join(f"{name} {value:.6g}" for name, value in shown.items() if isinstance(value, (int, float)))
            print(f"log at step {state.global_step}, all ranks: {words}", flush=True)
        self.restart_clock()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.restart_clock()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.restart_clock()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.flush(wait=True)

    def flush(self, *, wait: bool) -> None:
        """Write the rows of the steps that the device has finished; all of them with `wait`."""
        while self.waiting and (wait or not self.cuda or self.waiting[0][1].end.query()):
            number, step = self.waiting.popleft()
            row = self._row(number, step)
            if row["step_of_process"] > self.untimed_steps and not step.profiled:
                self.timed_seconds.append(row["seconds"])
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._print(row)
            self._check_finite(row, step)

    def _check_finite(self, row: dict[str, Any], step: _Step) -> None:
        """Refuse to go on with a loss or a gradient that is no number: the weights are lost from here on."""
        norms = {} if self.scaled else {"gradient norm": row["grad_norm"] or row["local_grad_norm"]}
        for name, value in ({"loss": row["loss"]} | norms).items():
            if value is not None and not math.isfinite(value):
                rows = tuple(number for facts in step.facts for number in facts.rows)
                raise Diverged(
                    f"the {name} is {value} at step {row['step']}", hint="lower `--learning_rate`", rows=rows
                )

    def _row(self, number: int, step: _Step) -> dict[str, Any]:
        return {
            "step": number,
            "step_of_process": number - self.resumed_step,
            "rank": self.rank,
            "seconds": self._seconds(step.start, step.end),
            "own_seconds": self._own_seconds(step),
            "cpu_seconds": step.cpu_seconds,
            "tokens": sum(facts.tokens for facts in step.facts),
            "non_padding_tokens": sum(facts.non_padding_tokens for facts in step.facts),
            "supervised_tokens": sum(facts.supervised_tokens for facts in step.facts),
            "loss": math.fsum(loss.item() for loss in step.losses),
            **grad_norm_facts(step.grad_norm),
            "batch_sha256": "+".join(facts.sha256[:16] for facts in step.facts),
            **step.memory,
            **({"profiled": True} if step.profiled else {}),
        }

    def _own_seconds(self, step: _Step) -> float | None:
        """Of the turns that this rank worked by itself; None of a step that never told of its backward."""
        turns = [*step.own, step.end]
        return math.fsum(map(self._seconds, turns[::2], turns[1::2])) if len(turns) > 2 else None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if not self.cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def _print(self, row: dict[str, Any]) -> None:
        """Rank 0, at most one line a second, and always the last step."""
        now = time.monotonic()
        if self.rank != 0 or (now - self.printed_at < 1 and row["step"] < self.max_steps):
            return
        self.printed_at = now
        norm = "" if row["grad_norm"] is None else f"  grad_norm {row['grad_norm']:.3f}"
        speed = row["tokens"] / row["seconds"]
        print(
            f"step {row['step']}/{self.max_steps}{norm}  on rank 0: loss {row['loss']:.4f}"
            f"  {row['seconds']:.2f} s  {speed:,.0f} tokens/s",
            flush=True,
        )


def watch_waits(model: Any, meter: Meter) -> None:
    """In forward, DDP waits for the buffers of rank 0, and each module that FSDP2 shards for the others' shards."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        waits = [(model, model.module)]
    else:
        waits = [(module, module) for module in model.modules() if isinstance(module, FSDPModule)]
    for before, after in waits:
        before.register_forward_pre_hook(lambda *_: meter.wait(), prepend=True)
        after.register_forward_pre_hook(lambda *_: meter.go_on())


def keep_rows(path: Path, *, up_to: int) -> None:
    """Rows of a run that is resumed, as far as its checkpoint; what came after it is trained again."""
    kept = [row for row in read_rows(path) if row["step"] <= up_to] if path.exists() else []
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def grad_norm_facts(grad_norm: Any) -> dict[str, float | int | None]:
    """The norm over all ranks; under FSDP2 this rank's share of it, which readers combine.

    Asking a sharded norm for its value would add a collective to every step.
    """
    facts: dict[str, float | int | None] = {"grad_norm": None, "local_grad_norm": None, "grad_norm_ranks": None}
    if grad_norm is None:
        return facts
    if hasattr(grad_norm, "to_local"):
        shared_by = [grad_norm.device_mesh.size(dim) for dim, p in enumerate(grad_norm.placements) if p.is_partial()]
        if shared_by:
            own = float(grad_norm.to_local().item())
            return facts | {"local_grad_norm": own, "grad_norm_ranks": math.prod(shared_by)}
        grad_norm = grad_norm.to_local()
    return facts | {"grad_norm": float(grad_norm.item() if hasattr(grad_norm, "item") else grad_norm)}
