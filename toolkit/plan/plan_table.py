"""Plans as people and programs read them: a table that is legible without colour, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.read_model import is_checked
from toolkit.plan.candidates import LARGEST_WORLD_SIZE, host_assumption
from toolkit.plan.finish import Work, dollars_per_million_tokens, finish_of, finish_row
from toolkit.plan.memory import DOES_NOT_FIT, FITS, PARTS, TOO_CLOSE
from toolkit.plan.methods import SFT
from toolkit.plan.planner import (
    VERDICT_TEXT,
    Plan,
    PlanRequest,
    best_plan,
    with_batch,
)
from toolkit.plan.step_time import NO_GENERATION
from toolkit.units import GIB, MIB, NOT_AVAILABLE, gib, number, percent, seconds

if TYPE_CHECKING:
    from rich.text import Text

TABLE_COLUMNS = 100
# Two lines of heading for each column.
FOUND = ("micro\nbatch", "ckpt\n")
PARTS_OF_PEAK = ("model\nstates", "activ-\nations", "logits\n", "other\n", "host\nGiB")
TEXT_COLUMNS = {"GPU\n", "preset\n", "verdict\n"}
MAX_GPUS_SHOWN = 12
STYLES = {FITS: "green", TOO_CLOSE: "yellow", DOES_NOT_FIT: "red"}
NUMBERS = "torch: GiB (2**30) that torch allocates on rank 0 at its peak; smi: what nvidia-smi shows."
LEGEND = (
    "ckpt: activation checkpointing; other: buffers, gathered layers, slack, CUDA, NCCL; host: per node;",
    f"min. GPUs: fewest of up to {LARGEST_WORLD_SIZE:,} that fit, with the smallest batch if none is given.",
)
SPEEDS = "tokens/s: ±25% is a 90 % range from 0.8 to 1.25 times the estimate."
GPU_LEGEND = (
    "Presets that offload are planned only if `--preset` names them; `--gpu NAME --num-processes N` shows",
    "the parts.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The plans of a request, and what they are shown with."""

    request: PlanRequest
    plans: Sequence[Plan]
    any_gpu: bool = False  # each plan has the fewest of one kind of GPU
    work: Work | None = None
    prices: Mapping[str, float] = field(default_factory=dict)


def print_json(model: str, answer: PlanAnswer, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    request, shape = answer.request, answer.request.shape
    head: dict[str, Any] = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from, "model_states_checked": are_states_checked(request)}
    head["summary"] = summary(answer)[0]
    rows = [plan.as_row() | finish_row(plan, plan.job, answer.work, answer.prices) for plan in answer.plans]
    print(json.dumps(head | {"plans": rows} | more, indent=2))


def print_plans(answer: PlanAnswer) -> None:
    """Print the verdict, one row per plan, time and cost if they are asked for, and how exact the numbers are."""
    from rich.console import Console
    from rich.table import Table

    plans, request = answer.plans[: MAX_GPUS_SHOWN if answer.any_gpu else None], answer.request
    console = Console(width=max(Console().width, TABLE_COLUMNS), highlight=False, soft_wrap=True)
    for line in (_heading(answer), *summary(answer), ""):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = _columns(answer)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right", no_wrap=True)
    for plan in plans:
        cells = _cells(plan, answer.prices)
        table.add_row(*(cells[heading] for heading in columns))
    console.print(table, soft_wrap=False)
    checked = f"{request.shape.model_type}, {request.job.method_text}"
    exact = f"Model states are exact (tests compare {checked}, with the libraries)."
    if not are_states_checked(request):
        exact = f"Model states are counted from config.json, and not checked for {checked}."
    disk = max(plan.memory.host.disk_bytes for plan in plans)
    advice = [f"{plan.preset.name}, {plan.world_size} GPUs: {line}" for plan in plans for line in plan.advice]
    on_disk = [f"on disk, per node: up to {gib(disk)}"] if disk else []
    legend = (NUMBERS, *(GPU_LEGEND if answer.any_gpu else LEGEND), SPEEDS)
    methods = () if answer.any_gpu else (*_phase_lines(plans), *advice)
    more = (*_wider_lines(plans), *_host_lines(plans, request), *methods, *_finish_lines(plans, answer))
    lines = (*_layout_lines(plans), *more, *legend, exact)
    for line in (*lines, "Compared with one H200, never with several GPUs.", *on_disk):
        console.print(line, markup=False)


