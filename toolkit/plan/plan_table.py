"""Plans as people and programs read them: an answer, a table for a terminal of 80 columns, the parts; and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.read_model import is_checked
from toolkit.plan.candidates import host_assumption, tolerance_text
from toolkit.plan.finish import EXPECT, Work, dollars_per_million_tokens, finish_of, finish_row
from toolkit.plan.memory import DOES_NOT_FIT, FITS, PARTS, TOO_CLOSE
from toolkit.plan.method_advice import NOTHING
from toolkit.plan.planner import (
    VERDICT_TEXT,
    Plan,
    PlanRequest,
    best_plan,
    with_batch,
)
from toolkit.plan.step_time import NO_GENERATION
from toolkit.terminal import table_lines
from toolkit.units import NOT_AVAILABLE, dollars, gib, number, percent, seconds, tenths_of_gib

MAX_GPUS_SHOWN = 12
VERDICTS = (FITS, TOO_CLOSE, DOES_NOT_FIT)
SPEEDS = "tokens/s per GPU: expect the lower end"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The plans of a request, and what they are shown with."""

    request: PlanRequest
    plans: Sequence[Plan]
    any_gpu: bool = False  # each plan has the fewest of one kind of GPU
    work: Work | None = None
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> Plan:
        """The plan that the answer is about: the fewest GPUs that fit, and the simplest of the fastest presets there.

        Where nothing fits, the one with the least memory.
        """
        fitting = [plan for plan in self.plans if plan.verdict == FITS]
        if self.any_gpu:
            return self.plans[0]
        if fitting:
            return best_plan([plan for plan in fitting if plan.world_size == min(each.world_size for each in fitting)])
        return min(self.plans, key=lambda plan: (plan.verdict == DOES_NOT_FIT, plan.memory.planned_peak_bytes))

    @property
    def ordered(self) -> list[Plan]:
        """The plans as the table shows them: by number of GPUs, what fits first, of these the fastest."""
        if self.any_gpu:
            return list(self.plans[:MAX_GPUS_SHOWN])

        def key(plan: Plan) -> tuple[int, int, float, int]:
            speed = 0.0 if plan.speed is None else plan.speed.tokens_per_second_per_gpu_estimate
            return plan.world_size, VERDICTS.index(plan.verdict), -speed, plan.memory.planned_peak_bytes

        return sorted(self.plans, key=key)


def print_json(model: str, answer: PlanAnswer, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    request, shape = answer.request, answer.request.shape
    head: dict[str, Any] = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from, "model_states_checked": are_states_checked(request)}
    head["summary"] = summary(answer)
    rows = [plan.as_row() | finish_row(plan, answer.work, answer.prices) for plan in answer.plans]
    print(json.dumps(head | {"plans": rows} | more, indent=2))


def plan_lines(answer: PlanAnswer, *, parts: bool = False) -> Iterator[str]:
    """Yield the answer, a table of the plans, time and cost if they are asked for, and with `parts` all details."""
    request, chosen, plans = answer.request, answer.chosen, answer.ordered
    yield from (summary(answer), _heading(answer), "")
    yield from _table(answer)
    yield ""
    if answer.work is not None:
        yield from _finish_lines(plans, answer)
    memory = "" if answer.any_gpu else f" of {tenths_of_gib(request.gpu.memory_bytes)}"
    yield f"GiB per GPU{memory}: planned, and the most that is possible. {SPEEDS}."
    if any(plan.speed.without_generation for plan in plans if plan.speed):
        yield f"tokens/s: without {NO_GENERATION}."
    refused = [plan for plan in plans if plan.host_refusal is not None]
    yield from (f"{plan.preset.name}, {plan.world_size} GPUs: {plan.host_refusal}." for plan in refused)
    if request.host_memory_bytes is None and (refused or chosen.preset.offloads):
        yield f"Host memory: {host_assumption(chosen.request)}."
    if not are_states_checked(request):
        checked = f"{request.shape.model_type}, {request.job.method_text}"
        yield f"Model states are counted from config.json, and not checked for {checked}."
    if not answer.any_gpu:
        yield from (f"{line[:1].upper()}{line[1:]}." for line in chosen.advice if not parts)
    if not parts:
        more = "; `--preset` names presets that offload to the host" if answer.any_gpu else ""
        yield f"What the memory is for: `--parts`{more}. Compared with one H200, never with several GPUs."
        return
    for plan in plans if request.strict and not answer.any_gpu else [chosen]:
        yield from ("", *_part_lines(plan))
    yield ""
    if are_states_checked(request):
        checked = f"{request.shape.model_type}, {request.job.method_text}"
        yield f"Model states are exact: tests compare them with the libraries ({checked})."
    yield from _wider_lines(plans)
    yield "Compared with one H200, never with several GPUs."


