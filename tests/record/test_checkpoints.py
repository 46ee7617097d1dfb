"""A checkpoint is complete, or it is named with what is wrong and the one before is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import (
    MANIFEST,
    checkpoint_files,
    commit_checkpoint,
    file_entries,
    latest_complete,
    list_checkpoints,
    read_checkpoint,
    read_complete_checkpoint,
    remove_unfinished,
    saving_folder,
)


def save(output_dir: Path, step: int) -> Path:
    folder = saving_folder(output_dir, step)
    (folder / "shards").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * step)
    (folder / "shards" / "0.distcp").write_bytes(b"shard" * step)
    checkpoint = output_dir / f"checkpoint-{step}"
    commit_checkpoint(folder, checkpoint, {"step": step, "files": file_entries(folder, checkpoint_files(folder))})
    return checkpoint


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "shards" / "0.distcp"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def remove_a_file(checkpoint: Path) -> None:
    (checkpoint / "shards" / "0.distcp").unlink()


def remove_the_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def cut_the_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text()[:40])


def change_the_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 8', '"step": 9'))


def empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("{}")


DAMAGES = [
    (truncate, "model.safetensors has 55 bytes, expected 56"),
    (flip_a_byte, "shards/0.distcp is damaged (checksum)"),
    (remove_a_file, "shards/0.distcp is missing"),
    (remove_the_manifest, "manifest.json is missing: it was not written completely"),
    (cut_the_manifest, "manifest.json, line 4: not JSON (Expecting property name enclosed in double quotes, column 3)"),
    (empty_the_manifest, "manifest.json: it has no step, files"),
    (change_the_manifest, "manifest.json is damaged (checksum)"),
]


def test_a_saved_checkpoint_is_complete_and_lists_every_file(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path, 8))
    assert checkpoint.problem(deep=True) is None
    assert checkpoint.step == 8
    assert checkpoint.bytes == 8 * (7 + 5)
    assert checkpoint.manifest is not None
    assert [entry.path for entry in checkpoint.manifest.files] == ["model.safetensors", "shards/0.distcp"]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    damage: Callable[[Path], None], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, damaged = save(tmp_path, 4), save(tmp_path, 8)
    damage(damaged)
    assert read_checkpoint(damaged).problem(deep=True) == problem
    if damage is flip_a_byte:
        assert read_checkpoint(damaged).problem() is None  # found only by reading every byte
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.path == before
    assert capsys.readouterr().err == f"skipped {damaged}: {problem}\n"


def test_a_damaged_checkpoint_given_by_path_is_refused_naming_the_previous_one(tmp_path: Path) -> None:
    before, damaged = save(tmp_path, 4), save(tmp_path, 8)
    truncate(damaged)
    with pytest.raises(ToolkitError, match=r"checkpoint-8 cannot be used: model\.safetensors has 55 bytes") as refused:
        read_complete_checkpoint(damaged)
    assert refused.value.hint == f"the previous one is complete: `{before}`"


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="checkpoint-3 cannot be used: it does not exist"):
        read_complete_checkpoint(tmp_path / "checkpoint-3")


def test_checkpoints_are_listed_newest_first_by_number(tmp_path: Path) -> None:
    for step in (8, 10, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert list_checkpoints(tmp_path / "none") == []
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [10, 9, 8]


def test_an_unfinished_save_is_not_a_checkpoint_and_is_removed(tmp_path: Path) -> None:
    whole = save(tmp_path, 4)
    shutil.copytree(whole, saving_folder(tmp_path, 8))
    assert [checkpoint.path for checkpoint in list_checkpoints(tmp_path)] == [whole]
    assert remove_unfinished(tmp_path) == [saving_folder(tmp_path, 8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4"]


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    truncate(save(tmp_path, 4))
    assert read_checkpoint(save(tmp_path, 4)).problem(deep=True) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4"]


def test_a_just_in_time_save_of_transformers_that_did_not_finish_is_never_used(tmp_path: Path) -> None:
    """`enable_jit_checkpoint` writes into the folder itself, and its own resume does not look at the mark."""
    folder = save(tmp_path, 4)
    assert read_checkpoint(folder).problem() is None
    (folder / "checkpoint-is-incomplete.txt").write_text("Checkpoint started at step 4 and in progress...")
    assert "did not finish" in str(read_checkpoint(folder).problem())
    assert latest_complete(tmp_path) is None