def summary(answer: PlanAnswer) -> tuple[str, str]:
    """Return the verdict in one line, and in another what people compare with other screens.

    It is about the fewest GPUs on which something fits, and the simplest of the fastest presets there.
    """
    plans, found = answer.plans, answer.request.finds_batch
    fitting = [plan for plan in plans if plan.verdict == FITS]
    if answer.any_gpu:
        best, first = plans[0], "cheapest of those with a price" if answer.prices else "the least memory in all"
        text = f"{first}: {_where(best, found)}"
    elif fitting:
        best = best_plan([plan for plan in fitting if plan.world_size == min(each.world_size for each in fitting)])
        text = f"fits on {_where(best, found)}; {_next_batch(best)}"
    else:
        best = min(plans, key=lambda plan: (plan.verdict == DOES_NOT_FIT, plan.memory.planned_peak_bytes))
        enough = [plan for plan in plans if plan.smallest_world_size is not None]
        more = min(enough, key=lambda plan: (plan.smallest_world_size, plan.preset.offloads), default=None)
        text = f"{VERDICT_TEXT[best.verdict]} on {_where(best, found)}"
        text += "" if more is None else f"; `{more.preset.name}` fits on {more.smallest_world_size} GPUs"
    peak, share = best.memory.peak, percent(best.logits_fraction)
    shown = f"torch allocates {gib(peak.allocated_bytes)}, {share} of it logits; nvidia-smi shows "
    return text, f"{shown}{gib(best.memory.planned_peak_bytes)} ({peak.phase})"


def _where(plan: Plan, found: bool) -> str:
    """GPUs and preset, the batch that was found, and the GPU's memory."""
    settings = f", {plan.settings}" if found else ""
    memory = f"{plan.memory.planned_peak_bytes / GIB:.1f} GiB of {plan.request.gpu.memory_bytes / GIB:.1f}"
    return f"{plan.world_size} x {plan.request.gpu.name} with `{plan.preset.name}`{settings}, {memory}"


def _next_batch(plan: Plan) -> str:
    size = plan.job.per_device_train_batch_size
    if plan.largest_micro_batch is not None and plan.largest_micro_batch > size:
        return f"up to {plan.largest_micro_batch} sequences per GPU do"
    is_close = with_batch(plan, size + 1).verdict == TOO_CLOSE
    return f"the next larger batch {'is too close to call' if is_close else 'does not'}"


def _finish_lines(plans: Sequence[Plan], answer: PlanAnswer) -> Iterator[str]:
    """Steps, hours and dollars of each plan that may fit: the best estimate, and the range."""
    if answer.work is None:
        return
    yield f"To finish {answer.work.text}, without loading, evaluation and saving; best estimate (range):"
    for plan in plans:
        if plan.verdict == DOES_NOT_FIT:
            continue
        finish = finish_of(plan, plan.job, answer.work, answer.prices)
        text = f"  {plan.world_size} x {plan.request.gpu.name}, {plan.preset.name}: {finish.steps:,} steps"
        if finish.hours is not None and finish.hours_range is not None:
            unit, scale = ("h", 1) if finish.hours >= 2 else ("min", 60)
            low, high = (f"{scale * hours:,.1f}" for hours in finish.hours_range)
            least = "at least " if plan.speed is not None and plan.speed.without_generation else ""
            text += f", {least}{scale * finish.hours:,.1f} {unit} ({low} to {high})"
            if finish.precompute_hours:
                text += f", {scale * finish.precompute_hours:,.1f} of it to precompute"
        if finish.dollars_range is not None:
            low, high = map(number, finish.dollars_range)
            text += f", {number(finish.dollars)} dollars ({low} to {high})"
        yield text


