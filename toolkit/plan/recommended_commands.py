"""The commands that train and compare what a recommendation chose, for a shell."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.job.job import Job
from toolkit.models.read_model import hub_id
from toolkit.plan.candidates import Candidate, RecommendRequest, candidate_of
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets.compatibility import Purpose
from toolkit.presets.support import unsupported

COMPARED_STEPS = 20
# For adapters the defaults are too low: 5e-5 of transformers, 1e-6 of TRL's DPO. As README trains, and as TRL's own
# `trl/scripts/dpo.py` does.
LORA_LEARNING_RATES = {SFT: "2e-4", "dpo": "5e-6"}


def is_ours(job: PlannedJob) -> bool:
    """Return True for a job of our own script: `sft`, of text."""
    return job.method.method == SFT and not job.image_tokens


def compare_command(compared: Sequence[Candidate], request: RecommendRequest, model: str) -> str | None:
    """Return the command that compares the first candidate, with its settings, with the others that fit with them.

    None for several nodes. A comparison has one degree per dimension, and gives ranks that share a batch as many times
    its size: candidates that need something else are left out, and if the first does there is no command.
    """
    if request.interconnect.num_nodes > 1 or not is_ours(request.job):
        return None
    first, *others = compared
    recomputes = first.job.activation_checkpointing
    size, rest = divmod(first.job.per_device_train_batch_size, first.ranks_per_batch)
    if rest:
        return None
    degrees, presets = dict(first.job.degrees), [first.preset.name]
    for other in others:
        job = other.request.job_with(micro_batch=size * other.ranks_per_batch, checkpointing=recomputes)
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


def tune_command(choice: Candidate, request: RecommendRequest, model: str) -> str | None:
    """Return the command that searches on from the choice; None for several nodes, and for methods but `sft`."""
    if request.interconnect.num_nodes > 1 or not is_ours(request.job):
        return None
    return (
        f"toolkit tune --baseline {choice.preset.name} --num-processes {request.world_size} --output-dir TUNE_DIR -- "
        + training_words(choice.job, model, output=None)
    )


def train_command(candidate: Candidate, request: RecommendRequest, model: str) -> str:
    """Return the command that trains: `toolkit train` on one node, accelerate's launcher, once per node, on several."""
    words = training_words(candidate.job, model, output="OUTPUT_DIR")
    preset, method, nodes = candidate.preset, candidate.job.method, request.interconnect.num_nodes
    ours = is_ours(candidate.job)
    if not ours or nodes == 1:
        own_script = method.spec.trainer or candidate.job.image_tokens
        script = f" --script {method.method}.py" if own_script else f" --module trl.scripts.{method.method}"
        script = "" if ours else script
        return f"toolkit train --preset {preset.name} --num-processes {request.world_size}{script} -- {words}"
    config = f"accelerate_configs/{preset.name}.yaml"
    launcher = f"accelerate launch --config_file {config} --num_processes {request.world_size}"
    launcher += f" --num_machines {nodes} --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    # accelerate's default is pdsh, which needs a hostfile; without one, each node would train alone
    launcher += "".join(f" {option}" for option in preset.traits.launcher_options)
    degree = preset.dp_shard_size(request.world_size)
    launcher += "" if degree is None else f" --parallelism_config_dp_shard_size {degree}"
    return f"{launcher} -m toolkit.train {words}"


# What starts these programs: docs/how-to/your-own-script.md.
MODULES = {"axolotl": "axolotl.cli.train", "llama-factory": "llamafactory.launcher", "ms-swift": "swift.cli.sft"}


def rehearsal_command(candidate: Candidate) -> str | None:
    """Return the command that measures one rank of another program's job; None where none can be rehearsed."""
    preset, method = candidate.preset, candidate.job.method
    purposes: dict[str, Purpose] = {" --fake-tensors": "trace", "": "rehearse"}
    job, size = candidate.job.as_trained, candidate.world_size
    refused = {flag: unsupported(preset, job, world_size=size, purpose=each) for flag, each in purposes.items()}
    flag, program = next((flag for flag, why in refused.items() if why is None), None), candidate.job.numerics.program
    if flag is None or program == "torchtune":  # which has no Trainer to observe
        return None
    module = f"trl.scripts.{method.method}" if program == "trl" and method.spec.trainer is None else None
    module = MODULES.get(program, module)
    module = "swift.cli.rlhf" if program == "ms-swift" and method.method != SFT else module
    script = "--script SCRIPT" if module is None else f"--module {module}"
    return f"toolkit rehearse --preset {preset.name} --num-processes {size}{flag} {script} -- ARGUMENTS"


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
    values: dict[str, Any] = {"model_name_or_path": hub_id(model)}
    if model.endswith("config.json"):
        values = {"model_name_or_path": str(Path(model).parent)}
    last = {} if output is None else {"output_dir": output}
    if not is_ours(job):
        pairs = (values | _trl_arguments(job) | last).items()
        return shlex.join(word for name, value in pairs for word in (f"--{name}", value))
    values |= {"dataset": "DATASET", **job.argument_values}
    values |= {"learning_rate": LORA_LEARNING_RATES[SFT]} if job.is_lora else {}
    values |= {"fp16": True} if job.numerics.fp16 else {}
    return shlex.join(Job.from_values(values | last).to_argv())


def _trl_arguments(job: PlannedJob) -> dict[str, str]:
    method = job.method
    values: dict[str, Any] = {"dataset_name": "DATASET"}
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
    values |= {name: getattr(method, name) for name in method.given if name not in ("vllm", "ref_dtype")}
    if method.vllm in ("colocate", "server"):
        values |= {"use_vllm": True, "vllm_mode": method.vllm}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
