"""A recommendation as people and programs read it, its scaling curve, and the commands that run and compare it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.job.job import Job
from toolkit.models.read_model import hub_id
from toolkit.plan.candidates import LARGEST_WORLD_SIZE, Candidate, RecommendRequest, host_assumption
from toolkit.plan.failures import FailingJob
from toolkit.plan.interconnect import Range
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.plan.recommend import Recommendation
from toolkit.plan.step_time import ALIKE_DIGITS, NO_GENERATION, StepTime
from toolkit.units import SECONDS_PER_HOUR, gib, seconds

COMPARED_STEPS = 20
SHOWN, COMPARED = 3, 2  # alternatives and rejected presets that are shown without `--all`; alternatives to measure
# Llama 3's training had 419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783,
# table 5): one per 50,700 GPU-hours.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16_384 / 419


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One world size of a weak-scaling curve, on which the micro-batch stays and the global batch grows."""

    world_size: int
    tokens_per_second: Range
    scaling_efficiency: Range
    """Tokens per second and GPU over those of the smallest world size, at the same end of the range."""
    failure_loss: float
    """Share of the time lost to failures, at the best interval between checkpoints."""


def scaling_curve(candidate: Candidate, request: RecommendRequest) -> list[ScalingPoint]:
    """Return the curve from the request's GPUs, doubled up to 1,024; empty if the GPU's peak is unknown."""
    points: list[ScalingPoint] = []
    smallest: Range | None = None
    size, preset, per_node = request.world_size, candidate.preset, request.job.gpus_per_node
    while size <= max(request.world_size, min(LARGEST_WORLD_SIZE, preset.max_world_size or LARGEST_WORLD_SIZE)):
        if size <= per_node or size % per_node == 0:
            shape = candidate.job.method.model(request.shape)
            setup = TrainingSetup(shape=shape, preset=preset, world_size=size, job=candidate.job)
            speed = request.step_time(setup)
            if speed is None:
                return []
            low, high = speed.tokens_per_second_per_gpu
            smallest = smallest or (low, high)
            points.append(
                ScalingPoint(
                    world_size=size,
                    tokens_per_second=(low * size, high * size),
                    scaling_efficiency=(low / smallest[0], high / smallest[1]),
                    failure_loss=failure_loss(size),
                )
            )
        size *= 2
    return points


def failure_loss(world_size: int) -> float:
    """Return the share of the time spent on saving, on repeated work and on restarts, at Young's interval."""
    failures = 1000 * 24 / GPU_HOURS_TO_FAILURE  # a GPU stands for a node: only their product with the rate counts
    costs = FailingJob(
        nodes=world_size, failures_per_1000_node_days=failures, checkpoint_seconds=60.0, restart_seconds=600.0
    )
    return round(1 - costs.exact_time_ratio, ALIKE_DIGITS)


def dollars_per_million_tokens(price_per_gpu_hour: float | None, speed: StepTime | None) -> Range | None:
    """Return the price at the fast and at the slow end; None without a price or a speed."""
    if price_per_gpu_hour is None or speed is None:
        return None
    slow, fast = speed.tokens_per_second_per_gpu
    return price_per_gpu_hour / (fast * SECONDS_PER_HOUR) * 1e6, price_per_gpu_hour / (slow * SECONDS_PER_HOUR) * 1e6


def recommendation_json(
    recommendation: Recommendation, request: RecommendRequest, *, model: str, objective: str, price: float | None
) -> dict[str, Any]:
    """Return the recommendation as `toolkit recommend --json` prints it; `price` is in dollars per GPU-hour."""
    choice, others, why_not = recommendation.choice, recommendation.others, recommendation.why_not
    return {
        "model": model,
        "num_params": request.shape.num_params,
        "gpu": request.gpu.name,
        "world_size": request.world_size,
        "objective": objective,
        "choice": _row(choice, request, price),
        "reasons": list(recommendation.reasons),
        "others": [_row(other, request, price) | {"why_not": why_not[other.preset.name]} for other in others],
        "why_not": why_not,
        "rule_of_thumb": recommendation.rule_of_thumb,
        "scaling": [asdict(point) for point in scaling_curve(choice, request)],
        "command": train_command(choice, request, model),
        "compare_command": compare_command([choice, *others[:COMPARED]], request, model),
    }


def _row(candidate: Candidate, request: RecommendRequest, price: float | None) -> dict[str, Any]:
    speed = candidate.speed
    return {
        **candidate.as_row(),
        "degrees": candidate.job.degrees,
        "global_batch_size": request.global_batch_size,
        **{name: getattr(speed, name, None) for name in ("communication_bytes_per_step", "communication_seconds")},
        "dollars_per_million_tokens": dollars_per_million_tokens(price, speed),
    }


