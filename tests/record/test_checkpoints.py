"""A checkpoint is complete, or it is named with what is wrong and the one before is used; and full disks."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.checkpoint.inspect import BY_SIZE, inspect_checkpoint
from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import (
    MANIFEST,
    SAVING_PREFIX,
    add_checksums,
    checkpoint_files,
    commit_checkpoint,
    describe_full_disk,
    file_entries,
    latest_complete,
    list_checkpoints,
    read_checkpoint,
    read_complete_checkpoint,
    remove_unfinished,
    saving_folder,
)
from toolkit.record.status import is_disk_full, is_out_of_memory


def save(output_dir: Path, step: int) -> Path:
    folder = saving_folder(output_dir, step)
    (folder / "shards").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * step)
    (folder / "shards" / "0.distcp").write_bytes(b"shard" * step)
    checkpoint = output_dir / f"checkpoint-{step}"
    commit_checkpoint(folder, checkpoint, {"step": step, "files": file_entries(folder, checkpoint_files(folder))})
    add_checksums(checkpoint)
    return checkpoint


class Killed(BaseException):
    """Ends a save where a process was killed."""


@pytest.mark.parametrize("done", range(9))
def test_a_save_that_is_killed_at_any_step_leaves_a_complete_checkpoint_of_its_name(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`done` counts what the file system was told before: names, contents written to the disk, removals."""
    save(tmp_path, 4)
    save(tmp_path, 8)
    left = done

    def until_killed(change: Callable[..., object]) -> Callable[..., object]:
        def changed(*words: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*words, **named)

        return changed

    with monkeypatch.context() as patched:
        for owner, name in ((Path, "rename"), (Path, "replace"), (os, "fsync"), (shutil, "rmtree")):
            patched.setattr(owner, name, until_killed(getattr(owner, name)))
        with contextlib.suppress(Killed):
            save(tmp_path, 8)
    latest = latest_complete(tmp_path)  # of a launcher, before the next attempt
    assert (latest.step, latest.problem(deep=True)) == (8, None)
    remove_unfinished(tmp_path)  # of that attempt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


# File, what happens to its content (None removes it), and how the problem is reported.
DAMAGES = [
    ("model.safetensors", lambda content: content[:-1], "model.safetensors has 55 bytes, expected 56"),
    ("shards/0.distcp", lambda content: b"x" + content[1:], "shards/0.distcp is damaged (checksum)"),
    ("shards/0.distcp", None, "shards/0.distcp is missing"),
    (MANIFEST, None, "manifest.json is missing: it was not written completely"),
    (MANIFEST, lambda content: content[:40], "manifest.json, line 4: not JSON (Expecting property name"),
    (MANIFEST, lambda _: b"{}", "manifest.json: it has no step, files"),
    (MANIFEST, lambda content: content.replace(b'"step": 8', b'"step": 9'), "manifest.json is damaged (checksum)"),
]


def test_a_saved_checkpoint_is_complete_lists_every_file_and_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    (save(tmp_path, 8) / "model.safetensors").unlink()
    checkpoint = read_checkpoint(save(tmp_path, 8))
    assert (checkpoint.problem(deep=True), checkpoint.step, checkpoint.bytes) == (None, 8, 8 * (7 + 5))
    assert [entry.path for entry in checkpoint.manifest.files] == ["model.safetensors", "shards/0.distcp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-8"]


@pytest.mark.parametrize(("name", "change", "problem"), DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    name: str, change: Callable[[bytes], bytes] | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, damaged = save(tmp_path, 4), save(tmp_path, 8)
    content = (damaged / name).read_bytes()
    (damaged / name).unlink() if change is None else (damaged / name).write_bytes(change(content))
    assert str(read_checkpoint(damaged).problem(deep=True)).startswith(problem)
    if "shards/0.distcp is damaged" in problem:  # no byte is read where a run resumes
        assert read_complete_checkpoint(damaged) == latest_complete(tmp_path) == read_checkpoint(damaged)
        return
    assert latest_complete(tmp_path) == read_checkpoint(before)
    assert f"skipped {damaged}: {problem}" in capsys.readouterr().err
    with pytest.raises(ToolkitError, match="checkpoint-8 cannot be used: ") as refused:
        read_complete_checkpoint(damaged)
    assert refused.value.hint == f"the previous one is complete: `{before}`"
    with pytest.raises(ToolkitError, match="checkpoint-3 cannot be used: it does not exist"):
        read_complete_checkpoint(tmp_path / "checkpoint-3")


def test_a_checkpoint_is_complete_before_its_checksums_are_there(tmp_path: Path) -> None:
    folder, checkpoint = saving_folder(tmp_path, 4), tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    commit_checkpoint(folder, checkpoint, {"step": 4, "files": file_entries(folder, checkpoint_files(folder))})
    saved = latest_complete(tmp_path)
    assert (saved.problem(deep=True), [entry.sha256 for entry in saved.manifest.files]) == (None, [None])
    assert inspect_checkpoint(checkpoint).state == BY_SIZE
    add_checksums(checkpoint)
    assert inspect_checkpoint(checkpoint).state == "complete"
    manifest = read_checkpoint(checkpoint).manifest
    assert [entry.sha256 for entry in manifest.files] == [hashlib.sha256(b"weights").hexdigest()]
    assert sorted(path.name for path in checkpoint.iterdir()) == ["manifest.json", "model.safetensors"]
    shutil.rmtree(checkpoint)  # by the rotation of checkpoints
    with pytest.raises(ToolkitError):
        add_checksums(checkpoint)
    assert not checkpoint.exists()


def test_checkpoints_are_listed_newest_first_and_an_unfinished_save_is_removed(tmp_path: Path) -> None:
    for step in (8, 10, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    shutil.copytree(tmp_path / "checkpoint-8", saving_folder(tmp_path, 11))
    assert list_checkpoints(tmp_path / "none") == []
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [10, 9, 8]
    assert remove_unfinished(tmp_path) == [saving_folder(tmp_path, 11)]
    assert sorted(path.name[11:] for path in tmp_path.iterdir()) == ["10", "8", "9", "best"]


def test_a_just_in_time_save_of_transformers_that_did_not_finish_is_never_used(tmp_path: Path) -> None:
    """`enable_jit_checkpoint` writes into the folder itself, and its own resume does not look at the mark."""
    folder = save(tmp_path, 4)
    (folder / "checkpoint-is-incomplete.txt").write_text("Checkpoint started at step 4 and in progress...")
    assert "did not finish" in str(read_checkpoint(folder).problem())
    assert latest_complete(tmp_path) is None


def test_messages_of_full_disks_and_exhausted_memory_are_recognised() -> None:
    assert is_out_of_memory("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")
    assert not is_out_of_memory("CUDA out of memory")
    assert is_disk_full(OSError(28, "No space left on device"))
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert is_disk_full(error)
    assert is_disk_full(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))
    assert not is_disk_full(ValueError("no"))


def test_on_a_full_disk_only_the_incomplete_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{SAVING_PREFIX}checkpoint-4").mkdir()
    (tmp_path / "checkpoint-2").mkdir()
    message, _ = describe_full_disk(tmp_path, "rank 0", "save", 4)
    assert message.startswith(f"rank 0 found the disk of {tmp_path} full in phase save, step 4: ")
    assert message.endswith("there is no complete checkpoint")  # the one that is there has no manifest
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
