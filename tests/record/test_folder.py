"""The run folder: files are never read half written, and one run at a time holds it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder


def test_a_folder_that_cannot_be_written_is_refused_and_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("notes")
    with pytest.raises(ToolkitError, match="is a file"):
        start_attempt(RunFolder(tmp_path / "out"))
    with pytest.raises(ToolkitError, match="cannot be written: Not a directory"):
        start_attempt(RunFolder(tmp_path / "out" / "deeper"))
    with pytest.raises(ToolkitError, match=r"/proc/out/here cannot be written"):
        RunFolder(Path("/proc/out/here")).check_writable()
    RunFolder(tmp_path / "a" / "b").check_writable()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["notes"]


def test_facts_are_merged_into_run_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.update_run(status="running", seed=42)
    assert folder.update_run(status="completed") == {"schema_version": 1, "status": "completed", "seed": 42}
    assert folder.read_run() == {"schema_version": 1, "status": "completed", "seed": 42}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    folder.run_json.write_text('{"status": "comp')
    assert folder.read_run() is None


def test_a_held_folder_is_refused_until_it_is_released(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_free()
    held = folder.hold()
    assert held is not None
    for refused in (folder.hold, folder.check_free):
        with pytest.raises(ToolkitError, match=f"still running .process {os.getpid()}."):
            refused()
    release = threading.Timer(0.1, os.close, [held])
    release.start()
    taken = folder.hold(wait_seconds=60)  # a restart waits for the attempt before
    release.join()
    assert taken is not None
    os.close(taken)
