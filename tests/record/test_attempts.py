"""Attempts in one run folder: the earlier run is never lost, wherever the new one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, toolkit

from toolkit.errors import ToolkitError
from toolkit.launch.exit_status import RunResult
from toolkit.launch.launch import Restarts
from toolkit.launch.process import ProcessResult
from toolkit.record import status
from toolkit.record.attempts import begin_training, settle, start_attempt
from toolkit.record.folder import RunFolder, read_json, write_json

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove")


def earlier_run(path: Path, *, steps: int = 3, **facts: Any) -> RunFolder:
    """A folder as an interrupted run of two ranks leaves it."""
    folder = RunFolder(path)
    write_json(folder.run_json, {"status": "interrupted", "launcher_pid": None, "seed": 1} | facts)
    folder.log.write_text("earlier log\n")
    if steps:
        write_json(folder.attestation_json, {"verdict": "attested"})
        write_json(path / "checkpoint-2" / "weights.json", {"earlier": True})
        write_json(path / "profile" / "rank0.json", {"earlier": True})
    (path / "ranks").mkdir(exist_ok=True)
    for rank in range(2):
        folder.rank_rows(rank).write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    (path / "notes.txt").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Name and content of each file below a folder that holds a result: neither the lock nor other attempts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith("attempts/")}


def train(folder: RunFolder, *, continues: bool) -> None:
    """What launcher and rank 0 do to the folder, up to the first row."""
    start_attempt(folder)
    folder.update_run(status="running", seed=2)
    log = folder.log if continues else folder.current().log
    with log.open("a") as file:
        file.write("new log\n")
    begin_training(folder, continues=continues)


def killed_before(change: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before its n-th change of the file system; False if it had fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child only touches files
        child = os.fork()
    if child == 0:
        left = change

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[1], str) and not arguments[1].startswith("r")
            if event in CHANGES or writes:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(count)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, ended = os.waitpid(child, 0)
    assert ended in (0, signal.SIGKILL), f"the child failed: {ended}"
    return ended != 0


@pytest.mark.parametrize("ended", sorted(set(status.STATUSES) - {"completed"}))
def test_an_earlier_run_is_kept_once_the_new_one_has_trained(ended: str, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out", status=ended)
    before = contents(folder.path)
    train(folder, continues=False)
    after = contents(folder.path)
    assert contents(folder.path / "attempts" / "001") == {n: text for n, text in before.items() if n != "notes.txt"}
    assert after.pop("notes.txt") == b"mine"
    assert after.pop("train.log") == b"new log\n"
    assert json.loads(after.pop("run.json")) == {"schema_version": 1, "attempt": 2, "status": "running", "seed": 2}
    assert not after
    assert [path.name for path in (folder.path / "attempts").iterdir()] == ["001"]


def test_an_attempt_that_never_trained_changes_nothing_and_keeps_its_log(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    start_attempt(folder)
    folder.update_run(status="failed", seed=2)
    folder.current().log.write_text("new log\n")
    write_json(folder.current().failure_json, {"kind": "failed"})
    assert contents(folder.path) == before
    files = settle(folder)
    assert contents(folder.path) == before
    assert files == RunFolder(folder.path / "attempts" / "002")
    assert sorted(contents(files.path)) == ["failure.json", "run.json", "train.log"]
    assert files.read_run() == {"schema_version": 1, "attempt": 2, "status": "failed", "seed": 2}
    assert folder.current() == folder


def test_attempts_are_numbered_in_the_order_of_their_start(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    start_attempt(folder)
    settle(folder)  # 2 never trains
    train(folder, continues=False)
    folder.rank_rows(0).write_text('{"step": 1}\n')
    train(folder, continues=False)
    assert (folder.read_run() or {})["attempt"] == 4
    kept = sorted(path.name for path in (folder.path / "attempts").iterdir())
    assert kept == ["001", "002", "003"]
    assert [(RunFolder(folder.path / "attempts" / name).read_run() or {}).get("attempt") for name in kept] == [
        None,
        2,
        3,
    ]


def test_the_files_of_an_attempt_that_never_trained_make_way_at_once(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out", steps=0, attempt=1)
    start_attempt(folder)
    assert folder.current() == folder
    assert folder.read_run() == {"schema_version": 1, "attempt": 2}
    assert sorted(contents(folder.path / "attempts" / "001")) == ["run.json", "train.log"]


def test_a_resumed_run_keeps_rows_checkpoints_and_log_in_place(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    train(folder, continues=True)
    after = contents(folder.path)
    assert after.pop("train.log") == b"earlier log\nnew log\n"
    assert (folder.read_run() or {})["attempt"] == 2
    assert sorted(contents(folder.path / "attempts" / "001")) == ["attestation.json", "run.json"]
    unchanged = {name: text for name, text in before.items() if name not in ("run.json", "attestation.json")}
    assert {name: text for name, text in after.items() if name != "run.json"} == {
        name: text for name, text in unchanged.items() if name != "train.log"
    }


@pytest.mark.parametrize("continues", [False, True])
def test_an_attempt_killed_anywhere_loses_no_file_of_either_run(continues: bool, tmp_path: Path) -> None:
    whole = contents(earlier_run(tmp_path / "earlier").path)
    kept = {name for name in whole if name != "notes.txt"}
    if continues:
        kept = {"run.json", "attestation.json"}
    outcomes = set()
    for point in range(200):
        folder = RunFolder(tmp_path / f"killed-{point}")
        shutil.copytree(tmp_path / "earlier", folder.path)
        alive = not killed_before(point, lambda folder=folder: train(folder, continues=continues))
        settle(folder)
        after, aside = contents(folder.path), contents(folder.path / "attempts" / "001")
        after["train.log"] = after["train.log"].replace(b"earlier log\nnew log\n", b"earlier log\n")
        leftover = [path for path in (folder.path / "attempts").glob(".*")]
        finished = {name: text for name, text in after.items() if not Path(name).name.startswith(".")}
        if aside:
            assert aside == {name: whole[name] for name in kept}, point
            assert json.loads(finished["run.json"])["attempt"] == 2
        else:
            assert finished == whole, point
        outcomes.add(bool(aside))
        assert folder.current() == folder
        assert not (folder.path / "attempts" / "starting.json").exists()
        assert len(leftover) <= 1  # of a file that was being written
        if alive:
            break
    assert alive
    assert outcomes == {False, True}


def test_settling_that_is_killed_is_repeated_by_the_next_start(tmp_path: Path) -> None:
    whole = contents(earlier_run(tmp_path / "earlier").path)
    kept = {name: text for name, text in whole.items() if name != "notes.txt"}
    points, running = 0, True
    for point in range(0, 200, 7):
        killed = RunFolder(tmp_path / f"killed-{point}")
        shutil.copytree(tmp_path / "earlier", killed.path)
        running = killed_before(point, lambda folder=killed: train(folder, continues=False))
        for again in range(40) if running else ():
            folder = RunFolder(tmp_path / f"twice-{point}-{again}")
            shutil.copytree(killed.path, folder.path)
            alive = not killed_before(again, lambda folder=folder: settle(folder))
            settle(folder)
            aside = contents(folder.path / "attempts" / "001")
            after = {name: text for name, text in contents(folder.path).items() if not Path(name).name.startswith(".")}
            assert aside == kept or (not aside and after == whole), (point, again)
            points += 1
            shutil.rmtree(folder.path)
            if alive:
                break
        if not running:
            break
    assert not running
    assert points > 20


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"attempt": "../../..", "earlier": 1},
        {"attempt": 2, "earlier": 0},
        {"attempt": True, "earlier": 1},
        {"attempt": 2, "earlier": 1, "more": 1},
        {"attempt": 2.0, "earlier": 1},
    ],
    ids=str,
)
def test_a_record_of_attempts_that_is_not_ours_is_refused_and_nothing_changes(
    content: dict[str, Any], tmp_path: Path
) -> None:
    folder = earlier_run(tmp_path / "out")
    write_json(folder.starting_json, content)
    before = contents(folder.path)
    with pytest.raises(ToolkitError, match="expected the numbers of two attempts"):
        start_attempt(folder)
    assert contents(folder.path) == before
    assert read_json(folder.starting_json) == content


@pytest.mark.parametrize("text", ["", "{", '{"attempt": "x"}', '{"attempt": -3}', '{"attempt": true}', "\0" * 100])
def test_a_damaged_run_json_is_kept_like_any_other(text: str, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    folder.run_json.write_text(text)
    before = contents(folder.path)
    train(folder, continues=False)
    before.pop("notes.txt")
    assert contents(folder.path / "attempts" / "001") == before


def test_a_number_that_is_taken_is_not_used_again(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out", attempt=1)
    shutil.copytree(folder.path, tmp_path / "first")
    shutil.copytree(tmp_path / "first", folder.path / "attempts" / "001")
    train(folder, continues=False)
    assert contents(folder.path / "attempts" / "001") == contents(tmp_path / "first")
    assert (folder.path / "attempts" / "002" / "run.json").exists()
    assert (folder.read_run() or {})["attempt"] == 3


@pytest.mark.parametrize("place", ["attempts", "run.lock", "ranks", "run.json", "train.log", "ranks/rank0.heartbeat"])
def test_a_file_or_folder_in_the_place_of_ours_is_refused_or_moved_but_never_lost(place: str, tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    if place == "ranks":
        shutil.rmtree(folder.path / "ranks")
    (folder.path / place).unlink(missing_ok=True)
    if place in ("attempts", "ranks"):
        (folder.path / place).write_text("mine")
    else:
        (folder.path / place).mkdir()
        (folder.path / place / "mine").write_text("mine")
    with contextlib.suppress(ToolkitError):
        lock = folder.hold()
        train(folder, continues=False)
        assert lock is not None
        os.close(lock)
    (folder.path / "notes.txt").unlink()
    assert any(path.read_text() == "mine" for path in folder.path.rglob("*") if path.is_file())


def test_a_restart_before_the_first_step_does_not_resume_from_the_earlier_run(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    start_attempt(folder)
    failure = {"kind": "failed", "rank": 1, "step": 0, "message": "gone", "seen_by_peer": None}
    write_json(folder.current().failure_json, failure)
    result = RunResult(folder=folder, status="failed", exit_code=1, seconds=1.0, failure=failure)
    assert Restarts(folder, max_restarts=1).prepare_next(result, ProcessResult(exit_code=1, seconds=1.0))
    assert contents(folder.path) == before
    assert not folder.current().failure_json.exists()
    (restart,) = (folder.current().read_run() or {})["restarts"]
    assert (restart["resumed_from_step"], restart["lost_steps"]) == (0, 0)


@pytest.mark.launch
def test_an_earlier_run_stays_until_another_has_trained_whoever_starts_it(
    tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    """Started by `toolkit train` and fails in its ranks, then trains; then trains under a plain `accelerate launch`."""
    folder = earlier_run(tmp_path / "out")
    before = contents(folder.path)
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    (tmp_path / "job.yaml").write_text(
        f"dataset: {faq_alpaca}\noutput_dir: {folder.path}\nmax_seq_length: 64\nmax_steps: 2\n"
        "per_device_train_batch_size: 1\nsave_strategy: 'no'\nsave_model: false\n"
    )
    job = [str(tmp_path / "job.yaml"), "--model_name_or_path"]
    options = ["train", "--preset", "ddp", "--cpu", "--num-processes", "2", "--"]

    failed = toolkit(*options, *job, str(broken), cwd=tmp_path)
    assert failed.returncode == 1, failed.stderr
    assert {name: text for name, text in contents(folder.path).items() if name in before} == before
    attempt = folder.path / "attempts" / "002"
    assert f"still holds the earlier run, unchanged; the files of this one are in {attempt}" in failed.stderr
    assert "mismatch" in (attempt / "train.log").read_text()
    assert read_json(attempt / "failure.json")["phase"] == "load"

    trained = toolkit(*options, *job, str(tiny_model), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    kept = contents(folder.path / "attempts" / "001")
    assert kept == {name: text for name, text in before.items() if name != "notes.txt"}
    run = folder.read_run() or {}
    assert (run["status"], run["attempt"], run["measured"]["steps"]) == ("completed", 3, 2)
    assert [len(folder.rank_rows(rank).read_text().splitlines()) for rank in range(2)] == [2, 2]
    assert "step 2/2" in folder.log.read_text()

    folder.update_run(status="interrupted")
    before = contents(folder.path)
    config_file = ROOT / "accelerate_configs" / "ddp.yaml"
    plain = accelerate_launch(config_file, *job, str(tiny_model), cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    third = contents(folder.path / "attempts" / "003")
    assert third.items() <= before.items()
    files = {"run.json", "train.log", "timeline.jsonl", "attestation.json"}
    assert files | {"ranks/rank0.jsonl", "ranks/rank1.jsonl"} == third.keys()
    run = folder.read_run() or {}
    assert (run["status"], run["attempt"], run["measured"]["steps"]) == ("completed", 4, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "job.yaml", "out"]