def summary(answer: PlanAnswer) -> str:
    """Return the verdict in one line."""
    best, found = answer.chosen, answer.request.finds_batch
    where = f"{best.world_size} x {best.request.gpu.name} with `{best.preset.name}`"
    where += f": {f'{best.settings}, ' if found else ''}{best.peak_text}"
    if answer.any_gpu:
        return f"{'cheapest of those with a price' if answer.prices else 'the least memory in all'}: {where}"
    if best.verdict == FITS:
        fastest = tolerance_text(
            best, [plan for plan in answer.plans if plan.fits and plan.world_size == best.world_size]
        )
        return f"fits on {where}; {fastest if found else _next_batch(best)}"
    enough = [plan for plan in answer.plans if plan.smallest_world_size is not None]
    more = min(enough, key=lambda plan: (plan.smallest_world_size, plan.preset.offloads), default=None)
    text = f"{VERDICT_TEXT[best.verdict]} on {where}"
    return text if more is None else f"{text}; `{more.preset.name}` fits on {more.smallest_world_size} GPUs"


def _next_batch(plan: Plan) -> str:
    size = plan.job.per_device_train_batch_size
    if plan.largest_micro_batch is not None and plan.largest_micro_batch > size:
        return f"a per-GPU batch of up to {plan.largest_micro_batch} fits too"
    is_close = with_batch(plan, size + 1).verdict == TOO_CLOSE
    return f"the next larger batch {'is too close to call' if is_close else 'does not fit'}"


