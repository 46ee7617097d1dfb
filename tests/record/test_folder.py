"""The run folder: finished runs are never overwritten, and files are never read half written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, read_json, write_json


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def filled(path: Path, run: dict[str, Any]) -> RunFolder:
    """A folder as a run leaves it."""
    folder = RunFolder(path)
    write_json(folder.run_json, run)
    for file in (folder.log, folder.failure_json, folder.attestation_json, folder.rank_rows(0), folder.rank_rows(1)):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}\n")
    (path / "model.safetensors").write_text("weights")
    return folder


def test_a_finished_run_is_refused_and_nothing_in_it_changes(tmp_path: Path) -> None:
    folder = filled(tmp_path / "out", {"status": "completed"})
    before = contents(folder.path)
    with pytest.raises(ToolkitError, match="already holds a finished run") as caught:
        start_attempt(folder)
    assert (
        caught.value.hint == "name another folder: `--output_dir DIR`; `--overwrite_output_dir true` replaces the run"
    )
    assert contents(folder.path) == before
    assert len(before) == 7


def test_a_folder_of_a_running_process_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        folder = filled(tmp_path / "out", {"status": "running", "launcher_pid": living.pid})
        with pytest.raises(ToolkitError, match=rf"still running \(process {living.pid}\)"):
            start_attempt(folder)
        living.communicate(b"\n")
    start_attempt(folder, "resume")  # the process has ended, so the run was killed


def test_a_file_as_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("notes")
    with pytest.raises(ToolkitError, match="is a file"):
        start_attempt(RunFolder(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "notes"


def test_a_folder_under_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes")
    with pytest.raises(ToolkitError, match="cannot be written: Not a directory"):
        start_attempt(RunFolder(tmp_path / "notes" / "out"))


def test_a_folder_that_the_system_refuses_cannot_be_written() -> None:
    with pytest.raises(ToolkitError, match=r"/proc/out/here cannot be written"):
        RunFolder(Path("/proc/out/here")).check_writable()


@pytest.mark.parametrize("depth", ["out", "a/b/out"])
def test_checking_for_write_access_leaves_nothing_behind(depth: str, tmp_path: Path) -> None:
    RunFolder(tmp_path / depth).check_writable()
    assert not list(tmp_path.iterdir())


def test_write_access_to_a_relative_folder_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder(Path("out")).check_writable()
    start_attempt(RunFolder(Path("out")))
    assert (tmp_path / "out" / "ranks").is_dir()


def test_facts_are_merged_into_run_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.update_run(status="running", seed=42)
    assert folder.update_run(status="completed") == {"schema_version": 1, "status": "completed", "seed": 42}
    assert folder.read_run() == {"schema_version": 1, "status": "completed", "seed": 42}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_an_incomplete_json_file_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "comp')
    assert read_json(tmp_path / "run.json") is None
    assert RunFolder(tmp_path).read_run() is None


def test_this_process_itself_does_not_count_as_a_running_one(tmp_path: Path) -> None:
    filled(tmp_path / "out", {"status": "running", "launcher_pid": os.getpid()}).check_unused()


def test_a_locked_folder_is_refused_until_it_is_released(tmp_path: Path) -> None:
    import os

    from toolkit.errors import ToolkitError

    folder = RunFolder(tmp_path)
    held = folder.hold()
    assert held is not None
    with pytest.raises(ToolkitError, match=f"still running .process {os.getpid()}."):
        folder.hold()
    os.close(held)
    again = folder.hold()
    assert again is not None
    os.close(again)


@pytest.mark.parametrize("pid", [0, -1, True, 10**30, 2**22 + 1, 3.5, "x", None, [1]])
def test_a_process_that_cannot_exist_does_not_block_the_folder(pid: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"status": "running", "launcher_pid": pid})
    RunFolder(tmp_path).check_unused()


@pytest.mark.parametrize("kind", ["deep", "pipe", "folder", "device", "bytes"])
def test_a_run_json_that_cannot_be_read_is_none(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"[" * 300_000 if kind == "deep" else b"\xff\xfe")
    assert RunFolder(tmp_path).read_run() is None


def test_a_restart_waits_until_the_lock_of_the_attempt_before_is_released(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    held = folder.hold()
    assert held is not None
    with pytest.raises(ToolkitError, match="still running"):
        folder.hold()
    release = threading.Timer(0.1, os.close, [held])
    release.start()
    taken = folder.hold(wait_seconds=60)
    release.join()
    assert taken is not None
    os.close(taken)
