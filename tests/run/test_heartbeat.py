"""Heartbeats and stacks of the ranks."""

from __future__ import annotations

from pathlib import Path

from heartbeats import STACKS, pulse

from toolkit.run.heartbeat import main_thread, read_heartbeats, write_heartbeat


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
