"""A checkpoint is converted if another engine, number of processes or layout wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.launch.resume_conversion import ResumingRun, checkpoint_to_convert, checkpoint_to_resume
from toolkit.presets import load_preset

ONE_GROUP = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 1, "ep": 1}
FSDP2: dict[str, Any] = {"preset": "fsdp2", "engine": "fsdp2", "sharding": "full_shard", "world_size": 2}
DDP: dict[str, Any] = {"preset": "ddp", "engine": "ddp", "sharding": "replicate", "world_size": 2}
ZERO2: dict[str, Any] = {"preset": "zero2", "engine": "deepspeed", "sharding": "shard_grad_op", "world_size": 2}
CP = FSDP2 | {"preset": "cp", "layout": {**ONE_GROUP, "cp": 2}, "data_parallel_size": 1}
AT_LOAD = FSDP2 | {"preset": "fsdp2_tp", "world_size": 4, "sharded_at_load": True, "data_parallel_size": 2}
AT_LOAD |= {"layout": {**ONE_GROUP, "dp_shard": 2, "tp": 2}}


def converts(folder: Path, written: dict[str, Any], preset: str, ranks: int, batch: int = 8, **degrees: int) -> bool:
    """Return True if a checkpoint of 2 rows and 2 accumulation steps per group is converted for a preset."""
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 2, "files": [], **sizes, **written}))
    arguments = {"resume_from_checkpoint": str(checkpoint), "output_dir": str(folder), **degrees}
    run = ResumingRun.of(Job.from_values(arguments), load_preset(preset), num_processes=ranks, global_batch_size=batch)
    return checkpoint_to_convert(checkpoint_to_resume(Job.from_values(arguments)), run) is not None


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
    assert converts(tmp_path, written, preset, ranks, **degrees) is expected


def test_the_batch_is_counted_by_groups_of_ranks_with_different_rows(tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    assert converts(tmp_path / "same", CP, "fsdp2", 2, batch=4)  # cp: one group of 2 rows, 2 accumulation steps
    (tmp_path / "other").mkdir()
    with pytest.raises(ToolkitError, match="was trained with 4 sequences per step over all ranks, now it is 8"):
        converts(tmp_path / "other", CP, "fsdp2", 2, batch=8)
