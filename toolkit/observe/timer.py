"""Time every step on every rank and add nothing to it: no collective, no wait for the GPU.

A step's clock runs from the end of the previous step (or of the logging, saving or evaluation in between) to its own
end, so data loading is inside and the rest is outside. On a GPU the clock is CUDA events, read once they are done.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from toolkit.hardware.gpus import Nvml
from toolkit.hardware.shared_gpu import sharing_ranks
from toolkit.observe.batches import BatchFacts
from toolkit.observe.failure_report import Diverged
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.parts import ObserverParts
from toolkit.observe.step_lines import StepLines
from toolkit.observe.verify.clipping import grad_norm_facts
from toolkit.record.heartbeat import peak_resident_bytes
from toolkit.record.measurements import GpuReading, MemoryByPhase, StepRow, drop_rows_after

SECONDS_BETWEEN_NVML_QUERIES = 1.0
# Of a log of one step: what the step's line shows, and what the schedule says.
IN_STEP_LINES = {"loss", "grad_norm", "learning_rate"}


class CompilerEvents(NamedTuple):
    """What torch's compiler has done in this process so far, or between two readings."""

    graphs: int  # graphs that were compiled; those of later readings are recompilations
    graph_breaks: Counter[str]
    """Places where a graph ends in the middle of a layer, by the first line of torch's reason."""
    guard_failures: Counter[str]  # why a graph that was compiled earlier did not fit

    @classmethod
    def read(cls) -> CompilerEvents:
        """Read torch's own counters."""
        from torch._dynamo.utils import counters, guard_failures

        def first_line(reason: Any) -> str:
            return str(reason).strip().partition("\n")[0].strip()

        return cls(
            graphs=counters["stats"]["unique_graphs"],
            graph_breaks=Counter({first_line(why): number for why, number in counters["graph_break"].items()}),
            guard_failures=Counter(first_line(why) for reasons in guard_failures.values() for why in reasons),
        )

    def since(self, earlier: CompilerEvents) -> CompilerEvents:
        return CompilerEvents(*map(operator.sub, self, earlier))

    def warning(self, *, step: int, rank: int) -> str | None:
        """Return the line to print if any of this happened in a timed step, with the reason; None if nothing did."""
        happened = [f"{self.graphs} graphs compiled"] * bool(self.graphs)
        happened += [f"{self.graph_breaks.total()} graph breaks"] * bool(self.graph_breaks)
        why = "".join(f": {reason}" for reason in [*self.graph_breaks, *self.guard_failures][:1])
        where = f"in step {step} on rank {rank}, which is timed{why}"
        return f"warning: {' and '.join(happened)} {where}" if happened else None


@dataclass(slots=True)
class _Step:
    batches: list[BatchFacts] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    grad_norm: Any = None  # before clipping, over all ranks
    memory: dict[str, Any] = field(default_factory=dict)
    profiled: bool = False
    start: Any = None
    own_work: list[Any] = field(default_factory=list)
    """Clock readings in turn: this rank starts to work on its own, starts to wait for others, and so on."""
    in_backward: bool = False
    data_waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Clock readings before and after the batches of the step were made."""
    end: Any = None
    cpu_seconds: float = 0.0
    compiler: CompilerEvents | None = None
    """Until the step is finished, the compiler's events before it; then those of the step. None if nothing compiles."""


