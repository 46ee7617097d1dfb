"""Plans as people and programs read them: an answer, a table for a terminal of 80 columns, the parts; and JSON."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.job_weights import FP32_BYTES, job_weights
from toolkit.models.optimizers import DEFAULT_OPTIMIZER
from toolkit.models.read_model import is_checked
from toolkit.models.vision_tower import why_without_images
from toolkit.plan.candidates import PlannedModel, candidate_of, host_assumption, sharding
from toolkit.plan.finish import EXPECT, NO_COST, Cost, ends_text
from toolkit.plan.measured_by_others import measured_line, nearest_row
from toolkit.plan.memory import DOES_NOT_FIT, FITS, TOO_CLOSE
from toolkit.plan.method_advice import NOTHING
from toolkit.plan.phases import PARTS
from toolkit.plan.planner import (
    VERDICT_TEXT,
    Plan,
    PlanRequest,
    best_plan,
)
from toolkit.plan.programs import TOOLKIT, numerics_notes, numerics_text
from toolkit.plan.recommended_commands import rehearsal_command
from toolkit.plan.step_time import NO_GENERATION
from toolkit.screen_text import table_lines
from toolkit.units import GIB, NOT_AVAILABLE, counted, dollars, gib, number, percent, seconds, tenths_of_gib

MAX_GPUS_SHOWN = 12
VERDICTS = (FITS, TOO_CLOSE, DOES_NOT_FIT)
NO_VERDICT = "no verdict"
SPEEDS = "tokens/s per GPU: expect the lower end"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The plans of a request, and what they are shown with."""

    request: PlanRequest
    plans: Sequence[Plan]
    any_gpu: bool = False  # each plan has the fewest of one kind of GPU
    cost: Cost = NO_COST

    @property
    def chosen(self) -> tuple[Plan, str]:
        """The plan that the answer is about, and why: on the fewest GPUs that fit, the simplest of the fastest presets.

        Where nothing fits, the one with the least memory; without offload, if there is one that may fit.
        """
        fitting = [plan for plan in self.plans if plan.verdict == FITS]
        if self.any_gpu:
            return self.plans[0], ""
        if fitting:
            return best_plan([plan for plan in fitting if plan.world_size == min(each.world_size for each in fitting)])
        without_offload = [plan for plan in self.plans if is_open(plan) and not plan.preset.offloads]
        plans = without_offload or self.plans
        return min(plans, key=lambda plan: (plan.verdict == DOES_NOT_FIT, plan.memory.planned_peak_bytes)), ""

    @property
    def ordered(self) -> list[Plan]:
        """The plans as the table shows them: by number of GPUs, what fits first, of these the fastest."""
        if self.any_gpu:
            return list(self.plans[:MAX_GPUS_SHOWN])

        def key(plan: Plan) -> tuple[object, ...]:
            speed = 0.0 if plan.speed is None else plan.speed.tokens_per_second_per_gpu_estimate
            return plan.world_size, VERDICTS.index(plan.verdict), -round(speed), sharding(plan)

        return sorted(self.plans, key=key)


def print_json(model: str, answer: PlanAnswer, **more: Any) -> None:
    """Print the plans as JSON; `more` are further keys at the top level."""
    request, shape = answer.request, answer.request.shape
    head: dict[str, Any] = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from, "model_states_checked": are_states_checked(request)}
    head["summary"] = summary(answer)
    rows = [
        plan.as_row() | answer.cost.as_row(plan) | {"measured_by_others": nearest_row(plan)} for plan in answer.plans
    ]
    print(json.dumps(head | {"plans": rows} | more, indent=2))


