"""What `toolkit checkpoint inspect` says of a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoint.inspect import BY_SIZE, inspect_checkpoint
from toolkit.record.checkpoints import add_checksums, checkpoint_files, commit_checkpoint, file_entries, saving_folder


def test_a_checkpoint_without_checksums_is_complete_by_its_sizes(tmp_path: Path) -> None:
    """As a run leaves its last one that is stopped before they are there."""
    folder, checkpoint = saving_folder(tmp_path, 4), tmp_path / "checkpoint-4"
    folder.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        (folder / name).write_bytes(b"12345678")
    commit_checkpoint(folder, checkpoint, {"step": 4, "files": file_entries(folder, checkpoint_files(folder))})
    assert inspect_checkpoint(checkpoint).state == BY_SIZE
    add_checksums(checkpoint)
    assert inspect_checkpoint(checkpoint).state == "complete"
    (checkpoint / "optimizer.pt").write_bytes(b"12345679")
    assert inspect_checkpoint(checkpoint).problem == "optimizer.pt is damaged (checksum)"
