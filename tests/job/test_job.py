"""One job: read from words, a file or values, written back as words, and asked by everybody."""

from __future__ import annotations

from pathlib import Path

import yaml

from toolkit.job.argument_fields import ARGUMENTS
from toolkit.job.job import Job

# One of each type: text, numbers, switches, lists, `key=value`, JSON, and arguments that the toolkit does not read.
VALUES = {
    "model_name_or_path": "owner/name",
    "dataset": ["a.jsonl", "b.jsonl"],
    "dataset_weights": [0.7, 0.3],
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


def test_a_job_is_read_back_from_the_words_that_it_is_written_as() -> None:
    job = Job.from_values(VALUES)
    assert Job.from_argv(job.to_argv()) == job
    assert job.given == tuple(VALUES)
    assert job.other == {
        "label_names": ["labels", "weights"],
        "logging_first_step": True,
        "data_seed": 7,
        "run_name": "a b",
    }


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
    assert job.with_values(max_steps=9, tp=2, data_seed=8).to_argv() == [
        *("--max_steps", "9", "--data_seed", "8", "--tp", "2")
    ]
    assert job.without("max_steps", "data_seed") == Job()


def test_both_names_of_activation_checkpointing_switch_it_on() -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert Job.from_argv([f"--{name}"]).uses_activation_checkpointing
    assert not Job().uses_activation_checkpointing


def test_a_run_resumes_unless_the_argument_says_no() -> None:
    assert Job(resume_from_checkpoint="latest").resumes
    assert not any(Job(resume_from_checkpoint=word).resumes for word in (None, "false", "None"))