def recommendation_lines(
    recommendation: Recommendation,
    request: RecommendRequest,
    *,
    model: str,
    price: float | None = None,
    scaling: bool = False,
    show_all: bool = False,
) -> list[str]:
    """Return the recommendation as lines of text that are legible without colour."""
    choice, others, why_not = recommendation.choice, recommendation.others, recommendation.why_not
    every_row = " in every row" if request.job.lengths_differ is False else ""
    need = f"; needs {gib(choice.memory.host.peak_bytes)} of host memory per node" if choice.preset.offloads else ""
    lines = [
        f"{model}: {request.shape.num_params:,} parameters, {request.job.method_text}, "
        f"{request.job.tokens_per_row:,} tokens{every_row}, {request.global_batch_size} sequences per step, "
        f"on {request.world_size} × {request.gpu.name}",
        "",
        f"  use       {choice.preset.name}: {choice.settings}{need}",
        *_facts(choice, request, price),
        *(f"  because   {reason}" for reason in recommendation.reasons),
        "",
    ]
    shown = None if show_all else SHOWN
    fitting = [other.preset.name for other in others]
    rejected = [name for name in why_not if name not in fitting]
    lines += [f"  or        {name}: {why_not[name]}" for name in fitting[:shown]]
    lines += [f"  rejected  {name}: {why_not[name]}" for name in rejected[:shown]]
    hidden = 0 if show_all else len(fitting[SHOWN:]) + len(rejected[SHOWN:])
    lines += [f"  {hidden} more with `--all`"] if hidden else []
    lines += ["", *_scaling_lines(scaling_curve(choice, request))] if scaling else []
    lines += ["", "run it:", broken(train_command(choice, request, model))]
    compare = compare_command([choice, *others[:COMPARED]], request, model)
    if compare is None:
        measures = f"a run with `--max_steps {COMPARED_STEPS}` measures"
        if request.interconnect.num_nodes > 1:
            measures = "`toolkit compare` measures on one node"
        return [*lines, "", f"No figure above is measured; {measures}."]
    return [*lines, "", "No figure above is measured; this measures:", broken(compare)]