def _heading(answer: PlanAnswer) -> str:
    request = answer.request
    shape, job = request.shape, request.job
    steps = (request.accumulation or 1) if request.finds_batch else job.gradient_accumulation_steps
    group = "GPU" if job.gpus_per_batch == 1 else "group of GPUs that share a batch"
    batch = f"batch of {job.per_device_train_batch_size} per {group}"
    if request.finds_batch:
        rows = sorted({plan.request.global_batch_size for plan in answer.plans})
        batch = f"{' or '.join(map(str, rows))} sequences per step, " if request.accumulation is None else ""
        batch += "with the largest per-GPU batch that fits"
    parts = [
        f"{shape.model_type}, {number(shape.num_params, 0)} parameters",
        job.method_text,
        f"{job.tokens_per_row:,} tokens per sequence",
        batch,
        "sequences of equal length" if job.lengths_differ is False else "",
        f"{steps} accumulation steps" if steps > 1 else "",
        f"{job.accumulate} gradients between them" if steps > 1 and job.accumulate is not None else "",
        ", ".join(f"{name} {degree}" for name, degree in job.degrees.items()),
        "activation checkpointing" if job.activation_checkpointing else "",
        f"counted on the {shape.counted_on}" if shape.counted_on != "arithmetic" else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def _table(answer: PlanAnswer) -> Iterator[str]:
    """A row per plan; what does not differ between the rows is in the lines around them."""
    any_gpu, several = answer.any_gpu, len(answer.request.world_sizes) > 1
    shown = {
        "GPU": any_gpu,
        "preset": True,
        "GPUs": any_gpu or several,
        "verdict": not any_gpu,
        "batch": answer.request.finds_batch,
        "GiB": True,
        "up to": True,
        "of": any_gpu,
        "tokens/s per GPU": True,
        "$ per M": bool(any_gpu and answer.prices),
    }
    names = [name for name, is_shown in shown.items() if is_shown]
    rows = [names]
    for plan in answer.ordered:
        speed, memory = plan.speed, plan.memory
        batch = f"{plan.job.per_device_train_batch_size}{' + ckpt' if plan.job.activation_checkpointing else ''}"
        price = dollars_per_million_tokens(plan, answer.prices)
        cells = {
            "GPU": plan.request.gpu.name,
            "preset": plan.preset.name,
            "GPUs": str(plan.world_size),
            "verdict": plan.verdict.replace("_", " "),
            "batch": batch,
            "GiB": tenths_of_gib(memory.planned_peak_bytes),
            "up to": "" if plan.verdict == DOES_NOT_FIT else tenths_of_gib(memory.possible_peak_bytes),
            "of": tenths_of_gib(plan.request.gpu.memory_bytes),
            "tokens/s per GPU": " to ".join(map(_short, speed.tokens_per_second_per_gpu)) if speed else NOT_AVAILABLE,
            "$ per M": NOT_AVAILABLE if price is None else dollars(price),
        }
        rows.append([cells[name] for name in names])
    left = {at for at, name in enumerate(names) if name in ("GPU", "preset", "verdict", "batch")}
    yield from table_lines(rows, left=left)
    if answer.request.finds_batch and any(plan.job.activation_checkpointing for plan in answer.ordered):
        yield "batch: per GPU; ckpt: activation checkpointing"


def _short(speed: float) -> str:
    """Two or three digits, so that a range is narrow."""
    return f"{speed:.0f}" if speed < 999.5 else f"{speed / 1000:.{1 if speed < 99_950 else 0}f}k"


def _finish_lines(plans: Sequence[Plan], answer: PlanAnswer) -> Iterator[str]:
    """Steps, hours and dollars of each plan that may fit."""
    assert answer.work is not None
    yield f"To finish {answer.work.text}, without loading, evaluation and saving; {EXPECT}:"
    rows = []
    for plan in plans:
        if plan.verdict != DOES_NOT_FIT:
            finish = finish_of(plan, answer.work, answer.prices)
            least = "at least " if plan.speed is not None and plan.speed.without_generation else ""
            first = f", {60 * finish.precompute_hours:,.1f} min of it to precompute" if finish.precompute_hours else ""
            where = f"{plan.world_size} x {plan.request.gpu.name}"
            steps = f"{finish.steps:,} steps"
            rows.append((where, plan.preset.name, steps, f"{least}{finish.time_text}{first}", finish.cost_text))
    yield from table_lines(rows, left=(0, 1)) if rows else ()
    yield ""


def _part_lines(plan: Plan) -> Iterator[str]:
    """The parts of a plan at the peak of each phase, and what else it needs."""
    memory, peak, host = plan.memory, plan.memory.peak, plan.memory.host
    yield f"`{plan.preset.name}`, {plan.world_size} x {plan.request.gpu.name}, {plan.settings}: GiB by phase, rank 0"
    rows = [["", *(phase.phase for phase in memory.phases)]]
    for part in (*PARTS, "allocated"):
        sizes = [getattr(phase, f"{part}_bytes") for phase in memory.phases]
        if max(sizes) > NOTHING * peak.allocated_bytes:
            rows.append([{"buffer": "buffers"}.get(part, part), *map(tenths_of_gib, sizes)])
    yield from (f"  {line}" for line in table_lines(rows))
    allocated, overhead = tenths_of_gib(peak.allocated_bytes), tenths_of_gib(memory.overhead_bytes)
    yield (
        f"torch allocates {allocated} GiB, {percent(plan.logits_fraction)} of it logits ({peak.phase}); with "
        f"{overhead} GiB for CUDA, NCCL and fragmentation nvidia-smi shows {plan.peak_text}"
    )
    disk = f", {gib(host.disk_bytes)} on its disk" if host.disk_bytes else ""
    yield f"host memory per node: {gib(host.peak_bytes)}{disk}; {host_assumption(plan.request)}"
    largest, fewest = plan.largest_micro_batch or "none", plan.smallest_world_size or "none"
    yield f"largest per-GPU batch: {largest}; fewest GPUs, with the smallest batch if none is given: {fewest}"
    if plan.setup.layout is not None:
        yield f"{plan.setup.layout}; each GPU sends per step, without overlap:"
        for traffic in plan.traffic:
            fast, slow = traffic.seconds
            sent = (
                f"{traffic.sent_bytes / GIGA:,.2f} GB {'between nodes' if traffic.crosses_nodes else 'within a node'}"
            )
            yield f"  {traffic.dimension:<12} {sent:<24} {seconds(fast)} to {seconds(slow)}"
    yield from plan.advice


def _wider_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Presets whose range of speeds is wider than that of published rows, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for plan in plans:
        for reason in plan.speed.wider_for if plan.speed else ():
            names = by_reason.setdefault(reason, [])
            names += [plan.preset.name] if plan.preset.name not in names else []
    every = {plan.preset.name for plan in plans}
    for reason, names in by_reason.items():
        yield f"The range of speeds is wider for {reason} ({'all' if set(names) == every else ', '.join(names)})."


def are_states_checked(request: PlanRequest) -> bool:
    """Return True if a test compares the tensors of this architecture and training method with the libraries' own."""
    return is_checked(request.shape.model_type, in_4bit=request.job.load_in_4bit)
