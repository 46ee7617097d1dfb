"""Heartbeats and stacks of the ranks."""

from __future__ import annotations

from pathlib import Path

from toolkit.run.heartbeat import Heartbeat, main_thread, read_heartbeats, write_heartbeat

# As faulthandler writes it: the main thread last, the innermost frame first.
STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/threading.py", line 5 in wait

Current thread 0x00007e (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/site-packages/transformers/trainer.py", line 7 in train
"""


def pulse(rank: int, step: int = 3, micro_steps: int = 4, progress: float = 100.0) -> Heartbeat:
    return Heartbeat(
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


def test_heartbeats_are_read_in_rank_order_without_incomplete_ones(tmp_path: Path) -> None:
    for rank in (10, 9):
        write_heartbeat(tmp_path, pulse(rank))
    (tmp_path / "rank1.pulse").write_text('{"rank": ')
    assert read_heartbeats(tmp_path) == [pulse(9), pulse(10)]