def _facts(choice: Candidate, request: RecommendRequest, price: float | None) -> list[str]:
    memory, speed = choice.memory, choice.speed
    left = gib(request.gpu.memory_bytes - memory.planned_peak_bytes)
    disk = f", {gib(memory.host.disk_bytes)} on its disk" if memory.host.disk_bytes else ""
    lines = [
        f"  memory    {gib(memory.planned_peak_bytes)} of {gib(request.gpu.memory_bytes)} per GPU, {left} left; "
        f"{gib(memory.host.peak_bytes)} of host memory per node{disk}"
    ]
    if choice.preset.offloads and request.host_memory_bytes is None:
        lines.append(f"  host      {host_assumption(request)}")
    if speed is None:
        return [*lines, "  speed     n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    low, high = speed.tokens_per_second_per_gpu
    lines += [
        f"  speed     {speed.tokens_per_second_per_gpu_estimate:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), "
        f"MFU {speed.mfu[0]:.0%} to {speed.mfu[1]:.0%}, {seconds(speed.estimate_seconds)} per step "
        f"({seconds(speed.step_seconds[0])} to {seconds(speed.step_seconds[1])})"
    ]
    lines += [f"  without   {NO_GENERATION}"] if speed.without_generation else []
    lines += [f"  wider     because of {', '.join(speed.wider_for)}"] if speed.wider_for else []
    if speed.communication_bytes_per_step:
        fast, slow = speed.communication_seconds
        lines.append(
            f"  network   {speed.communication_bytes_per_step / 1e9:,.1f} GB sent per step and GPU: {seconds(fast)} to "
            f"{seconds(slow)} without overlap"
        )
    if speed.offload_efficiency is not None:
        worst, best = speed.offload_efficiency
        lines.append(f"  offload   leaves {worst:.0%} to {best:.0%} of the time to the GPU without overlap")
    dollars = dollars_per_million_tokens(price, speed)
    if dollars is not None:
        lines.append(
            f"  price     ${dollars[0]:.3f} to ${dollars[1]:.3f} per million tokens at ${price:.2f} per GPU-hour"
        )
    return lines


def _scaling_lines(points: Sequence[ScalingPoint]) -> list[str]:
    if not points:
        return ["  scaling   n/a: the GPU's peak is not known (`--gpu-tflops`)"]
    relative = f"relative to {points[0].world_size:,} GPUs"
    lines = [
        "  GPUs   tokens/s of all GPUs            tokens/s per GPU,      share of time",
        f"         (low to high end)               {relative:<21}  lost to failures",
    ]
    for point in points:
        low, high = point.tokens_per_second
        worst, best = sorted(point.scaling_efficiency)
        lines.append(
            f"  {point.world_size:>5}  {f'{low:,.0f} to {high:,.0f}':<30}  {f'{worst:.0%} to {best:.0%}':<21}  "
            f"{point.failure_loss:.1%}"
        )
    return lines


def compare_command(compared: Sequence[Candidate], request: RecommendRequest, model: str) -> str | None:
    """Return the command that compares candidates on settings that all of them fit; None for several nodes.

    A comparison has one degree per dimension, and gives ranks that share a batch as many times its size: candidates
    that need something else are left out, and if the first does there is no command.
    """
    if request.interconnect.num_nodes > 1 or request.job.method.method != SFT:
        return None
    sizes, degrees = dict[str, int](), dict[str, int]()
    for candidate in compared:
        layout = candidate.preset.layout(request.world_size, candidate.job.degrees)
        size, rest = divmod(candidate.job.per_device_train_batch_size, layout.ranks_per_batch if layout else 1)
        if rest == 0 and all(degrees.get(name, degree) == degree for name, degree in candidate.job.degrees.items()):
            degrees |= candidate.job.degrees
            sizes[candidate.preset.name] = size
    if compared[0].preset.name not in sizes:
        return None
    compared = [candidate for candidate in compared if candidate.preset.name in sizes]
    checkpointing = any(candidate.job.activation_checkpointing for candidate in compared)
    job = request.job_with(micro_batch=min(sizes.values()), checkpointing=checkpointing)
    job = replace(job, **degrees)  # type: ignore[arg-type]
    presets = " ".join(f"--preset {candidate.preset.name}" for candidate in compared)
    return (
        f"toolkit compare {presets} --num-processes {request.world_size} --output-dir COMPARISON_DIR -- "
        f"{training_words(job, model, output=None)} --max_steps {COMPARED_STEPS}"
    )


def train_command(candidate: Candidate, request: RecommendRequest, model: str) -> str:
    """Return the command that trains: `toolkit train` on one node, accelerate's launcher, once per node, on several."""
    words = training_words(candidate.job, model, output="OUTPUT_DIR")
    preset, nodes = candidate.preset, request.interconnect.num_nodes
    if candidate.job.method.method != SFT:
        script = f"--script {candidate.job.method.method}.py -- {words}"
        return f"toolkit train --preset {preset.name} --num-processes {request.world_size} {script}"
    if nodes == 1:
        return f"toolkit train --preset {preset.name} --num-processes {request.world_size} -- {words}"
    config = f"accelerate_configs/{preset.name}.yaml"
    launcher = f"accelerate launch --config_file {config} --num_processes {request.world_size}"
    launcher += f" --num_machines {nodes} --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    # accelerate's default is pdsh, which needs a hostfile; without one, each node would train alone
    launcher += " --deepspeed_multinode_launcher standard" if preset.engine == "deepspeed" else ""
    degree = preset.dp_shard_size(request.world_size)
    launcher += "" if degree is None else f" --parallelism_config_dp_shard_size {degree}"
    return f"{launcher} -m toolkit.train {words}"


def broken(command: str) -> str:
    """Return a command in lines of at most 100 columns, if its words allow it, for a shell.

    >>> print(broken(f"toolkit train --preset zero2 -- --dataset {60 * 'D'} --max_steps 2"))
      toolkit train --preset zero2 -- \\
        --dataset DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD --max_steps 2
    """
    lines = [" "]
    for words in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(words) > 96:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {words}"
    return "\n".join(lines)


def training_words(job: PlannedJob, model: str, *, output: str | None) -> str:
    """Return the training arguments of a planned job, for a shell."""
    folder = str(Path(model).parent) if model.endswith("config.json") else hub_id(model)
    if job.method.method != SFT:
        return shlex.join(trl_words(job, folder, output=output))
    values = {"model_name_or_path": folder, "dataset": "DATASET", **job.argument_values}
    return shlex.join(Job.from_values(values | ({} if output is None else {"output_dir": output})).to_argv())


def trl_words(job: PlannedJob, model: str, *, output: str | None) -> list[str]:
    """Return the arguments of TRL's own scripts for a planned job."""
    method = job.method
    values: dict[str, object] = {"model_name_or_path": model, "dataset_name": "DATASET"}
    values |= {name: job.value(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    if not method.generates:
        values["max_length"] = job.tokens_per_row
    values["gradient_checkpointing"] = job.activation_checkpointing
    if job.lora_r is not None:
        values |= {"use_peft": True, "lora_r": job.lora_r, "lora_target_modules": "all-linear", "dtype": "bfloat16"}
        values |= {"load_in_4bit": True} if job.load_in_4bit else {}
    trl_options = {name: getattr(method, name) for name in method.given if name not in ("vllm", "ref_dtype")}
    if method.vllm in ("colocate", "server"):
        trl_options |= {"use_vllm": True, "vllm_mode": method.vllm}
    values |= trl_options | ({} if output is None else {"output_dir": output})
    return [
        word
        for name, value in values.items()
        for word in (f"--{name}", str(value).lower() if value is True or value is False else str(value))
    ]
