"""`toolkit plan --verify`: each plan compared with a rehearsal of the same rank, part by part.

On a GPU the rehearsal is real and reports the allocator's peaks. Without a GPU, FSDP2 and DDP are traced on fake
tensors, which gives the peak of each phase by part; DeepSpeed and offloading are rehearsed on the CPU in the plan's
precision, which gives the model states.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.node import usable_memory_bytes
from toolkit.job.job import Job
from toolkit.plan.memory import plan_memory
from toolkit.plan.phases import PARTS
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import Plan
from toolkit.presets.support import unsupported
from toolkit.rehearse.rehearsal import Rehearsal, plan_rehearsal, rehearse_once
from toolkit.screen_text import table_lines
from toolkit.units import NOT_AVAILABLE, gib

STATES = PARTS[:3]
# Parts of a rehearsal on fake tensors -> parts of a plan.
PLANNED_PART = {
    **{part: part for part in (*STATES, "logits")},
    **{"forward": "activation", "backward": "activation", "load": "activation"},
    **{"gathered": "buffer", "reduction": "buffer", "buckets": "buffer", "step": "buffer"},
}
# The fp32 weights as they are loaded, and the engine's copy of them, in addition to what the plan counts.
LOADING_BYTES_PER_PARAMETER = 8


@dataclass(frozen=True, slots=True)
class PartDifference:
    """One part of one rank's memory, planned and rehearsed."""

    part: str
    planned_bytes: int
    rehearsed_bytes: int

    @property
    def relative(self) -> float | None:
        """Planned over rehearsed, minus one; None if only the plan has this part."""
        if self.rehearsed_bytes == 0:
            return 0.0 if self.planned_bytes == 0 else None
        return self.planned_bytes / self.rehearsed_bytes - 1

    def as_row(self) -> dict[str, Any]:
        """Return the values as `--json` prints them."""
        sizes = {"planned_bytes": self.planned_bytes, "rehearsed_bytes": self.rehearsed_bytes}
        return {"part": self.part, **sizes, "difference": self.relative}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanVerification:
    """One plan and its rehearsal, or the reason for which there is none."""

    preset: str
    world_size: int
    rehearsed_on: str | None = None  # `cuda`, `cpu` or `fake tensors`
    parts: tuple[PartDifference, ...] = ()
    why_not: str | None = None
    failed: bool = False  # True if a rehearsal was started and failed

    def as_row(self) -> dict[str, Any]:
        """Return the values as `--json` prints them."""
        names = ("preset", "world_size", "rehearsed_on", "why_not")
        return {name: getattr(self, name) for name in names} | {"parts": [part.as_row() for part in self.parts]}

    def lines(self) -> list[str]:
        """Return the lines of a table."""
        head = f"{self.preset}, {self.world_size} processes, rank 0"
        if self.why_not is not None:
            return [f"{head}: not rehearsed: {self.why_not}"]
        rows = [("", "planned", "rehearsed", "difference")]
        for part in self.parts:
            sizes = gib(part.planned_bytes), gib(part.rehearsed_bytes)
            share = f"{part.relative:+.1%}" if sizes[1] != gib(0) else NOT_AVAILABLE  # of a few bytes it says nothing
            share = "+0.0%" if sizes == (gib(0), gib(0)) else share
            rows.append((part.part, *sizes, share))
        table = [f"  {line}" for line in table_lines(rows)]
        return [f"{head}, rehearsed on {self.rehearsed_on}:", *table]


def compare_parts(plan: Mapping[str, Any], rehearsal: Mapping[str, Any]) -> list[PartDifference]:
    """Return the differences in model states, then in each phase's peak as far as the rehearsal has it.

    `plan` is a row of `toolkit plan --json`, `rehearsal` the facts of `toolkit rehearse --json`.
    """

    keys = {part: f"{part}_bytes" for part in STATES}
    found = [PartDifference(part, plan[key], rehearsal[key]) for part, key in keys.items() if key in rehearsal]
    planned = plan["phases"]
    for phase, peak in (rehearsal.get("peaks") or {}).items():  # on fake tensors
        if phase in planned:
            traced = Counter[str]()
            for tag, size in peak["parts"].items():
                traced[PLANNED_PART[tag]] += size
            for part in dict.fromkeys(PLANNED_PART.values()):
                found.append(PartDifference(f"{phase}: {part}", planned[phase][f"{part}_bytes"], traced[part]))
            found.append(PartDifference(f"{phase}: allocated", planned[phase]["allocated_bytes"], peak["total_bytes"]))
    for phase, peak in (rehearsal.get("phase_peaks") or {}).items():  # on a GPU
        if phase in planned:
            allocated = planned[phase]["allocated_bytes"]
            found.append(PartDifference(f"{phase}: allocated", allocated, peak["peak_allocated_bytes"]))
    return found


