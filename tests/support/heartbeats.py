"""Heartbeats and stacks of ranks, as a run would write them."""

from toolkit.record.heartbeat import Heartbeat

# As faulthandler writes it: the main thread last, the innermost frame first.
STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/lib/threading.py", line 5 in wait

Current thread 0x00007e (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/site-packages/transformers/trainer.py", line 7 in train
"""


def pulse(rank: int, step: int = 3, micro_steps: int = 4, progress: float = 100.0) -> Heartbeat:
    where = {"rank": rank, "host": "elsewhere", "pid": 1, "process_started_unix": 0.0, "written_unix": progress}
    return Heartbeat(**where, step=step, micro_steps=micro_steps, phase="forward", progress_unix=progress)