def _heading(answer: PlanAnswer) -> str:
    request = answer.request
    shape, job = request.shape, request.job
    steps = (request.accumulation or 1) if request.finds_batch else job.gradient_accumulation_steps
    batch_group = "GPU" if job.gpus_per_batch == 1 else "group of GPUs with the same rows"
    batch = f"{job.per_device_train_batch_size} x {job.tokens_per_row} tokens per {batch_group}"
    if request.finds_batch:
        rows = sorted({plan.request.global_batch_size for plan in answer.plans})
        step = f"{' or '.join(map(str, rows))} sequences per step" if request.accumulation is None else ""
        batch = "; ".join(filter(None, (f"{job.tokens_per_row} tokens", step, "the largest micro-batch that fits")))
    parts = [
        f"{shape.model_type}, {number(shape.num_params, 0)} parameters",
        job.method_text,
        batch,
        "rows of equal length" if job.lengths_differ is False else "",
        f"{steps} accumulation steps" if steps > 1 else "",
        f"{job.accumulate} gradients between them" if steps > 1 and job.accumulate is not None else "",
        ", ".join(f"{name} {degree}" for name, degree in job.degrees.items()),
        "activation checkpointing" if job.activation_checkpointing else "",
        "" if answer.any_gpu else f"{request.gpu.name}, {gib(request.gpu.memory_bytes)}",
        f"counted on the {shape.counted_on}" if shape.counted_on != "arithmetic" else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def _columns(answer: PlanAnswer) -> list[str]:
    """Headings of the table: what does not differ between its rows is in the lines above it."""
    found = FOUND if answer.request.finds_batch else ()
    memory, speed = ("torch\nGiB", "smi\nGiB"), "tokens/s\nper GPU"
    if answer.any_gpu:
        price = ["$ per M\ntokens"] if answer.prices else []
        return ["GPU\n", "GPUs\n", "preset\n", *found, *memory, "of\nGiB", speed, *price]
    sizes = ["GPUs\n"] if len(answer.request.world_sizes) > 1 else []
    largest = () if found else ("max.\nbatch",)
    fewest = () if found and sizes else ("min.\nGPUs",)
    return ["preset\n", *sizes, "verdict\n", *found, *memory, *PARTS_OF_PEAK, *largest, *fewest, speed]


def _cells(plan: Plan, prices: Mapping[str, float]) -> dict[str, str | Text]:
    """Every cell of a plan by its heading."""
    from rich.text import Text

    memory, peak = plan.memory, plan.memory.peak
    other = peak.buffer_bytes + peak.generation_bytes + memory.overhead_bytes
    parts = (peak.state_bytes, peak.activation_bytes, peak.logits_bytes, other, memory.host.peak_bytes)
    return {
        "preset\n": plan.preset.name,
        "GPU\n": plan.request.gpu.name,
        "GPUs\n": str(plan.world_size),
        "verdict\n": Text(plan.verdict.replace("_", " "), style=STYLES[plan.verdict]),
        FOUND[0]: str(plan.job.per_device_train_batch_size),
        FOUND[1]: "yes" if plan.job.activation_checkpointing else "no",
        "torch\nGiB": _short_gib(peak.allocated_bytes),
        "smi\nGiB": _short_gib(memory.planned_peak_bytes),
        "of\nGiB": _short_gib(plan.request.gpu.memory_bytes),
        **dict(zip(PARTS_OF_PEAK, map(_short_gib, parts), strict=True)),
        "max.\nbatch": str(plan.largest_micro_batch or "none"),
        "min.\nGPUs": str(plan.smallest_world_size or "none"),
        "tokens/s\nper GPU": _speed(plan),
        "$ per M\ntokens": number(dollars_per_million_tokens(plan, prices)),
    }


def _host_lines(plans: Sequence[Plan], request: PlanRequest) -> Iterator[str]:
    """The host memory that is assumed, and the presets for which it is too small."""
    if request.host_memory_bytes is None and any(plan.preset.offloads for plan in plans):
        yield f"host memory: {host_assumption(plans[-1].request)}"
    for plan in plans:
        if plan.host_refusal is not None:
            yield f"{plan.preset.name}, {plan.world_size} GPUs: {plan.host_refusal}"


def _short_gib(size: int) -> str:
    """Three digits and more, so that columns stay narrow."""
    return f"{size / GIB:.1f}" if abs(size) < 99.95 * GIB else f"{size / GIB:.0f}"


def _speed(plan: Plan) -> str:
    if plan.speed is None:
        return NOT_AVAILABLE
    estimate, (low, _) = plan.speed.tokens_per_second_per_gpu_estimate, plan.speed.tokens_per_second_per_gpu
    digits = 1 if estimate < 99_950 else 0
    shown = f"{estimate:.0f}" if estimate < 999.5 else f"{estimate / 1000:.{digits}f}k"
    return f"{shown}±{estimate / low - 1:.0%}"


def _wider_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Presets whose range of speeds is wider than that of published rows, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for plan in plans:
        for reason in plan.speed.wider_for if plan.speed else ():
            names = by_reason.setdefault(reason, [])
            names += [plan.preset.name] if plan.preset.name not in names else []
    if any(plan.speed.without_generation for plan in plans if plan.speed):
        yield f"tokens/s: without {NO_GENERATION}"
    every = {plan.preset.name for plan in plans}
    for reason, names in by_reason.items():
        yield f"tokens/s: wider because of {reason} ({'all' if set(names) == every else ', '.join(names)})"


def _layout_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """How each plan divides its ranks, and what a GPU sends in a step along each dimension."""
    for plan in plans:
        if plan.setup.layout is None:
            continue
        layout = f"{plan.preset.name}, {plan.world_size} GPUs: {plan.setup.layout}"
        yield f"{layout}; each GPU sends per step, without overlap:"
        for traffic in plan.traffic:
            fast, slow = traffic.seconds
            where = "between nodes" if traffic.crosses_nodes else "within a node"
            sent = f"{traffic.sent_bytes / GIGA:,.2f} GB {where}"
            yield f"  {traffic.dimension:<12} {sent:<24} {seconds(fast)} to {seconds(slow)}"


def _phase_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """The phases of a method that scores, generates or holds more than one model, each with its parts."""
    for plan in plans:
        if plan.job.method.method == SFT:
            continue
        yield f"{plan.preset.name}, {plan.world_size} GPUs, allocated by phase:"
        for phase in plan.memory.phases:
            parts = ((part, getattr(phase, f"{part}_bytes")) for part in PARTS)
            shown = ", ".join(f"{part} {gib(size)}" for part, size in parts if size >= MIB)
            yield f"  {phase.phase:<10} {gib(phase.allocated_bytes):>10}: {shown}"


def are_states_checked(request: PlanRequest) -> bool:
    """Return True if a test compares the tensors of this architecture and training method with the libraries' own."""
    return is_checked(request.shape.model_type, in_4bit=request.job.load_in_4bit)
