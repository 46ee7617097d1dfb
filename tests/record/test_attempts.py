"""The run folder: one run at a time holds it, what may be started in a used one, and what is left of the run before."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.observe.observer import open_record
from toolkit.record.attempts import record_restart, reuse_of, start_attempt
from toolkit.record.folder import RunFolder, write_json


def earlier_run(path: Path, *, steps: int = 3, **facts: Any) -> RunFolder:
    folder = RunFolder(path)
    write_json(folder.run_json, {"status": "interrupted", "launcher_pid": None, "attempt": 1, "seed": 1} | facts)
    folder.log.write_text("earlier log\n")
    (path / "ranks").mkdir(exist_ok=True)
    if steps:
        write_json(folder.attestation_json, {"verdict": "attested"})
        write_json(folder.failure_json, {"kind": "failed"})
        write_json(path / "checkpoint-2" / "weights.json", {"earlier": True})
        write_json(path / "profile" / "rank0.json", {"earlier": True})
    for rank in range(2):
        folder.rank_rows(rank).write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    (path / "notes.txt").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_with_trained_steps_is_refused_and_nothing_in_it_changes(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    with pytest.raises(ToolkitError, match=r"trained 3 steps\n.*--resume_from_checkpoint latest.*overwrite_output_dir"):
        start_attempt(folder)
    assert contents(folder.path) == before
    for rank in range(2):  # a checkpoint alone is a trained run
        folder.rank_rows(rank).unlink()
    with pytest.raises(ToolkitError, match="has trained 0 steps"):
        start_attempt(folder)


def test_a_resumed_run_keeps_rows_checkpoints_log_and_profile(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    start_attempt(folder, "resume")
    after = contents(folder.path)
    assert json.loads(after["run.json"]) == {"schema_version": 1, "attempt": 2, "status": "running"}
    assert before.keys() - after.keys() == {"attestation.json", "failure.json"}
    assert after | {"run.json": before["run.json"]} == {name: before[name] for name in after}


def test_a_run_that_is_given_up_leaves_only_what_is_not_its_own(tmp_path: Path) -> None:
    for status in ("interrupted", "completed"):
        folder = earlier_run(tmp_path / "out", status=status)
        start_attempt(folder, "overwrite")
        assert sorted(contents(folder.path)) == ["notes.txt", "run.json"]
        assert folder.read_run() == {"schema_version": 1, "attempt": 2, "status": "running"}


def test_an_unfinished_run_without_a_checkpoint_starts_over_and_a_finished_one_is_refused(tmp_path: Path) -> None:
    finished = earlier_run(tmp_path / "finished", status="completed")
    shutil.rmtree(finished.path / "checkpoint-2")
    before = contents(finished.path)
    for resumes in (False, True):
        with pytest.raises(ToolkitError, match="already holds a finished run"):
            start_attempt(finished, reuse_of(continues=False, resumes=resumes, overwrite=False))
    with pytest.raises(ToolkitError, match="already holds a finished run") as refused:
        open_record(finished.path, SimpleNamespace(world_size=1, process_index=0), None)
    assert refused.value.hint == "name another folder: `folder = DIR`"
    assert contents(finished.path) == before
    unfinished = earlier_run(tmp_path / "out")
    shutil.rmtree(unfinished.path / "checkpoint-2")
    start_attempt(unfinished, reuse_of(continues=False, resumes=True, overwrite=False))
    untrained = earlier_run(tmp_path / "untrained", steps=0)
    untrained.run_json.write_text('{"attempt": "x"')  # damaged
    start_attempt(untrained)
    for folder in (unfinished, untrained):
        assert sorted(contents(folder.path)) == ["notes.txt", "run.json"]
    assert untrained.read_run() == {"schema_version": 1, "attempt": 1, "status": "running"}


def test_a_file_or_folder_in_the_place_of_ours_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "a" / "train.log").mkdir(parents=True)
    write_json(tmp_path / "b" / "ranks", "mine")
    for taken in (tmp_path / "a" / "train.log", tmp_path / "b" / "ranks"):
        with pytest.raises(ToolkitError, match="cannot be written"):
            start_attempt(RunFolder(taken.parent))
        assert taken.exists()


def trained(path: Path, *, steps: dict[int, int], **facts: Any) -> RunFolder:
    folder = RunFolder(path)
    start_attempt(folder)
    folder.update_run(world_size=len(steps), **facts)
    for rank, number in steps.items():
        rows = [f'{{"step": {step}, "seconds": 0.5}}\n' for step in range(1, number + 1)]
        folder.rank_rows(rank).write_text("".join(rows))
    return folder


def test_an_attempt_that_failed_is_recorded_with_its_world_size_and_lost_steps(tmp_path: Path) -> None:
    folder = trained(tmp_path, steps={0: 7, 1: 6}, status="failed")
    write_json(folder.failure_json, {"kind": "failed", "rank": 1, "step": 6, "message": "gone"})
    ended = {"rank": 1, "step": 6, "status": "failed", "message": "gone", "world_size": 2}
    lost = {"lost_steps": 2, "lost_seconds": 1.5}  # rank 0 had trained step 7 too
    assert record_restart(folder, resumed_step=4) == [ended | {"resumed_from_step": 4} | lost]


def test_ranks_that_could_not_report_have_failed_and_earlier_restarts_stay(tmp_path: Path) -> None:
    folder = trained(tmp_path, steps={0: 5}, status="running", restarts=[{"world_size": 2}])
    folder.rank_rows(1).write_text('{"step": 1}\n')  # of the first attempt, which had two ranks
    first, second = record_restart(folder, resumed_step=4)
    assert first == {"world_size": 2}
    assert (second["status"], second["world_size"], second["lost_steps"]) == ("failed", 1, 1)
    assert "their node was lost" in second["message"]


def test_a_run_that_completed_or_never_trained_is_no_restart(tmp_path: Path) -> None:
    for status, steps in (("failed", {}), ("completed", {0: 3})):
        assert record_restart(trained(tmp_path, steps=steps, status=status), resumed_step=0) == []


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
    os.close(taken)