def verify_plans(
    model: str, plans: Sequence[Plan], *, cpu: bool, say: Callable[[str], None]
) -> Iterator[PlanVerification]:
    """Rehearse rank 0 of each plan in turn, and yield each comparison when its rehearsal ends (seconds to minutes)."""
    for plan in plans:
        named: dict[str, Any] = {"preset": plan.preset.name, "world_size": plan.world_size}
        try:
            rehearsal = rehearsal_of_plan(model, plan, cpu=cpu)
        except ToolkitError as error:
            yield PlanVerification(**named, why_not=error.message)
            continue
        say(f"rehearsing {plan.preset.name}, rank 0 of {plan.world_size}")
        result, run = rehearse_once(rehearsal, on_line=lambda _: None)
        if result.failure is not None:
            reason = f"{result.status}: {result.failure.get('message')}"
            yield PlanVerification(**named, why_not=reason, failed=True)
            continue
        device = "fake tensors" if rehearsal.rehearsed.fake_tensors else str(run["spec"]["device"])
        if "phase_peaks" not in run["rehearsal"]:  # only a GPU has workspaces of cuBLAS
            job = replace(plan.job, workspace_bytes=0)
            memory = plan_memory(plan.request.shape, plan.preset, world_size=plan.world_size, job=job)
            plan = replace(plan, memory=memory)
        parts = tuple(compare_parts(plan.as_row(), run["rehearsal"]))
        yield PlanVerification(**named, rehearsed_on=device, parts=parts)


def rehearsal_of_plan(model: str, plan: Plan, *, cpu: bool) -> Rehearsal:
    """Return the rehearsal of a plan's rank 0. Raises ToolkitError, with the reason, if this node cannot run it."""
    preset, job = plan.preset, plan.job
    if job.loss == "chunked_output":
        raise ToolkitError("--loss chunked_output is planned only: it is torchtune's", hint="`--loss chunked`")
    if job.packing:
        raise ToolkitError("--packing is planned only: the rows of a rehearsal are full, and need no mask")
    fake_tensors = cpu and unsupported(preset, job.as_trained, purpose="trace") is None
    argv = training_argv(model, job, cpu=cpu)
    rehearsal = plan_rehearsal(
        preset, world_size=plan.world_size, rank=0, training_argv=argv, cpu=cpu, fake_tensors=fake_tensors
    )
    if cpu and not fake_tensors:
        states, peak, ranks = plan.memory.states, plan.memory.peak, min(plan.world_size, job.gpus_per_node)
        needed = states.total_bytes + peak.activation_bytes + peak.logits_bytes + plan.memory.host.peak_bytes // ranks
        needed += LOADING_BYTES_PER_PARAMETER * plan.request.shape.num_params
        available = usable_memory_bytes()
        if needed > available:
            raise ToolkitError(f"it needs about {gib(needed)} of host memory, and this node has {gib(available)}")
    return rehearsal


def training_argv(model: str, job: PlannedJob, *, cpu: bool) -> list[str]:
    """Return the job as training arguments; on a CPU in bf16, as planned, where the default would be fp32."""
    values = {"model_name_or_path": model, **job.argument_values} | ({"bf16": True} if cpu else {})
    loss = "full" if job.loss == "chunked" and {"tp", "pp"} & set(job.degrees) else job.loss  # as planned
    values |= {"use_liger_kernel": True} if loss == "fused" else {"loss": loss}
    values |= {"lora_target_modules": job.lora_target_modules} if job.is_lora else {}
    return Job.from_values(values).to_argv()