def plan_lines(answer: PlanAnswer, *, parts: bool = False) -> Iterator[str]:
    """Yield the answer, a table of the plans, time and cost if they are asked for, and with `parts` all details."""
    request, job, plans, (chosen, _) = answer.request, answer.request.job, answer.ordered, answer.chosen
    yield from (summary(answer), _heading(answer), "")
    yield from _table(answer)
    yield ""
    if answer.cost.work is not None:
        yield from _finish_lines(plans, answer)
    memory = "" if answer.any_gpu else f" of {tenths_of_gib(request.gpu.memory_bytes)}"
    yield f"GiB per GPU{memory}: planned, and the most that is possible. {SPEEDS}."
    if any(plan.speed.without_generation for plan in plans if plan.speed):
        yield f"tokens/s: without {NO_GENERATION}."
    kinds = ("" if job.lora_r is None else "lora", "", job.method.method)
    yield from (f"Not planned: {note}." for note in numerics_notes(job.numerics, kinds))
    # what `compute_metrics` would need, where nothing says whether another program has one
    if job.evaluation is not None and job.numerics.program != TOOLKIT and not job.eval_rows:
        kept = 2 * FP32_BYTES * job.tokens_per_row * request.shape.vocab_size
        yield f"Not planned: logits kept for compute_metrics, {kept / GIB:.2f} GiB per row evaluated (`--eval-rows`)."
    if (attention := job.attention_with_scores) and request.shape.activations_from != "formulas":
        yield f"Not planned: what {attention} attention saves of {request.shape.model_type}."
    refused = [plan for plan in plans if plan.host_refusal is not None]
    yield from (
        f"{plan.preset.name}, {plan.world_size} GPUs: {plan.host_refusal}." for plan in refused if plan is not chosen
    )
    if request.host_memory_bytes is None and (refused or chosen.preset.offloads):
        yield f"Host memory: {host_assumption(chosen.request)}."
    if not answer.any_gpu and not parts:
        yield from (f"{line[:1].upper()}{line[1:]}." for line in chosen.advice)
    if parts:
        for plan in plans if request.strict and not answer.any_gpu else [chosen]:
            yield from ("", *_part_lines(plan))
        reasons = dict.fromkeys(reason for plan in plans if plan.speed for reason in plan.speed.wider_for)
        yield from ("", *([f"Ranges of speeds are wide for {'; '.join(reasons)}."] if reasons else []))
    if (row := nearest_row(chosen)) is not None:
        yield measured_line(row)
    checked = f"{request.shape.model_type}, {request.job.method_text}"
    if not are_states_checked(request):
        yield f"Model states are counted from config.json, and not checked for {checked}."
    elif parts:
        yield f"Model states are exact: tests compare them with the libraries ({checked})."
    more = "; `--preset` names presets that offload to the host" if answer.any_gpu else ""
    divides = not (answer.any_gpu or request.strict) and chosen.world_size > 1
    if divides and (chosen.verdict != FITS or chosen.preset.offloads):
        yield "Presets that divide layers, sequences or experts: `toolkit recommend` plans them too."
    what = "" if parts else f"What the memory is for: `--parts`{more}. "
    yield f"{what}Compared with one H200, never with several GPUs."


def summary(answer: PlanAnswer) -> str:
    """Return the verdict in one line."""
    (best, why), found = answer.chosen, answer.request.finds_batch
    where = f"{best.world_size} x {best.request.gpu.name} with `{best.preset.name}`"
    where += f": {f'{best.settings}, ' if found else ''}{best.peak_text}"
    if answer.any_gpu:
        return f"{'cheapest of those with a price' if answer.cost.prices else 'the least memory in all'}: {where}"
    if best.verdict == FITS:
        largest = best.largest_micro_batch or 0
        is_larger = largest > best.job.per_device_train_batch_size
        batch = f"a per-GPU batch of up to {largest} fits too" if is_larger else "no larger batch does"
        return f"fits on {where}; {why if found and len(answer.plans) > 1 else batch}"
    enough = [plan for plan in answer.plans if plan.smallest_world_size is not None]
    more = min(enough, key=lambda plan: (plan.smallest_world_size, plan.preset.offloads), default=None)
    text = f"{NO_VERDICT if is_open(best) else VERDICT_TEXT[best.verdict]} on {where}"
    text += f"; it {best.host_refusal}" if best.host_refusal else ""
    is_judged = best.memory.margin.of_all is not None  # otherwise nothing fits, with whatever settings
    if best.verdict == TOO_CLOSE and best.host_refusal is None and is_judged and (ways := settings_that_fit(best)):
        return f"{text}; it fits with {' or '.join(ways)}"
    if is_open(best) and (measures := rehearsal_command(best)):
        return f"{text}; `{measures}` measures it"
    if more is None or more.smallest_world_size is None:
        ways = long_row_settings(best) if best.verdict == DOES_NOT_FIT and best.host_refusal is None else []
        return f"{text}; it fits with {' or '.join(ways)}" if ways else text
    return f"{text}; `{more.preset.name}` fits on {counted(more.smallest_world_size, 'GPU')}"


