"""Converted checkpoints hold the same weights and moments, and resume with the same losses."""

import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import LORA, SAVED, SAVED_STEPS, losses, read, toolkit

from toolkit.checkpoint.convert import convert
from toolkit.checkpoint.hf_checkpoint import MOMENTS
from toolkit.checkpoint.hf_export import export, open_checkpoint, verify
from toolkit.checkpoint.model_definition import MetaModel, ModelFiles
from toolkit.errors import ToolkitError
from toolkit.presets import load_preset

Runs = dict[str, Path]

# peft reads a deprecated attribute of transformers; `toolkit checkpoint` hides the warning too.
DEPRECATED = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.launch, pytest.mark.filterwarnings(DEPRECATED)]

FILE_SIZE = resource.RLIMIT_FSIZE
# Allowed: 1e-4. Observed: 9e-8, since gradients are summed in another order.
LOSS_TOLERANCE = 1e-5
# Other engines that are read and written: test_sharded_at_load.py, tests/train/test_resume.py.
SAME_ROWS = ["--per_device_train_batch_size", "4"]  # both ranks train on the same rows
CONVERSIONS = [
    pytest.param("zero2", "zero3", 4, ["--per_device_train_batch_size", "1"], marks=pytest.mark.nightly),
    pytest.param("zero2-lora", "fsdp2", 2, LORA, marks=pytest.mark.nightly),
    pytest.param("zero3", "tp", 2, ["--tp", "2", *SAME_ROWS], marks=pytest.mark.nightly),  # sharded at load
    pytest.param("fsdp2", "cp", 2, ["--cp", "2", *SAME_ROWS], marks=pytest.mark.nightly),  # with other rows per rank
    pytest.param("zero3", "ddp", 1, SAME_ROWS, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("source", "preset", "ranks", "words"), CONVERSIONS)
def test_a_run_resumes_under_another_preset_or_world_size_with_the_same_losses(
    saved_runs: Runs, saved_job: list[str], source: str, preset: str, ranks: int, words: list[str], tmp_path: Path
) -> None:
    checkpoint = saved_runs[source] / f"checkpoint-{SAVED[source]}"
    words = [*saved_job, *words, "--save_strategy", "no", "--save_model", "false"]
    words += ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", str(checkpoint)]
    ended = toolkit("train", "--preset", preset, "--num-processes", str(ranks), "--cpu", "--", *words)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    assert f"converting it for {preset} on {ranks}" in ended.stderr
    whole = losses(saved_runs[source])
    assert losses(tmp_path / "out", ranks) == pytest.approx(whole[SAVED[source] :], rel=LOSS_TOLERANCE)
    assert len(whole) == SAVED_STEPS
    assert not (tmp_path / "out" / ".resume").exists()


@pytest.mark.parametrize(
    ("preset", "ranks", "degrees", "message"),
    [
        ("zero3_nvme_offload", 2, {}, "swaps to NVMe"),
        ("fsdp2_hybrid", 3, {}, "needs at least 4"),
        ("single", 2, {}, "in one process"),
        ("ep", 4, {"ep": 3}, "--ep 3 does not divide the 4 processes"),
        ("ddp", 2, {"tp": 2}, "--tp 2 does not work under preset 'ddp': it has no tensor parallelism"),
    ],
)
def test_an_impossible_conversion_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, preset: str, ranks: int, degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(ToolkitError, match=message):
        convert(checkpoint, tmp_path / "out", load_preset(preset), num_processes=ranks, degrees=degrees)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "preset", "num_trained"),
    # An adapter has A and B for seven projections in each of two layers.
    [
        *(("zero2", "fsdp2", 20), ("zero3-lora", "ddp", 28)),
        pytest.param("zero3", "fsdp2", 20, marks=pytest.mark.nightly),
        pytest.param("fsdp2-lora", "ddp", 28, marks=pytest.mark.nightly),
        pytest.param("zero3-lora", "fsdp2", 28, marks=pytest.mark.nightly),
    ],
)
def test_a_converted_checkpoint_holds_the_same_weights_and_moments(
    saved_runs: Runs, source: str, preset: str, num_trained: int, tmp_path: Path
) -> None:
    checkpoint = saved_runs[source] / "checkpoint-6"
    convert(checkpoint, tmp_path / "converted", load_preset(preset), num_processes=4)
    model = MetaModel(ModelFiles(checkpoint))
    before, after = open_checkpoint(checkpoint, model), open_checkpoint(tmp_path / "converted", model)
    assert len(before.optimized()) == num_trained
    for name in before.optimized():
        assert torch.equal(before.weight(name), after.weight(name))
        assert all(torch.equal(before.moment(name, moment), after.moment(name, moment)) for moment in MOMENTS)
    assert before.optimizer_step() == after.optimizer_step() == 6
    manifest = read(tmp_path / "converted" / "manifest.json")
    assert (manifest["preset"], manifest["world_size"]) == (preset, 4)
    assert manifest["converted_from"]["preset"] == source.partition("-")[0]


@pytest.mark.parametrize(
    ("source", "preset", "groups"),
    [("zero3-lora", "fsdp2", 2), pytest.param("fsdp2-lora", "zero2", 1, marks=pytest.mark.nightly)],
)
def test_the_schedule_of_an_adapter_has_as_many_rates_as_the_optimizer_will_have_groups(
    saved_runs: Runs, source: str, preset: str, groups: int, tmp_path: Path
) -> None:
    """Adapters have no parameters without weight decay, and DeepSpeed drops their empty group."""
    convert(saved_runs[source] / "checkpoint-6", tmp_path / "converted", load_preset(preset), num_processes=2)
    before = torch.load(saved_runs[source] / "checkpoint-6" / "scheduler.pt", weights_only=True)
    after = torch.load(tmp_path / "converted" / "scheduler.pt", weights_only=True)
    assert len(before["base_lrs"]) == 3 - groups
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        assert after[name] == before[name][:1] * groups
    assert after["last_epoch"] == before["last_epoch"] == 6
    if preset == "zero2":  # which only DeepSpeed reads: it is not called damaged
        with pytest.raises(ToolkitError, match="was converted for a preset of ZeRO") as refused:
            verify(tmp_path / "converted")
        assert "the checkpoint that it was converted from" in str(refused.value.hint)


def test_a_full_disk_is_reported_and_nothing_is_left(saved_runs: Runs, tmp_path: Path) -> None:
    checkpoint, out, before = saved_runs["zero2"] / "checkpoint-6", tmp_path / "out", resource.getrlimit(FILE_SIZE)
    writes = [partial(convert, preset=load_preset(name), num_processes=4) for name in ("ddp", "zero3", "fsdp2")]
    resource.setrlimit(FILE_SIZE, (400_000, before[1]))  # beyond which writes fail as on a full disk
    try:
        for write in (*writes, export):
            with pytest.raises(ToolkitError, match=r"out cannot be written: .*; everything written so far was removed"):
                write(checkpoint, out)
            assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(FILE_SIZE, before)
