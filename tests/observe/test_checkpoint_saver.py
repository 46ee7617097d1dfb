"""Checkpoints that are written while training continues: the same bytes, and complete or absent whenever a rank dies.

`saved_runs` has the same job, saved while training stands still.
"""

import errno
import json
import threading
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from launching import ROOT, SAVED, SAVED_STEPS, accelerate_launch, nightly, nightly_launch, read, torchrun_preset
from safetensors.torch import load_file
from transformers import modeling_utils

from toolkit.checkpoint.hf_checkpoint import MOMENTS
from toolkit.checkpoint.hf_export import export, open_checkpoint, verify
from toolkit.checkpoint.model_definition import MetaModel, ModelFiles
from toolkit.observe.checkpoint_saver import BackgroundSaver
from toolkit.record.checkpoints import checkpoint_files, list_checkpoints
from toolkit.record.timeline import read_timeline

Runs = dict[str, Path]


def launch(*words: str, ends_well: bool = True, **how: Any) -> CompletedProcess[str]:
    ended = accelerate_launch(ROOT / "accelerate_configs" / "fsdp2.yaml", *words, "--async_save", "true", **how)
    assert (ended.returncode == 0) is ends_well, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    return ended


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """Steps, losses and batches of rank 0."""
    lines = (folder / "ranks" / "rank0.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"], row["batch_sha256"]) for row in map(json.loads, lines)]


@nightly_launch
def test_a_background_checkpoint_has_the_same_tensors(saved_job: list[str], saved_runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(*saved_job, "--save_steps", str(SAVED["fsdp2"]), "--output_dir", str(out))
    steps = [SAVED_STEPS, SAVED["fsdp2"]]
    assert [checkpoint.step for checkpoint in list_checkpoints(out)] == steps
    assert rows(out) == rows(saved_runs["fsdp2"])
    for step in steps:
        folders = [run / f"checkpoint-{step}" for run in (out, saved_runs["fsdp2"])]
        ours, theirs = (open_checkpoint(folder, MetaModel(ModelFiles(folder))) for folder in folders)
        assert ours.optimized() == theirs.optimized()
        assert ours.optimizer_step() == theirs.optimizer_step()
        for name in theirs.shapes():
            assert torch.equal(ours.weight(name), theirs.weight(name)), name
        for name in theirs.optimized():
            assert all(torch.equal(ours.moment(name, moment), theirs.moment(name, moment)) for moment in MOMENTS), name
    assert verify(out / f"checkpoint-{SAVED_STEPS}").problems == []
    export(out / f"checkpoint-{SAVED['fsdp2']}", tmp_path / "exported")
    assert verify(tmp_path / "exported").problems == []
    saves = read(out / "run.json")["saves"]
    assert [(save["kind"], save["step"]) for save in saves] == [("checkpoint", 4), ("checkpoint", 6), ("model", 6)]
    for save, checkpoint in zip(saves, reversed(list_checkpoints(out)), strict=False):
        assert save["bytes"] == checkpoint.bytes
        assert 0 < save["write_seconds"] <= save["seconds"]
        assert 0 <= save["waited_seconds"] <= save["stall_seconds"]
    assert not list(out.glob(".saving-*"))


@pytest.mark.launch
@pytest.mark.parametrize("moment", ["rename:0", *nightly("shards:1", "checksums:0")])
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(
    moment: str, saved_job: list[str], saved_runs: Runs, tmp_path: Path
) -> None:
    words = [*saved_job, "--save_steps", "2", "--save_model", "false", "--output_dir", str(tmp_path / "out")]
    launch(*words, ends_well=False, script="signal_while_writing", variables={"TOOLKIT_SIGNAL": f"SIGKILL:4:{moment}"})
    assert (tmp_path / "out" / ".saving-checkpoint-4" / "checkpoint-4").is_dir()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "out")] == [2]
    if "rename" in moment:
        launch(*words, "--resume_from_checkpoint", "latest")
        assert rows(tmp_path / "out") == rows(saved_runs["fsdp2"])
        assert not list((tmp_path / "out").glob(".saving-*"))


