"""A recommendation as programs read it, with the commands to run it and to check it.

>>> train_command(found.choice, ask, "meta-llama/Llama-3.1-8B")
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from toolkit.plan.candidates import Ask, Candidate
from toolkit.plan.links import Interval
from toolkit.plan.recommend import Recommendation
from toolkit.plan.scaling import ScalingPoint, doubled, scaling_curve
from toolkit.plan.step_time import StepTime, step_time
from toolkit.plan.traffic import traffic_of
from toolkit.units import SECONDS_PER_HOUR

COMPARED_STEPS = 20


def dollars_per_million_tokens(price_per_gpu_hour: float | None, speed: StepTime | None) -> Interval | None:
    """At the fast end and at the slow end; None without a price or a speed."""
    if price_per_gpu_hour is None or speed is None:
        return None
    slow, fast = speed.tokens_per_second_per_gpu
    return price_per_gpu_hour / (fast * SECONDS_PER_HOUR) * 1e6, price_per_gpu_hour / (slow * SECONDS_PER_HOUR) * 1e6


def as_json(found: Recommendation, ask: Ask, *, model: str, wish: str, price: float | None) -> dict[str, Any]:
    """As `toolkit recommend --json` gives it."""
    return {
        "model": model,
        "num_params": ask.shape.num_params,
        "gpu": ask.gpu.name,
        "world_size": ask.world_size,
        "wish": wish,
        "choice": _row(found.choice, ask, price),
        "reasons": list(found.reasons),
        "others": [_row(other, ask, price) | {"why_not": found.why_not[other.preset.name]} for other in found.others],
        "why_not": found.why_not,
        "rule_of_thumb": found.rule_of_thumb,
        "scaling": [asdict(point) for point in scaling_of(found.choice, ask)],
        "command": train_command(found.choice, ask, model),
        "compare_command": compare_command([found.choice, *found.others], ask, model),
    }


def _row(candidate: Candidate, ask: Ask, price: float | None) -> dict[str, Any]:
    job, memory, speed = candidate.job, candidate.memory, candidate.speed
    return {
        "preset": candidate.preset.name,
        "per_device_train_batch_size": job.per_device_train_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "global_batch_size": ask.global_batch_size,
        "activation_checkpointing": job.activation_checkpointing,
        "verdict": candidate.verdict,
        "planned_peak_bytes": memory.planned_peak_bytes,
        "headroom_bytes": ask.gpu.memory_bytes - memory.planned_peak_bytes,
        "host_bytes": memory.host.peak_bytes,
        "disk_bytes": memory.host.disk_bytes,
        "communication_bytes_per_step": None if speed is None else speed.communication_bytes_per_step,
        "communication_seconds": None if speed is None else speed.communication_seconds,
        "step_seconds": None if speed is None else speed.step_seconds,
        "tokens_per_second_per_gpu": None if speed is None else speed.tokens_per_second_per_gpu,
        "mfu": None if speed is None else speed.mfu,
        "dollars_per_million_tokens": dollars_per_million_tokens(price, speed),
    }


def scaling_of(candidate: Candidate, ask: Ask) -> list[ScalingPoint]:
    """From the asked number of GPUs to 1,024, the micro-batch unchanged; none where the peak is unknown."""

    def speed(size: int) -> StepTime | None:
        if (candidate.preset.max_world_size or size) < size:
            return None
        job = candidate.job
        return step_time(
            traffic_of(ask.shape, candidate.preset, job, world_size=size),
            replace(ask.cluster, world_size=size),
            per_device_train_batch_size=job.per_device_train_batch_size,
            seq_length=job.max_seq_length,
            nvme_bytes_per_second=ask.nvme_bytes_per_second,
        )

    sizes = [size for size in doubled(ask.world_size) if _fills(size, ask)]
    return scaling_curve(speed, sizes)


def _fills(size: int, ask: Ask) -> bool:
    machine = ask.job.gpus_per_machine
    return size <= machine or size % machine == 0


def train_command(candidate: Candidate, ask: Ask, model: str) -> str:
    """For one machine `toolkit train`; for several accelerate's launcher, once a machine."""
    words = _training_words(candidate, model, output="OUTPUT_DIR")
    preset, machines = candidate.preset, ask.cluster.num_machines
    if machines == 1:
        return f"toolkit train --preset {preset.name} --num-processes {ask.world_size} -- {words}"
    launcher = f"accelerate launch --config_file accelerate_configs/{preset.name}.yaml --num_processes {ask.world_size}"
    launcher += f" --num_machines {machines} --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    degree = preset.dp_shard_size(ask.world_size)
    launcher += "" if degree is None else f" --parallelism_config_dp_shard_size {degree}"
    return f"{launcher} -m toolkit.train {words}"


def compare_command(compared: Sequence[Candidate], ask: Ask, model: str) -> str | None:
    """The same job under each, with settings that all of them fit; None for several machines."""
    if ask.cluster.num_machines > 1:
        return None
    smallest = min(one.job.per_device_train_batch_size for one in compared)
    checkpointing = any(one.job.activation_checkpointing for one in compared)
    common = replace(compared[0], job=ask.job_of(smallest, checkpointing=checkpointing))
    presets = " ".join(f"--preset {one.preset.name}" for one in compared)
    words = _training_words(common, model, output=None)
    return (
        f"toolkit compare {presets} --num-processes {ask.world_size} --output COMPARISON_DIR -- "
        f"{words} --max_steps {COMPARED_STEPS}"
    )


def _training_words(candidate: Candidate, model: str, *, output: str | None) -> str:
    job = candidate.job
    folder = str(Path(model).parent) if model.endswith("config.json") else model
    words = ["--model_name_or_path", folder, "--dataset", "DATASET", "--max_seq_length", str(job.max_seq_length)]
    words += ["--per_device_train_batch_size", str(job.per_device_train_batch_size)]
    words += ["--gradient_accumulation_steps", str(job.gradient_accumulation_steps)]
    words += ["--activation_checkpointing", "true"] if job.activation_checkpointing else []
    words += ["--lora_r", str(job.lora_r)] if job.lora_r is not None else []
    words += ["--load_in_4bit", "true"] if job.load_in_4bit else []
    words += ["--output_dir", output] if output is not None else []
    return shlex.join(words)
