"""How each program is told to run a job: its command, its environment and the files it reads.

Every setting that a program would choose otherwise is given: order of rows, length, optimizer, schedule, clipping,
weight decay, activation checkpointing, precision, logging of each step's loss, nothing saved during the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from peer_jobs.job import LORA_R, SEED, Job

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A command and what it needs; nothing is written or started by making one."""

    argv: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Name in the run's folder -> content."""
    cwd: Path | None = None
    """Where the command is started, if not in the run's folder: a preset's YAML names its JSON from the root."""


# Arguments that transformers.TrainingArguments and every program on top of it share.
SHARED: dict[str, Any] = {
    **{"lr_scheduler_type": "constant", "warmup_steps": 0, "seed": SEED},
    **{"optim": "adamw_torch_fused", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8},
    **{"max_grad_norm": 1.0, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0, "logging_steps": 1},
    **{"save_strategy": "no", "eval_strategy": "no"},
}
# And those that our own script has not.
OF_THE_TRAINER = {"report_to": "none", "disable_tqdm": True, "ddp_find_unused_parameters": False}
LORA = {"lora_alpha": 2 * LORA_R, "lora_dropout": 0.0}
FSDP2 = {"reshard_after_forward": True, "cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT"}
FSDP2 |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def shared(job: Job, folder: Path, **changed: Any) -> dict[str, Any]:
    """Return the arguments of `TrainingArguments` for a job, with a program's own names and values."""
    steps = {"max_steps": job.setting.steps, "per_device_train_batch_size": job.setting.batch_size, "bf16": job.bf16}
    steps["learning_rate"] = job.setting.learning_rate
    return SHARED | steps | {"output_dir": str(folder / "output")} | changed


def words(values: Mapping[str, Any]) -> list[str]:
    """Return values as command-line words; a boolean is `true` or `false`."""
    shown = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return [word for name, value in shown.items() for word in (f"--{name}", value)]


def add_engine(job: Job, folder: Path, values: dict[str, Any], files: dict[str, str]) -> None:
    """Add the preset's DeepSpeed JSON as a file of the run's folder, for programs that take the JSON alone."""
    if job.preset.startswith("zero"):
        values["deepspeed"] = str(folder / "deepspeed.json")
        files["deepspeed.json"] = (ROOT / "ds_configs" / f"{job.preset}.json").read_text()


def accelerate(job: Job, python: str, script: list[str]) -> list[str]:
    """Return `accelerate launch` of a script under the preset's YAML, in the job's precision."""
    options = ["--config_file", str(ROOT / "accelerate_configs" / f"{job.preset}.yaml")]
    options += ["--num_processes", str(job.ranks), "--num_machines", "1", "--main_process_port", "0"]
    if not job.preset.startswith("zero"):  # DeepSpeed's is in its JSON
        options += ["--mixed_precision", "bf16" if job.bf16 else "no"]
    return [python, "-m", "accelerate.commands.launch", *options, *script]


def observe_launch(launch: Launch, folder: Path) -> Launch:
    """Return the launch of a script with `-m toolkit.observe` in front of it; its run folder is `folder`/observed."""
    words = enumerate(launch.argv)
    script = next(number for number, word in words if number > 1 and (word == "-m" or word.endswith(".py")))
    argv = [*launch.argv[:script], "-m", "toolkit.observe", "--output-dir", str(folder / "observed")]
    environment = {**launch.environment, "PYTHONPATH": str(ROOT)}
    return replace(launch, argv=[*argv, *launch.argv[script:]], environment=environment)


def on_fsdp(job: Job) -> dict[str, str]:
    """Let accelerate run FSDP2 on a CPU; on a GPU nothing is changed."""
    return {"PEER_FSDP_ON_CPU": "true"} if job.preset == "fsdp2" and job.cpu else {}


def bare(job: Job, python: str, folder: Path) -> Launch:
    values = shared(job, folder, use_cpu=job.cpu, train_sampling_strategy="sequential", **OF_THE_TRAINER)
    values |= {"model": job.model, "data": job.rows, "max_length": job.setting.max_length}
    values |= {"lora_r": LORA_R if job.lora else 0}
    script = [str(HERE / "bare.py"), *words(values)]
    return Launch(argv=accelerate(job, python, script), environment=on_fsdp(job), cwd=ROOT)


