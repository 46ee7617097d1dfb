"""Which rank hangs a run."""

from __future__ import annotations

from heartbeats import STACKS, pulse

from toolkit.record.hang_diagnosis import stalled_seconds, suspects

OUTSIDE = STACKS.replace("torch/distributed/distributed_c10d.py", "site/sleeper/sleep.py")


def test_a_run_is_hung_only_when_no_rank_makes_progress() -> None:
    assert stalled_seconds([pulse(0, progress=100), pulse(1, progress=160)], now=170) == 10
    assert stalled_seconds([], now=170) == 0


def test_the_cause_is_unresponsive_or_behind_or_outside_a_collective() -> None:
    same = [pulse(0), pulse(1)]
    assert suspects(same, unresponsive={0: "its process 1 is gone"}, stacks={}) == [0]
    assert suspects([pulse(0), pulse(1, micro_steps=3)], unresponsive={}, stacks={}) == [1]
    assert suspects(same, unresponsive={}, stacks={"0": OUTSIDE, "1": STACKS}) == [0]
    assert suspects(same, unresponsive={}, stacks={"0": STACKS, "1": STACKS}) == []
