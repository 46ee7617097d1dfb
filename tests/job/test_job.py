"""One job: read from words, a file or values, written back as words, and the same for `plan`, `train` and others."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_command
from launching import LLAMA_8B_CONFIG

from toolkit.hardware.gpu_table import find_gpu
from toolkit.job import argument_values as defaults
from toolkit.job.argument_fields import ARGUMENTS, DataArguments
from toolkit.job.job import Job
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import make_plans, plan_request, plan_run
from toolkit.presets import load_preset

# One of each type: text, numbers, switches, lists, `key=value`, JSON, and arguments that the toolkit does not read.
VALUES = {
    "model_name_or_path": "owner/name",
    "dataset": ["a.jsonl", "b.jsonl"],
    "dataset_weights": [0.7, 0.3],
    "column": {"instruction": "question", "output": "answers.text.0"},
    "system_prompt": "--answer in one word",
    "max_seq_length": 512,
    "learning_rate": 2e-5,
    "bf16": False,
    "lora_r": 8,
    "lora_config": {"use_dora": True, "layers_to_transform": [0, 1]},
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "liger_kernel_config": {"rope": True},
    "label_names": ["labels", "weights"],
    "logging_first_step": True,
    "data_seed": 7,
    "run_name": "a b",
}
OTHER = ("label_names", "logging_first_step", "data_seed", "run_name")


def test_a_job_is_read_back_from_the_words_that_it_is_written_as() -> None:
    job = Job.from_values(VALUES)
    assert Job.from_argv(job.to_argv()) == job
    assert job.given == tuple(VALUES)
    assert job.other == {name: VALUES[name] for name in OTHER}


def test_words_a_file_and_values_make_the_same_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(VALUES, sort_keys=False))
    assert Job.from_argv([str(file)]) == Job.from_values(VALUES)


def test_a_job_without_arguments_has_every_default_and_writes_no_words() -> None:
    assert Job.from_argv([]) == Job()
    assert (Job().to_argv(), Job().given) == ([], ())
    assert {name: getattr(Job(), name) for name in ARGUMENTS} == {n: field.default for n, field in ARGUMENTS.items()}


def test_other_values_replace_those_of_a_job_and_count_as_given() -> None:
    job = Job.from_argv(["--max_steps", "8", "--data_seed", "7"])
    assert " ".join(job.with_values(max_steps=9, tp=2, data_seed=8).to_argv()) == "--max_steps 9 --data_seed 8 --tp 2"
    assert job.without("max_steps", "data_seed") == Job()


def test_both_names_of_activation_checkpointing_switch_it_on() -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert Job.from_argv([f"--{name}"]).uses_activation_checkpointing
    assert not Job().uses_activation_checkpointing


def test_a_run_resumes_unless_the_argument_says_no() -> None:
    assert Job(resume_from_checkpoint="latest").resumes
    assert not any(Job(resume_from_checkpoint=word).resumes for word in (None, "false", "None"))


# -- where no flag is given


def test_planner_and_training_script_have_the_same_defaults() -> None:
    """The batch is transformers' own, so that a plain `accelerate launch` is the job that was planned."""
    from transformers import TrainingArguments

    expected = {
        "per_device_train_batch_size": defaults.PER_DEVICE_TRAIN_BATCH_SIZE,
        "gradient_accumulation_steps": defaults.GRADIENT_ACCUMULATION_STEPS,
        "max_seq_length": defaults.MAX_SEQ_LENGTH,
    }

    def defaults_of(options: type[Any]) -> dict[str, Any]:
        return {field.name: field.default for field in fields(options) if field.name in expected}

    assert defaults_of(PlannedJob) == expected
    assert defaults_of(PlanOptions) == {**dict.fromkeys(expected), "max_seq_length": expected["max_seq_length"]}
    assert defaults_of(TrainingArguments) | defaults_of(DataArguments) == expected
    assert PlannedJob.of(Job()) == PlannedJob()


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_plan_of_the_default_batch_is_the_plan_of_the_run_without_a_flag(preset: str) -> None:
    """`plan` once assumed a micro-batch of 1 and said "fits" (45 GiB) where `train` needs 161 GiB with 8."""
    batch = defaults.PER_DEVICE_TRAIN_BATCH_SIZE
    options = PlanOptions(num_processes=(8,), preset=(preset,), gpu="h100", per_device_train_batch_size=batch)
    (plan,) = make_plans(plan_request(str(LLAMA_8B_CONFIG), options))
    job = Job(model_name_or_path=str(LLAMA_8B_CONFIG))
    assert plan.as_row() == plan_run(load_preset(preset), job, world_size=8, gpu=find_gpu("h100")).as_row()


PLANNED = [f"{command} {LLAMA_8B_CONFIG} --gpu h100" for command in ("plan", "recommend")]
PLANNED += [f"rehearse --preset ddp -- --model_name_or_path {LLAMA_8B_CONFIG}"]


@pytest.mark.parametrize("words", PLANNED, ids=lambda words: words.split()[0])
def test_without_a_gpu_the_number_of_processes_is_asked_for(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run_command(words.split(), capsys)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first == "error: --num-processes is missing, and no GPU is visible on this node"
    assert second == "  hint: the number of GPUs of the job, for example `--num-processes 8`"