def is_open(plan: Plan) -> bool:
    """Return True for a plan that the GPU holds, of a group whose plans say nothing of what fits."""
    is_held = plan.memory.planned_peak_bytes <= plan.request.gpu.memory_bytes
    return plan.verdict == TOO_CLOSE and plan.memory.margin.of_all is None and is_held


def settings_that_fit(plan: Plan) -> list[str]:
    """Return up to two settings that each make a plan fit that is too close to call; or a pair, where none does."""
    job = plan.job
    decided = {
        f"`{each.option}`": each.option.split()[0].removeprefix("--").replace("-", "_")
        for each in sorted(plan.memory.readings(), reverse=True)
    }
    changes: dict[str, dict[str, Any]] = {
        "`--activation-checkpointing`": {} if job.activation_checkpointing else {"activation_checkpointing": True},
        "`--loss chunked`": {"loss": "chunked"} if job.loss in ("full", "upcast") else {},
        "`--expandable-segments`": {"numerics": replace(job.numerics, expandable_segments=True)},
    }
    if (half := job.per_device_train_batch_size // 2) >= job.method.smallest_batch:
        changes[f"`--per-device-train-batch-size {half}`"] = {"per_device_train_batch_size": half}
    changes[f"`--max-seq-length {job.max_seq_length // 2}`"] = {"max_seq_length": job.max_seq_length // 2}
    ways = [*decided, *(name for name, new in changes.items() if new and new != {"numerics": job.numerics})]

    def fit(*names: str) -> bool:
        new = {option: value for name in names for option, value in changes.get(name, {}).items()}
        new["not_given"] = tuple(each for each in job.not_given if each not in {decided.get(name) for name in names})
        return _fits_with(plan, new)

    pairs = (pair for pair in itertools.combinations(ways, 2) if fit(*pair))
    return [name for name in ways if fit(name)][:2] or [" and ".join(pair) for pair in itertools.islice(pairs, 1)]


def long_row_settings(plan: Plan) -> list[str]:
    """Return the settings for long rows with which a plan fits that does not."""
    changes: dict[str, dict[str, Any]] = {
        "`--activation-checkpointing --activation-checkpointing-offload`": {
            "activation_checkpointing": True,
            "activation_checkpointing_offload": True,
        },
        "`--tiled-mlp`": {"numerics": replace(plan.job.numerics, tiled_mlp=True)},
    }
    return [name for name, new in changes.items() if _fits_with(plan, new)]


def _fits_with(plan: Plan, changes: Mapping[str, Any]) -> bool:
    return candidate_of(plan.request, plan.preset, replace(plan.job, **changes)).fits


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
        "" if job.optim == DEFAULT_OPTIMIZER else f"optimizer {job.optim}",
        numerics_text(job.numerics),
        f"{job.tokens_per_row:,} tokens per sequence",
        images_text(request),
        batch,
        "sequences of equal length" if job.lengths_differ is False else "",
        f"{steps} accumulation steps" if steps > 1 else "",
        f"{job.accumulate} gradients between them" if steps > 1 and job.accumulate is not None else "",
        ", ".join(f"{name} {degree}" for name, degree in job.degrees.items()),
        "activation checkpointing" if job.activation_checkpointing else "",
        "its checkpoints in host memory" if job.activation_checkpointing_offload else "",
        "attention's outputs kept" if job.activation_checkpointing_selective else "",
        f"counted on the {shape.counted_on}" if shape.counted_on != "arithmetic" else "",
    ]
    if shape.activations_from == "llama":
        parts.append(f"activations estimated as Llama's, because they cannot be counted ({shape.why_not_counted})")
    return "; ".join(part for part in parts if part)


def images_text(request: PlannedModel) -> str:
    """Return how many tokens are planned as images, or that none are; empty for a model of text."""
    job = request.job
    if not job.image_tokens:
        if job.image_tokens == 0 or not request.shape.num_tower_params:
            return ""
        reason = why_without_images(request.shape)
        return f"text only: {reason or '`--image-tokens` plans images, and 0 says that there are none'}"
    shape, targets = request.shape, job.lora_target_modules
    weights = job_weights(shape, job.lora_r, lora_target_modules=targets, frozen_tower=job.freeze_vision_tower)
    return f"{job.image_tokens:,} of images, their encoder {'trained' if weights.trains_tower else 'frozen'}"


def _table(answer: PlanAnswer) -> Iterator[str]:
    """A row per plan; what does not differ between the rows is in the lines around them."""
    any_gpu, request, cost = answer.any_gpu, answer.request, answer.cost
    recomputes = any(plan.job.activation_checkpointing for plan in answer.ordered)

    shown = {
        "GPU": any_gpu,
        "GPUs": any_gpu or len(request.world_sizes) > 1,
        "verdict": not any_gpu,
        "batch": request.finds_batch,
        "of": any_gpu,
        "$ per M": bool(cost.prices),
    }
    rows = []
    for plan in answer.ordered:
        possible = plan.memory.possible_peak_bytes if plan.verdict != DOES_NOT_FIT else None
        prices, speed = cost.range_per_million_tokens(plan), plan.speed
        cells = {
            "GPU": plan.request.gpu.name,
            "preset": plan.preset.name,
            "GPUs": str(plan.world_size),
            "verdict": NO_VERDICT if is_open(plan) else plan.verdict.replace("_", " "),
            "batch": f"{plan.job.per_device_train_batch_size}{' + ckpt' * plan.job.activation_checkpointing}",
            "GiB": tenths_of_gib(plan.memory.planned_peak_bytes),
            "up to": "" if possible is None else tenths_of_gib(possible),
            "of": tenths_of_gib(plan.request.gpu.memory_bytes),
            "tokens/s per GPU": ends_text(_short, speed.tokens_per_second_per_gpu) if speed else NOT_AVAILABLE,
            "$ per M": ends_text(dollars, prices) if prices else NOT_AVAILABLE,
        }
        rows.append({name: cell for name, cell in cells.items() if shown.get(name, True)})
    left = {at for at, name in enumerate(rows[0]) if name in ("GPU", "preset", "verdict", "batch")}
    yield from table_lines([list(rows[0]), *(list(row.values()) for row in rows)], left=left)
    if request.finds_batch and recomputes:
        yield "batch: per GPU; ckpt: activation checkpointing"
    if shown["verdict"] and len(rows) > 1 and any(map(is_open, answer.ordered)):
        yield f"{NO_VERDICT}: how far such a job may be above its plan is not known; `toolkit rehearse` measures it"


def _short(speed: float) -> str:
    """Two or three digits, so that a range is narrow."""
    return f"{speed:.0f}" if speed < 999.5 else f"{speed / 1000:.{1 if speed < 99_950 else 0}f}k"


def _finish_lines(plans: Sequence[Plan], answer: PlanAnswer) -> Iterator[str]:
    assert answer.cost.work is not None
    yield f"To finish {answer.cost.work.text}, without loading, evaluation and saving; {EXPECT}:"
    rows = []
    for plan in plans:
        if plan.verdict != DOES_NOT_FIT:
            finish, where = answer.cost.finish(plan), f"{plan.world_size} x {plan.request.gpu.name}"
            rows.append((where, plan.preset.name, f"{finish.steps:,} steps", finish.time_text, finish.cost_text))
    yield from table_lines(rows, left=(0, 1)) if rows else ()
    yield ""


def _part_lines(plan: Plan) -> Iterator[str]:
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
    yield f"host memory per node: {gib(host.peak_bytes)}{host.disk_text}; {host_assumption(plan.request)}"
    largest, fewest = plan.largest_micro_batch or "none", plan.smallest_world_size or "none"
    if not is_open(plan):
        yield f"largest per-GPU batch: {largest}; fewest GPUs, with the smallest batch if none is given: {fewest}"
    if plan.setup.layout is not None:
        yield f"{plan.setup.layout}; each GPU sends per step, without overlap:"
        for traffic in plan.traffic:
            where = "between nodes" if traffic.crosses_nodes else "within a node"
            sent = f"{traffic.sent_bytes / GIGA:,.2f} GB {where}"
            yield f"  {traffic.dimension:<12} {sent:<24} {ends_text(seconds, traffic.seconds)}"
    yield from plan.advice


def are_states_checked(request: PlanRequest) -> bool:
    """Return True if a test compares the tensors of this architecture and training method with the libraries' own."""
    return is_checked(request.shape.model_type, in_4bit=request.job.load_in_4bit)