@nightly_launch
def test_sigterm_while_a_checkpoint_is_written_completes_it_and_the_next(saved_job: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*saved_job, "--max_steps", "40", "--save_steps", "4", "--output_dir", str(out)]
    variables = {"TOOLKIT_SIGNAL": "SIGTERM:4:checksums:0:1"}
    ended = launch(*words, ends_well=False, script="signal_while_writing", variables=variables)
    failure = read(out / "failure.json")
    assert (ended.returncode, failure["kind"]) == (1, "interrupted")
    found = list_checkpoints(out)
    assert {4, failure["step"]} <= {checkpoint.step for checkpoint in found}
    assert [checkpoint.problem(deep=True) for checkpoint in found] == [None] * len(found)
    assert read_timeline(out / "timeline.jsonl")[-1].phase == "stopped"


@nightly_launch
def test_the_manifest_has_the_files_that_rank_0_does_not_list_yet(saved_job: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(*saved_job, "--save_steps", "2", "--output_dir", str(out), "--max_steps", "2", script="late_listing")
    (checkpoint,) = list_checkpoints(out)
    assert checkpoint.manifest is not None
    names = [path.relative_to(checkpoint.path).as_posix() for path in checkpoint_files(checkpoint.path)]
    assert [name for name in names if "_1" in name]
    assert sorted(entry.path for entry in checkpoint.manifest.files) == sorted(names)
    assert read(out / "run.json")["saves"][0]["bytes"] == checkpoint.bytes
    assert checkpoint.problem(deep=True) is None


@nightly_launch
def test_the_best_checkpoint_written_in_the_background_is_kept_and_loaded(saved_job: list[str], tmp_path: Path) -> None:
    out, words = tmp_path / "out", [*saved_job, "--eval_strategy", "steps", "--eval_steps", "2", "--val_size", "2"]
    words += ["--save_steps", "2", "--save_total_limit", "1", "--load_best_model_at_end", "true"]
    words += ["--greater_is_better", "true"]  # so that the first is the best
    launch(*words, "--output_dir", str(out))
    assert [checkpoint.step for checkpoint in list_checkpoints(out)] == [2]
    loaded = read(out / "fingerprint.json")["logits"]
    assert loaded == read(out / "checkpoint-2" / "manifest.json")["fingerprint"]["logits"]


@nightly_launch
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", None])
def test_ranks_without_shards_of_their_own_refuse_it(preset: str | None, saved_job: list[str], tmp_path: Path) -> None:
    words = [*saved_job, "--async_save", "true", "--output_dir", str(tmp_path / "out")]
    if preset is None:
        ended = torchrun_preset(None, *words)
    else:
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words)
    assert ended.returncode == 1  # the launcher's; a rank's is 2
    assert "error: --async_save " in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def saver() -> BackgroundSaver:
    return BackgroundSaver(torch.nn.Linear(2, 2), timeout=timedelta(seconds=60))


def test_a_full_disk_in_the_background_ends_training_at_the_next_step(saver: BackgroundSaver) -> None:
    def fill_the_disk(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    completed: list[float] = []
    saver.writes.append(fill_the_disk)
    saver.start(lambda _, began: completed.append(began))
    assert saver.thread is not None
    saver.thread.join()
    for ask in (saver.raise_if_failed, saver.wait):
        with pytest.raises(OSError, match="No space left"):
            ask()
    assert not completed


def test_a_checkpoint_that_is_being_written_when_training_fails_is_completed(saver: BackgroundSaver) -> None:
    may_write, completed = threading.Event(), list[float]()
    saver.writes.append(lambda _: may_write.wait(60))
    saver.start(lambda _, began: completed.append(began))
    threading.Timer(0.05, may_write.set).start()
    saver.finish_after_failure()
    assert len(completed) == 1


def test_what_is_deferred_is_copied_and_what_is_gathered_is_not(saver: BackgroundSaver, tmp_path: Path) -> None:
    live, gathered = saver.model.weight.detach(), torch.ones(3)
    with saver.deferred_writes():
        modeling_utils.safe_save_file({"live": live, "gathered": gathered}, str(tmp_path / "model.safetensors"))
    expected = live.clone()
    with torch.no_grad():
        saver.model.weight.add_(1)  # training continues
    (write,) = saver.writes
    write(None)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["live"], expected)
    assert torch.equal(saved["gathered"], gathered)
