"""The commands that train and compare what a recommendation chose, for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.job.job import Job
from toolkit.models.read_model import hub_id
from toolkit.plan.candidates import Candidate, RecommendRequest, candidate_of
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob

COMPARED_STEPS = 20
# For adapters the defaults are too low: 5e-5 of transformers, 1e-6 of TRL's DPO. As README trains, and as TRL's own
# `trl/scripts/dpo.py` does.
LORA_LEARNING_RATES = {SFT: "2e-4", "dpo": "5e-6"}


def compare_command(compared: Sequence[Candidate], request: RecommendRequest, model: str) -> str | None:
    """Return the command that compares the first candidate, with its settings, with the others that fit with them.

    None for several nodes. A comparison has one degree per dimension, and gives ranks that share a batch as many times
    its size: candidates that need something else are left out, and if the first does there is no command.
    """
    if request.interconnect.num_nodes > 1 or request.job.method.method != SFT:
        return None
    first, *others = compared
    recomputes = first.job.activation_checkpointing
    size, rest = divmod(first.job.per_device_train_batch_size, _ranks_per_batch(first))
    if rest:
        return None
    degrees, presets = dict(first.job.degrees), [first.preset.name]
    for other in others:
        job = other.request.job_with(micro_batch=size * _ranks_per_batch(other), checkpointing=recomputes)
        same = all(degrees.get(name, degree) == degree for name, degree in other.job.degrees.items())
        if same and candidate_of(other.request, other.preset, job).fits:
            degrees |= other.job.degrees
            presets.append(other.preset.name)
    job = replace(request.job_with(micro_batch=size, checkpointing=recomputes), **degrees)  # type: ignore[arg-type]
    named = " ".join(f"--preset {name}" for name in presets)
    return (
        f"toolkit compare {named} --num-processes {request.world_size} --output-dir COMPARISON_DIR -- "
        f"{training_words(job, model, output=None)} --max_steps {COMPARED_STEPS}"
    )


def _ranks_per_batch(candidate: Candidate) -> int:
    layout = candidate.setup.layout
    return layout.ranks_per_batch if layout else 1


def train_command(candidate: Candidate, request: RecommendRequest, model: str) -> str:
    """Return the command that trains: `toolkit train` on one node, accelerate's launcher, once per node, on several."""
    words = training_words(candidate.job, model, output="OUTPUT_DIR")
    preset, nodes = candidate.preset, request.interconnect.num_nodes
    if candidate.job.method.method != SFT:
        name = candidate.job.method.method
        script = f"--module trl.scripts.{name}" if candidate.job.method.spec.trainer is None else f"--script {name}.py"
        return f"toolkit train --preset {preset.name} --num-processes {request.world_size} {script} -- {words}"
    if nodes == 1:
        return f"toolkit train --preset {preset.name} --num-processes {request.world_size} -- {words}"
    config = f"accelerate_configs/{preset.name}.yaml"
    launcher = f"accelerate launch --config_file {config} --num_processes {request.world_size}"
    launcher += f" --num_machines {nodes} --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    # accelerate's default is pdsh, which needs a hostfile; without one, each node would train alone
    launcher += "".join(f" {option}" for option in preset.traits.launcher_options)
    degree = preset.dp_shard_size(request.world_size)
    launcher += "" if degree is None else f" --parallelism_config_dp_shard_size {degree}"
    return f"{launcher} -m toolkit.train {words}"


def broken(command: str) -> str:
    """Return a command in lines of at most 80 columns, if its words allow it, for a shell.

    >>> print(broken(f"toolkit train --preset zero2 -- --dataset {40 * 'D'} --max_steps 2"))
      toolkit train --preset zero2 -- \\
        --dataset DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD --max_steps 2
    """
    lines = [" "]
    for words in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(words) > 76:
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
    values |= {"learning_rate": LORA_LEARNING_RATES[SFT]} if job.is_lora else {}
    values |= {"fp16": True} if job.numerics.fp16 else {}
    return shlex.join(Job.from_values(values | ({} if output is None else {"output_dir": output})).to_argv())


def trl_words(job: PlannedJob, model: str, *, output: str | None) -> list[str]:
    """Return the arguments of TRL's own scripts for a planned job."""
    method = job.method
    values: dict[str, object] = {"model_name_or_path": model, "dataset_name": "DATASET"}
    values |= {name: job.value(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    if not method.generates:
        values["max_length"] = job.tokens_per_row
    values["gradient_checkpointing"] = job.activation_checkpointing
    values |= {"fp16": True} if job.numerics.fp16 else {}
    if job.lora_r is not None:
        values |= {"use_peft": True, "lora_r": job.lora_r, "lora_target_modules": "all-linear", "dtype": "bfloat16"}
        values |= {"load_in_4bit": True} if job.load_in_4bit else {}
        values |= {"learning_rate": rate} if (rate := LORA_LEARNING_RATES.get(method.method)) else {}
    values |= {"reward_funcs": "REWARD_FUNCTION"} if method.generates else {}
    trl_options = {name: getattr(method, name) for name in method.given if name not in ("vllm", "ref_dtype")}
    if method.vllm in ("colocate", "server"):
        trl_options |= {"use_vllm": True, "vllm_mode": method.vllm}
    values |= trl_options | ({} if output is None else {"output_dir": output})
    return [
        word
        for name, value in values.items()
        for word in (f"--{name}", str(value).lower() if value is True or value is False else str(value))
    ]