def toolkit(job: Job, python: str, folder: Path) -> Launch:
    values = shared(job, folder, train_sampling_strategy="sequential", save_model=False)
    values |= {"model_name_or_path": job.model, "dataset": job.rows, "max_seq_length": job.setting.max_length}
    values |= {"untimed_steps": job.setting.untimed_steps}
    values |= {"lora_r": LORA_R, "lora_alpha": 2 * LORA_R} if job.lora else {}
    options = ["--preset", job.preset, "--num-processes", str(job.ranks), *(["--cpu"] if job.cpu else [])]
    argv = [python, "-m", "toolkit", "train", *options, "--", *words(values)]
    return Launch(argv=argv, environment={"PYTHONPATH": str(ROOT)})


def trl(job: Job, python: str, folder: Path) -> Launch:
    """TRL's own script. It saves the model at the end, after the last step."""
    values = shared(job, folder, use_cpu=job.cpu, train_sampling_strategy="sequential", **OF_THE_TRAINER)
    values |= {"model_name_or_path": job.model, "dataset_name": job.rows.parent, "dtype": "float32"}
    values |= {"max_length": job.setting.max_length, "gradient_checkpointing": False}
    values |= {"lora_r": LORA_R, "lora_target_modules": "all-linear", **LORA} if job.lora else {}
    argv = ["-m", "trl.scripts.sft", *words(values), *(["--use_peft"] if job.lora else [])]
    return Launch(argv=accelerate(job, python, argv), environment=on_fsdp(job), cwd=ROOT)


def llamafactory(job: Job, python: str, folder: Path) -> Launch:
    """`llamafactory-cli train`: its own torchrun for several processes, `accelerate launch` for FSDP2."""
    values = shared(job, folder, use_cpu=job.cpu, **OF_THE_TRAINER)
    values |= {"model_name_or_path": str(job.model), "stage": "pt", "do_train": True, "template": "empty"}
    values |= {"dataset": "rows", "dataset_dir": str(folder), "cutoff_len": job.setting.max_length, "packing": False}
    values |= {"disable_gradient_checkpointing": True, "disable_shuffling": True, "overwrite_cache": True}
    values |= {"finetuning_type": job.method, "save_only_model": False}
    values |= {"lora_rank": LORA_R, "lora_target": "all", **LORA} if job.lora else {}
    files = {"dataset_info.json": json.dumps({"rows": {"file_name": str(job.rows), "columns": {"prompt": "text"}}})}
    environment = {"DISABLE_VERSION_CHECK": "1"} | on_fsdp(job)
    config = str(folder / "job.yaml")
    argv = [python, "-m", "llamafactory.cli", "train", config]
    if job.preset == "fsdp2":
        argv = accelerate(job, python, ["-m", "llamafactory.launcher", config])
    elif job.ranks > 1:
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(job.ranks)}
    add_engine(job, folder, values, files)
    return Launch(argv=argv, environment=environment, files=files | {"job.yaml": yaml.safe_dump(values)})


def swift(job: Job, python: str, folder: Path) -> Launch:
    values = shared(job, folder, use_cpu=job.cpu, **OF_THE_TRAINER)
    values |= {"model": job.model, "model_type": "llama", "template": "dummy", "dataset": folder / "rows.jsonl"}
    values |= {"max_length": job.setting.max_length, "gradient_checkpointing": False, "torch_dtype": "float32"}
    values |= {"dataset_shuffle": False, "train_dataloader_shuffle": False, "split_dataset_ratio": 0}
    values |= {"tuner_type": job.method, "attn_impl": "sdpa", "check_model": False, "add_version": False}
    values |= {"create_checkpoint_symlink": False, "fp16": False}  # it chooses fp16 for a model in fp32
    values |= {"lora_rank": LORA_R, "target_modules": "all-linear", **LORA} if job.lora else {}
    rows = [json.loads(line)["text"] for line in job.rows.read_text().splitlines()]
    messages = [{"messages": [{"role": "assistant", "content": text}]} for text in rows]
    files = {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in messages)}
    environment = on_fsdp(job) | ({"NPROC_PER_NODE": str(job.ranks)} if job.ranks > 1 else {})
    add_engine(job, folder, values, files)
    if job.preset == "fsdp2":
        values["fsdp"] = folder / "fsdp.json"
        fsdp = {"fsdp_config": {"fsdp_version": 2, **FSDP2}, "fsdp": "full_shard auto_wrap"}
        files["fsdp.json"] = json.dumps(fsdp)
    return Launch(argv=[python, "-m", "swift.cli.main", "pt", *words(values)], environment=environment, files=files)


