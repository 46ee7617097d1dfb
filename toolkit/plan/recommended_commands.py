"""The commands that train and compare what a recommendation chose, for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.job.job import Job
from toolkit.models.read_model import hub_id
from toolkit.plan.candidates import Candidate, RecommendRequest
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob

COMPARED_STEPS = 20


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
