"""`toolkit plan --verify`: each plan beside a rehearsal of the same rank, part by part.

    for checked in check_plans(MODEL, rows, job, cpu=True, say=print): ...

On a GPU the rehearsal is real and gives the allocator's peaks. Without one, FSDP2 and DDP are traced on fake tensors,
which gives each phase's peak by part; DeepSpeed and offloading are rehearsed on the CPU in the plan's precision, which
gives the model states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.container import memory_limit_bytes
from toolkit.hardware.machine import host_memory_bytes
from toolkit.launch.rehearsable import cannot_trace
from toolkit.launch.rehearse import Rehearsal, plan_rehearsal, rehearse_once
from toolkit.plan.job import OPTIMIZERS, Job
from toolkit.presets import load_preset
from toolkit.runs.side_by_side import Difference, side_by_side
from toolkit.units import NOT_AVAILABLE, gib

Row = Mapping[str, Any]
# The fp32 weights as they are loaded, and the engine's own copy of them, beside what the plan counts.
LOADING_BYTES_PER_PARAMETER = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One plan and what a rehearsal found; `why_not` where there is none."""

    preset: str
    world_size: int
    rehearsed_on: str | None = None
    """`cuda`, `cpu` or `fake tensors`."""
    parts: tuple[Difference, ...] = ()
    why_not: str | None = None
    failed: bool = False
    """A rehearsal was started and did not end well."""

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        names = ("preset", "world_size", "rehearsed_on", "why_not")
        return {name: getattr(self, name) for name in names} | {"parts": [part.as_row() for part in self.parts]}

    def lines(self) -> list[str]:
        """For people."""
        head = f"{self.preset}, {self.world_size} processes, rank 0"
        if self.why_not is not None:
            return [f"{head}: not rehearsed: {self.why_not}"]
        return [f"{head}, rehearsed on {self.rehearsed_on}:", *_table(self.parts)]


def _table(parts: Sequence[Difference]) -> list[str]:
    rows = [("", "planned", "rehearsed", "difference"), *((part.part, *_cells(part)) for part in parts)]
    left, *widths = (max(len(row[column]) for row in rows) for column in range(4))
    return [
        f"  {label:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, *cells in rows
    ]


def _cells(part: Difference) -> tuple[str, str, str]:
    share = NOT_AVAILABLE if part.difference is None else f"{part.difference:+.1%}"
    return gib(part.planned_bytes), gib(part.rehearsed_bytes), share


def check_plans(
    model: str, rows: Sequence[Row], job: Job, *, cpu: bool, say: Callable[[str], None]
) -> Iterator[Checked]:
    """One after the other, since a rehearsal takes seconds to minutes."""
    for row in rows:
        named: dict[str, Any] = {"preset": row["preset"], "world_size": row["world_size"]}
        try:
            rehearsal = rehearsal_of(model, row, job, cpu=cpu)
        except ToolkitError as error:
            yield Checked(**named, why_not=error.message)
            continue
        say(f"rehearsing {row['preset']}, rank 0 of {row['world_size']}")
        yield Checked(**named, **_found(rehearsal, row))


def _found(rehearsal: Rehearsal, row: Row) -> dict[str, Any]:
    result, run = rehearse_once(rehearsal, on_line=lambda _: None)
    if result.failure is not None:
        return {"why_not": f"{result.status}: {result.failure.get('message')}", "failed": True}
    where = "fake tensors" if rehearsal.fake_tensors else str(run["spec"]["device"])
    return {"rehearsed_on": where, "parts": tuple(side_by_side(row, run["rehearsal"]))}


def rehearsal_of(model: str, row: Row, job: Job, *, cpu: bool) -> Rehearsal:
    """The rehearsal of a plan's rank 0. Raises ToolkitError where this machine cannot tell, with the reason."""
    preset = load_preset(row["preset"])
    if job.loss == "chunked":
        raise ToolkitError("--loss chunked is planned only: the training script has no such loss")
    if job.packing:
        raise ToolkitError("--packing is planned only: the rows of a rehearsal are full, and need no mask")
    fake_tensors = cpu and cannot_trace(preset) is None and not job.load_in_4bit
    argv = training_words(model, job, cpu=cpu)
    rehearsal = plan_rehearsal(
        preset, world_size=row["world_size"], rank=0, training_argv=argv, cpu=cpu, fake_tensors=fake_tensors
    )
    if cpu and not fake_tensors:
        check_host_memory(row, job)
    return rehearsal


def training_words(model: str, job: Job, *, cpu: bool) -> list[str]:
    """The plan's job as training arguments; on a CPU in bf16, as planned, where a rehearsal there is in fp32."""
    given = asdict(job)
    names = ("per_device_train_batch_size", "max_seq_length", "gradient_accumulation_steps", "activation_checkpointing")
    values = {name: given[name] for name in names} | {"optim": OPTIMIZERS[job.optimizer]}
    values |= {name: given[name] for name in ("lora_r", "load_in_4bit") if given[name]}
    values |= {"bf16": True} if cpu else {}
    values |= {"use_liger_kernel": True} if job.loss == "fused" else {}
    words = [word for name, value in values.items() for word in (f"--{name}", _word(value))]
    return ["--model_name_or_path", model, *words]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_host_memory(row: Row, job: Job) -> None:
    """Refuse to rehearse for real on a CPU what its memory does not hold."""
    held = sum(row[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer", "activation", "logits"))
    offloaded = row["host_bytes"] // min(row["world_size"], job.gpus_per_machine)
    needed = held + offloaded + LOADING_BYTES_PER_PARAMETER * row["num_params"]
    there = memory_limit_bytes() or host_memory_bytes()
    if needed > there:
        raise ToolkitError(f"it needs about {gib(needed)} of host memory, and this machine has {gib(there)}")
