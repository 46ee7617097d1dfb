"""Resuming: with the settings of the checkpoint, which is converted if its shards do not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.launch.resume import TrainingRun, check_resume_settings, converts
from toolkit.presets import load_preset
from toolkit.record.checkpoints import Checkpoint, Manifest, read_checkpoint

TWO_CHUNKS = "`--pipeline_schedule interleaved_1f1b --pipeline_chunks 2`"
ONE_GROUP = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 1, "ep": 1}
FSDP2: dict[str, Any] = {"preset": "fsdp2", "engine": "fsdp2", "sharding": "full_shard", "world_size": 2}
DDP: dict[str, Any] = {"preset": "ddp", "engine": "ddp", "sharding": "replicate", "world_size": 2}
ZERO2: dict[str, Any] = {"preset": "zero2", "engine": "deepspeed", "sharding": "shard_grad_op", "world_size": 2}
CP = FSDP2 | {"preset": "cp", "layout": {**ONE_GROUP, "cp": 2}, "data_parallel_size": 1}
AT_LOAD = FSDP2 | {"preset": "fsdp2_tp", "world_size": 4, "sharded_at_load": True, "data_parallel_size": 2}
AT_LOAD |= {"layout": {**ONE_GROUP, "dp_shard": 2, "tp": 2}}


def is_converted(folder: Path, written: dict[str, Any], preset: str, n: int, batch: int = 8, **degrees: int) -> bool:
    """Return True if a checkpoint of 2 rows and 2 accumulation steps per group is converted for a preset."""
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 2, "files": [], **sizes, **written}))
    arguments = {"resume_from_checkpoint": str(checkpoint), "output_dir": str(folder), **degrees}
    run = TrainingRun(preset=load_preset(preset), job=Job.from_values(arguments), num_processes=n)
    per_group = batch // run.data_parallel_size
    job = run.job.with_values(per_device_train_batch_size=1, gradient_accumulation_steps=per_group)
    return converts(read_checkpoint(checkpoint), replace(run, job=job))


@pytest.mark.parametrize(
    ("written", "preset", "ranks", "degrees", "expected"),
    [
        (FSDP2, "fsdp2", 2, {}, False),
        (FSDP2, "fsdp2", 4, {}, True),  # without the optimizer's name
        (FSDP2 | {"optim": "adamw_torch_fused"}, "fsdp2", 4, {}, False),
        (FSDP2 | {"optim": "adamw_torch_fused"}, "fsdp2_grad_op", 4, {}, True),
        (FSDP2 | {"optim": "adamw_bnb_8bit"}, "fsdp2", 4, {}, True),  # refused: blocks of the old shards
        (DDP, "ddp", 4, {}, False),
        (DDP, "single", 1, {}, False),
        (DDP | {"optim": "adamw_bnb_8bit"}, "ddp", 1, {}, False),
        (ZERO2, "zero2", 2, {}, False),
        (ZERO2, "zero2", 4, {}, True),
        (ZERO2 | {"universal": True}, "zero2", 4, {}, False),
        (FSDP2, "cp", 2, {"cp": 2}, True),
        (FSDP2, "fsdp2_tp", 4, {"tp": 2}, True),
        (AT_LOAD, "fsdp2_tp", 8, {"tp": 4}, False),  # any of their layouts reads it
        (AT_LOAD, "tp", 2, {"tp": 2}, False),
        (AT_LOAD, "fsdp2", 4, {}, True),
    ],
)
def test_a_checkpoint_is_converted_where_its_shards_do_not_fit(
    written: dict[str, Any], preset: str, ranks: int, degrees: dict[str, int], expected: bool, tmp_path: Path
) -> None:
    assert is_converted(tmp_path, written, preset, ranks, **degrees) is expected


def test_the_batch_is_counted_by_groups_of_ranks_with_different_rows(tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    assert is_converted(tmp_path / "same", CP, "fsdp2", 2, batch=4)  # cp: one group of 2 rows, 2 accumulation steps
    (tmp_path / "other").mkdir()
    with pytest.raises(ToolkitError, match="was trained with 4 sequences per step over all ranks, now it is 8"):
        is_converted(tmp_path / "other", CP, "fsdp2", 2, batch=8)


@pytest.mark.parametrize(
    ("written", "same", "other", "message", "hint"),
    [
        ({"streaming_buffer_size": 8}, {"streaming": True, "streaming_buffer_size": 8}, {"streaming": True},
         "the data would not resume", "`--streaming true --streaming_buffer_size 8`"),
        ({"streaming_buffer_size": 0}, {}, {"streaming": True}, "the data would not resume", "leave `--streaming` out"),
        ({"dataset_weights": [0.7, 0.3]}, {"dataset_weights": [0.7, 0.3]}, {"dataset_weights": [0.3, 0.7]},
         "was trained with --dataset_weights", "`--dataset_weights 0.7 0.3`"),
        ({"dataset_weights": []}, {}, {"dataset_weights": [0.7, 0.3]},
         "was trained with --dataset_weights", "leave `--dataset_weights` out"),
        ({"seed": 1}, {"seed": 1}, {}, "was trained with --seed 1, now it is 42", "`--seed 1`"),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "paged_adamw_8bit"}, {"optim": "sgd"},  # one class, one format
         "has the states of --optim adamw_bnb_8bit, with which --optim sgd", "`--optim adamw_bnb_8bit`"),
        ({"pipeline_chunks": 1}, {"pp": 2}, {"pp": 2, "pipeline_schedule": "interleaved_1f1b"},
         "each GPU would hold other layers", "`--pipeline_schedule 1f1b`, or start"),
        ({"pipeline_chunks": 2}, {"pp": 2, "pipeline_schedule": "interleaved_1f1b"}, {"pp": 2},
         "has the optimizer states of 2 stages per GPU, not of 1: each GPU would hold other layers", TWO_CHUNKS),
        ({}, {"max_steps": 4}, {"max_steps": 3}, "has 3 steps already, --max_steps is 3", "`--max_steps 6`"),
    ],
)  # fmt: skip
def test_a_job_resumes_with_the_settings_of_its_checkpoint_alone(
    written: dict[str, Any], same: dict[str, Any], other: dict[str, Any], message: str, hint: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(path=tmp_path, step=3, manifest=Manifest(step=3, files=(), **written))
    with pytest.raises(ToolkitError, match=message) as refused:
        check_resume_settings(checkpoint, Job.from_values(other), global_batch_size=1, data_parallel_size=1)
    assert str(refused.value.hint).startswith(hint)
    assert ("checkpoint export" in str(refused.value.hint)) == ("max_steps" in other)
    check_resume_settings(checkpoint, Job.from_values(same), global_batch_size=1, data_parallel_size=1)
