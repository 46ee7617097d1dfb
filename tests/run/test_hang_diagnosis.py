"""Which rank hangs a run."""

from __future__ import annotations

from toolkit.run.hang_diagnosis import stalled_seconds, suspects
from toolkit.run.heartbeat import Heartbeat

# As faulthandler writes it: the main thread last, the innermost frame first.
STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/threading.py", line 5 in wait

Current thread 0x00007e (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/site-packages/transformers/trainer.py", line 7 in train
"""


OUTSIDE = STACKS.replace("torch/distributed/distributed_c10d.py", "site/sleeper/sleep.py")


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


def test_a_run_is_hung_only_when_no_rank_makes_progress() -> None:
    assert stalled_seconds([pulse(0, progress=100), pulse(1, progress=160)], now=170) == 10
    assert stalled_seconds([], now=170) == 0


def test_the_cause_is_unresponsive_or_behind_or_outside_a_collective() -> None:
    same = [pulse(0), pulse(1)]
    assert suspects(same, unresponsive={0: "its process 1 is gone"}, stacks={}) == [0]
    assert suspects([pulse(0), pulse(1, micro_steps=3)], unresponsive={}, stacks={}) == [1]
    assert suspects(same, unresponsive={}, stacks={"0": OUTSIDE, "1": STACKS}) == [0]
    assert suspects(same, unresponsive={}, stacks={"0": STACKS, "1": STACKS}) == []
