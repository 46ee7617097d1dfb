"""A full disk and exhausted host memory, recognised and reported."""

from __future__ import annotations

from pathlib import Path

from toolkit.record.checkpoints import SAVING_PREFIX, describe_full_disk
from toolkit.record.status import is_disk_full, is_out_of_memory


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
