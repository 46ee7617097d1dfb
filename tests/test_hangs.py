"""What is read from pulses and stacks, and when a run is started again; no process is needed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.launch.conclude import RunResult
from toolkit.launch.process import Outcome
from toolkit.launch.restarts import Restarts, may_restart
from toolkit.runs.checkpoints import SAVING_PREFIX
from toolkit.runs.endings import failure_of_disk, is_disk_full, is_out_of_memory
from toolkit.runs.folder import RunFolder, write_json
from toolkit.runs.hangs import stalled_seconds, suspects
from toolkit.runs.pulses import Pulse, main_thread, read_pulses, write_pulse

# As faulthandler writes it: the main thread last, the innermost frame first.
STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/threading.py", line 5 in wait

Current thread 0x00007e (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/site-packages/transformers/trainer.py", line 7 in train
"""
OUTSIDE = STACKS.replace("torch/distributed/distributed_c10d.py", "site/sleeper/sleep.py")


def pulse(rank: int, step: int = 3, micro_steps: int = 4, progress: float = 100.0) -> Pulse:
    return Pulse(
        rank=rank,
        host="elsewhere",
        pid=1,
        process_started_unix=0.0,
        step=step,
        micro_steps=micro_steps,
        phase="forward",
        progress_unix=progress,
        written_unix=progress,
    )


def test_the_main_threads_frames_are_read_innermost_first() -> None:
    assert main_thread(STACKS) == [
        "barrier (distributed/distributed_c10d.py, line 9)",
        "train (transformers/trainer.py, line 7)",
    ]
    assert main_thread("no answer") == []


def test_a_run_hangs_only_when_no_rank_gets_on() -> None:
    assert stalled_seconds([pulse(0, progress=100), pulse(1, progress=160)], now=170) == 10
    assert stalled_seconds([], now=170) == 0


def test_the_suspect_is_silent_or_behind_or_outside_a_collective() -> None:
    same = [pulse(0), pulse(1)]
    assert suspects(same, silent={0: "its process 1 is gone"}, stacks={}) == [0]
    assert suspects([pulse(0), pulse(1, micro_steps=3)], silent={}, stacks={}) == [1]
    assert suspects(same, silent={}, stacks={"0": OUTSIDE, "1": STACKS}) == [0]
    assert suspects(same, silent={}, stacks={"0": STACKS, "1": STACKS}) == []


def test_pulses_are_read_in_rank_order_and_half_ones_left_out(tmp_path: Path) -> None:
    for rank in (10, 9):
        write_pulse(tmp_path, pulse(rank))
    (tmp_path / "rank1.pulse").write_text('{"rank": ')
    assert read_pulses(tmp_path) == [pulse(9), pulse(10)]


@pytest.mark.parametrize(
    ("status", "killed", "outcome", "again"),
    [
        ("failed", True, {}, True),
        ("failed", False, {}, False),
        ("timed_out", False, {}, True),
        ("timed_out", False, {"timed_out": True}, False),  # `--timeout-minutes`: the time is up
        ("host_out_of_memory", False, {}, True),
        ("out_of_memory", False, {}, False),
        ("diverged", False, {}, False),
        ("attestation_failed", False, {}, False),
        ("failed", True, {"interrupted": True}, False),
    ],
)
def test_only_what_another_start_may_cure_is_started_again(
    status: str, killed: bool, outcome: dict[str, bool], again: bool, tmp_path: Path
) -> None:
    failure = {"kind": status} | ({"seen_by_peer": None} if killed else {})
    result = RunResult(folder=RunFolder(tmp_path), status=status, exit_code=1, seconds=1.0, failure=failure)
    assert may_restart(result, Outcome(exit_code=1, seconds=1.0, **outcome)) is again


def test_a_restart_says_what_is_lost_and_keeps_the_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.prepare()
    for rank, steps in ((0, 3), (1, 2)):
        folder.rank_rows(rank).write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    failure = {"kind": "failed", "rank": 1, "step": 2, "message": "gone", "seen_by_peer": None}
    write_json(folder.failure_json, failure)
    result = RunResult(folder=folder, status="failed", exit_code=1, seconds=1.0, failure=failure)
    restarts, outcome = Restarts(folder, max_restarts=1), Outcome(exit_code=1, seconds=1.0)
    assert restarts.arguments() == []
    assert restarts.again(result, outcome)
    assert restarts.arguments() == ["--resume_from_checkpoint", "latest"]
    assert (folder.read_run() or {})["restarts"] == [
        {"rank": 1, "step": 2, "status": "failed", "message": "gone", "resumed_from_step": 0, "lost_steps": 2}
    ]
    assert folder.rank_rows(1).exists()
    assert not folder.failure_json.exists()
    assert not restarts.again(result, outcome)  # one was allowed


def test_the_words_of_a_machine_without_room_are_known() -> None:
    assert is_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    assert not is_out_of_memory("CUDA out of memory")
    assert is_disk_full(OSError(28, "No space left on device"))
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert is_disk_full(error)
    assert is_disk_full(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))
    assert not is_disk_full(ValueError("no"))


def test_a_full_disk_loses_its_half_checkpoint_only(tmp_path: Path) -> None:
    (tmp_path / f"{SAVING_PREFIX}checkpoint-4").mkdir()
    (tmp_path / "checkpoint-2").mkdir()
    message, _ = failure_of_disk(tmp_path, "rank 0", "save", 4)
    assert message.startswith(f"rank 0 found the disk of {tmp_path} full in phase save, step 4: ")
    assert message.endswith("there is no whole checkpoint")  # the one that is there has no manifest
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_held_folder_is_refused_and_a_released_one_is_not(tmp_path: Path) -> None:
    import os

    from toolkit.errors import ToolkitError

    folder = RunFolder(tmp_path)
    held = folder.hold()
    assert held is not None
    with pytest.raises(ToolkitError, match=f"still going .process {os.getpid()}."):
        folder.hold()
    os.close(held)
    again = folder.hold()
    assert again is not None
    os.close(again)