# axolotl's names are TrainingArguments' for these.
AXOLOTL_SHARED = ("weight_decay", "warmup_steps", "max_grad_norm", "gradient_accumulation_steps")
AXOLOTL_SHARED += ("adam_beta1", "adam_beta2", "adam_epsilon", "seed", "logging_steps", "save_strategy")
AXOLOTL_SHARED += ("dataloader_num_workers",)


def axolotl(job: Job, python: str, folder: Path) -> Launch:
    values: dict[str, Any] = {name: SHARED[name] for name in AXOLOTL_SHARED}
    values["learning_rate"] = job.setting.learning_rate
    values |= {"base_model": str(job.model), "output_dir": str(folder / "output")}
    values |= {"datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": None}]}
    values |= {"dataset_prepared_path": str(folder / "prepared"), "sequence_len": job.setting.max_length}
    values |= {"sample_packing": False, "pad_to_sequence_len": False, "shuffle_merged_datasets": False}
    values |= {"curriculum_sampling": True}  # the rows' order
    values |= {"micro_batch_size": job.setting.batch_size, "max_steps": job.setting.steps, "num_epochs": 1}
    values |= {"optimizer": SHARED["optim"], "lr_scheduler": SHARED["lr_scheduler_type"], "val_set_size": 0}
    values |= {"gradient_checkpointing": False, "attn_implementation": "sdpa"}
    values |= {"bf16": job.bf16, "fp16": False, "tf32": False}
    files = {"rows.jsonl": tokenized_rows(job)}
    add_engine(job, folder, values, files)
    if job.preset == "fsdp2":
        values |= {"fsdp_version": 2, "fsdp_config": FSDP2 | {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
    if job.lora:
        values |= {"adapter": "lora", "lora_r": LORA_R, "lora_target_linear": True, **LORA}
        if job.cpu:  # its own kernels, on by default, need a GPU
            values |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
    if job.cpu and job.ranks > 1:  # it would put each rank's model on the GPU of that number
        values |= {"max_memory": {"cpu": "64GiB"}}
    launcher = ["python"] if job.ranks == 1 else ["torchrun", "--", f"--nproc_per_node={job.ranks}"]
    argv = [python, "-m", "axolotl.cli.main", "train", str(folder / "job.yaml"), "--launcher", *launcher]
    files["job.yaml"] = yaml.safe_dump(values)
    return Launch(argv=argv, environment={"AXOLOTL_DO_NOT_TRACK": "1"} | on_fsdp(job), files=files)


def tokenized_rows(job: Job) -> str:
    """Return rows of token ids and labels, which axolotl takes as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    lines = []
    for line in job.rows.read_text().splitlines():
        ids = [*tokenizer(json.loads(line)["text"]).input_ids, tokenizer.eos_token_id]
        lines.append(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}) + "\n")
    return "".join(lines)


PROGRAMS: dict[str, Callable[[Job, str, Path], Launch]] = {
    **{"bare": bare, "toolkit": toolkit, "trl": trl, "llamafactory": llamafactory, "ms-swift": swift},
    "axolotl": axolotl,
}


def environment_of(
    launch: Launch, job: Job, *, python: Path, extensions: Path, folder: Path, turns_port: int | None = None
) -> dict[str, str]:
    """Return the environment of a run: the same threads and switches for every program, and the hook that times it."""
    chosen = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        # More threads than free cores wait in a loop, and processor time then measures the load of the node.
        **{"OMP_NUM_THREADS": str(job.setting.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        **{"HF_DATASETS_CACHE": str(folder / "datasets"), "PEER_STEPS_FOLDER": str(folder / "steps")},
        **{"TORCH_EXTENSIONS_DIR": str(extensions), "DS_BUILD_OPS": "0"},
        **{"PEER_UNTIMED_STEPS": str(job.setting.untimed_steps), "PEER_TURNS_PORT": str(turns_port or "")},
        **launch.environment,
    }
    if job.cpu:
        chosen |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    paths = [str(HERE / "hook"), launch.environment.get("PYTHONPATH", "")]
    if str(python) == sys.executable:  # no environment of its own: it may need what the caller has on its path
        paths += [os.environ.get("PYTHONPATH", "")]
    chosen["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # A fork server would spare the toolkit the imports that every other program pays for.
    removed = ("ACCELERATE_MIXED_PRECISION", "PYTHONWARNINGS", "TOOLKIT_FORK_SERVER")
    return {name: value for name, value in os.environ.items() if name not in removed} | chosen