class StepTimer:
    """Writes one row per step to `ranks/rankR.jsonl`, from which rank 0 prints progress.

    If `stops_if_diverged`, a loss or a gradient norm that is not finite ends the run.
    """

    def __init__(
        self,
        run: ObservedRun,
        parts: ObserverParts,
        *,
        device: torch.device,
        untimed_steps: int = 0,
        stops_if_diverged: bool = True,
    ) -> None:
        self.run, self.parts, self.progress = run, parts, run.progress
        self.path, self.rank, self.resumed_step = run.folder.rank_rows(run.rank), run.rank, run.resumed_step
        self.untimed_steps, self.stops_if_diverged = untimed_steps, stops_if_diverged
        self.step_lines = StepLines(run)
        self.timed_seconds: list[float] = []
        """Seconds of this rank's timed steps, as far as the device has finished them."""
        self.scales_loss = False
        """True under fp16, which skips a step whose gradient overflowed and lowers its loss scale: no divergence."""
        self.profiled = False
        """True while the step in progress is profiled: its row says so, and it is not timed."""
        self.cuda = device.type == "cuda"
        self.nvml = Nvml(str(torch.cuda.get_device_properties(device).uuid)) if self.cuda else None
        self.driver_bytes: int | None = None
        self.queried_at = -math.inf
        self.step = _Step()
        self.unwritten: deque[tuple[int, _Step]] = deque()
        """Finished steps, by number, whose device work may still be running."""
        self.first_batches: list[str] = []
        """Digests of the batches of this rank's first optimizer step."""

    # -- what is reported within a step

    def add_batch(self, facts: BatchFacts | None) -> None:
        """Add the batch of one accumulation step, as the collator counted it."""
        if facts is not None:
            self.step.batches.append(facts)
            if self.progress.step == self.resumed_step:
                self.first_batches.append(facts.sha256)

    def add_loss(self, loss: torch.Tensor) -> None:
        self.step.losses.append(loss)

    def begin_data(self) -> None:
        """Note that this rank asks for the batches of the step."""
        self.step.data_waits.append((self._now(), None))

    def end_data(self) -> None:
        if self.step.data_waits and self.step.data_waits[-1][1] is None:
            self.step.data_waits[-1] = (self.step.data_waits[-1][0], self._now())

    def enter_backward(self) -> None:
        """Note that backward begins: from here on ranks wait for each other's gradients."""
        self.progress.record_memory("forward")
        self.begin_wait()
        self.step.in_backward = True

    def begin_wait(self) -> None:
        """Note that this rank waits for others until `end_wait`; a wait within a wait changes nothing."""
        if len(self.step.own_work) % 2 == 1:
            self.step.own_work.append(self._now())

    def end_wait(self) -> None:
        """Note that the wait is over. The wait that began with backward ends only before the optimizer step."""
        if len(self.step.own_work) % 2 == 0 and not self.step.in_backward:
            self.step.own_work.append(self._now())

    def restart_clock(self) -> None:
        """Start the step in progress now; what came before is not part of its time."""
        self.step.start, self.step.cpu_seconds = self._now(), time.process_time()
        self.step.own_work = [self.step.start]
        self.step.data_waits.clear()
        self.step.compiler = CompilerEvents.read() if self.parts.compiles else None

    # -- the ends of steps

    def begin_training(self, step: int) -> None:
        """Start the clock of the first step after `step`."""
        self.step = _Step()  # a try of `auto_find_batch_size` may have left one, and rows, which stay
        self.first_batches.clear()
        if self.progress.step > step:
            tries = len(list(self.path.parent.glob(f"try*-{self.path.name}")))
            self.flush(wait=True)
            if self.path.exists():
                self.path.rename(self.path.with_name(f"try{tries + 1}-{self.path.name}"))
        self.resumed_step = self.progress.step = step
        self.progress.memory_by_phase = MemoryByPhase(bytes_of="allocated" if self.cuda else "rss")
        self.progress.record_memory("load")
        self.step_lines.start(step)
        self.restart_clock()

    def before_optimizer_step(self) -> None:
        """Note that gradients are reduced and clipped."""
        self.step.in_backward = False
        self.end_wait()

    def end_step(self, number: int, *, is_saved: bool = False) -> None:
        """Finish a step, and begin the next one; a step that diverged is not saved."""
        finished, self.step = self.step, _Step()
        finished.profiled = self.profiled
        self.restart_clock()  # here, so that the cost of the timer itself is part of the next step
        finished.end, finished.memory = self.step.start, self.read_memory()
        finished.cpu_seconds = self.step.cpu_seconds - finished.cpu_seconds
        if self.step.compiler is not None and finished.compiler is not None:
            finished.compiler = self.step.compiler.since(finished.compiler)
        if number == self.resumed_step + 1:
            self.progress.record_memory("step")
            if self.progress.memory_by_phase is not None:
                finished.memory["memory_by_phase"] = self.progress.memory_by_phase
            self.run.begin_training()
            if dropped := drop_rows_after(self.path, self.resumed_step):  # their steps were trained again
                seconds = math.fsum(row.get("seconds", 0.0) for row in dropped)
                self.progress.note(self.progress.phase, lost_steps=len(dropped), lost_seconds=seconds)
        self.progress.step = number
        self.unwritten.append((number, finished))
        self.flush(wait=is_saved)

    def print_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Print the Trainer's logged means over all ranks, without its own speeds, which count untimed steps."""
        shown = {name: value for name, value in logs.items() if name not in ("epoch", "total_flos")}
        if self.step_lines.every_step and self.step_lines.thread is not None:
            shown = {name: value for name, value in shown.items() if name not in IN_STEP_LINES}
        if shown and not shown.keys() & {"train_runtime", "eval_loss"}:
            words = "  ".join(f"{name} {value:.6g}" for name, value in shown.items() if isinstance(value, (int, float)))
            print(f"log at step {step}, all ranks: {words}", flush=True)

    def end_training(self) -> None:
        """Write what is left, and the last line."""
        self.flush(wait=True)
        self.step_lines.end()

    # -- rows

    def flush(self, *, wait: bool) -> None:
        """Write the rows of the steps that the device has finished; with `wait`, of all finished steps.

        Raises Diverged where a loss or a gradient norm is not finite.
        """
        while self.unwritten and (wait or not self.cuda or self.unwritten[0][1].end.query()):
            number, step = self.unwritten.popleft()
            row = self._row(number, step)
            if number - self.resumed_step > self.untimed_steps and not step.profiled:
                self.timed_seconds.append(row.seconds)
                if step.compiler and (warning := step.compiler.warning(step=number, rank=self.rank)):
                    print(warning, flush=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(row.to_line())
            self._after_row(row, step)

    def _after_row(self, row: StepRow, step: _Step) -> None:
        """End the run on a loss or gradient norm that is not finite: the weights are lost from here on."""
        norms = {} if self.scales_loss else {"gradient norm": row.grad_norm or row.local_grad_norm}
        for name, value in ({"loss": row.loss} | norms).items():
            if self.stops_if_diverged and value is not None and not math.isfinite(value):
                rows = tuple(number for facts in step.batches for number in facts.rows)
                message = f"the {name} is {value} at step {row.step}"
                raise Diverged(message, hint="lower `--learning_rate`", rows=rows)

    def read_memory(self) -> dict[str, Any]:
        """Return the memory columns: peaks since the process began, in bytes. On a CPU all but the host's are None."""
        gpu_reading, now = None, time.monotonic()
        if self.nvml is not None and now - self.queried_at >= SECONDS_BETWEEN_NVML_QUERIES:
            self.queried_at, self.driver_bytes = now, self.nvml.process_bytes(os.getpid())
            energy, throttles = self.nvml.energy_joules(), self.nvml.throttle_reasons()
            gpu_reading = GpuReading(monotonic_seconds=now, energy_joules=energy, throttle_reasons=throttles)
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.cuda else None,
            "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.cuda else None,
            "driver_bytes": self.driver_bytes,
            "gpu_reading": gpu_reading,
            "peak_host_bytes": peak_resident_bytes(),
        }

    def _row(self, number: int, step: _Step) -> StepRow:
        def tokens(name: str) -> int | None:  # None where a batch does not show it
            counts = [getattr(facts, name) for facts in step.batches if self.parts.counts_tokens]
            return None if None in counts or not step.batches else sum(counts)

        turns, more = [*step.own_work, step.end], dict(step.memory)
        own_seconds = math.fsum(map(self._seconds, turns[::2], turns[1::2]))
        if step.profiled:
            more["profiled"] = True
        if step.compiler is not None:
            more["compiled_graphs"] = step.compiler.graphs
            more["graph_breaks"] = step.compiler.graph_breaks.total()
        return StepRow(
            step=number,
            step_of_process=number - self.resumed_step,
            rank=self.rank,
            world_size=None if self.run.single_process else self.run.world_size,
            preset=self.run.preset,
            ranks_per_gpu=sharing_ranks(),
            seconds=self._seconds(step.start, step.end),
            own_seconds=own_seconds if len(turns) > 2 else None,  # unknown where backward was never reported
            data_seconds=math.fsum(self._seconds(*wait) for wait in step.data_waits if wait[1] is not None),
            cpu_seconds=step.cpu_seconds,
            tokens=tokens("tokens"),
            non_padding_tokens=tokens("non_padding_tokens"),
            supervised_tokens=tokens("supervised_tokens"),
            loss=math.fsum(loss.item() for loss in step.losses) if step.losses else None,
            batch_sha256="+".join(facts.sha256[:16] for facts in step.batches),
            **grad_norm_facts(step.grad_norm),
            **more,
        )

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


def time_waits_in_forward(model: Any, timer: StepTimer) -> list[Callable[[], None]]:
    """Report to the timer where forward waits for other ranks; return what removes the hooks.

    DDP waits for rank 0's buffers; each module that FSDP2 shards waits for the other ranks' shards.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        waits = [(model, model.module)]
    else:
        waits = [(module, module) for module in model.modules() if isinstance(module, FSDPModule)]

    def hook(note: Callable[[], None]) -> Any:
        # the compiler would trace a hook of a compiled layer, and break its graph at the clock
        return torch.compiler.disable(lambda *_: note()) if timer.parts.compiles else lambda *_: note()

    hooks = [before.register_forward_pre_hook(hook(timer.begin_wait), prepend=True) for before, _ in waits]
    hooks += [after.register_forward_pre_hook(hook(timer.end_wait)) for _, after in waits]
    return [each.remove for each in hooks]
