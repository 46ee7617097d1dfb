"""Heartbeats and stacks of the ranks, and which rank hangs a run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from heartbeats import STACKS, pulse

from toolkit.record.heartbeat import (
    collect_stacks,
    main_thread,
    read_heartbeats,
    stacks_path,
    stalled_seconds,
    suspects,
    unresponsive_reason,
    write_heartbeat,
)

OUTSIDE = STACKS.replace("torch/distributed/distributed_c10d.py", "site/sleeper/sleep.py")


def test_the_main_threads_frames_are_read_innermost_first() -> None:
    assert main_thread(STACKS) == [
        "barrier (distributed/distributed_c10d.py, line 9)",
        "train (transformers/trainer.py, line 7)",
    ]
    assert main_thread("no answer") == []


def test_a_process_writes_its_stacks_when_it_is_signalled_and_a_stopped_one_cannot(tmp_path: Path) -> None:
    program = "import faulthandler, signal, sys, time; file = open(sys.argv[1], 'w')"
    program += "; faulthandler.register(signal.SIGUSR2, file); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(stacks_path(tmp_path, 0))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            started = psutil.Process(process.pid).create_time()
            facts = {"host": os.uname().nodename, "pid": process.pid, "process_started_unix": started}
            rank = pulse(0).model_copy(update=facts)
            assert "<module>" in main_thread(collect_stacks(tmp_path, [rank], seconds=60.0)["0"])[-1]
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert unresponsive_reason(rank, now=rank.written_unix) == f"its process {process.pid} is stopped"
            stacks_path(tmp_path, 0).write_text("")
            assert collect_stacks(tmp_path, [rank], seconds=0.1) == {"0": "no answer"}
        finally:
            process.kill()


@pytest.mark.parametrize(
    "changes",
    [*({"pid": pid} for pid in (-1, 0, True, 10**30, None)), {"step": "3"}, {"progress_unix": "now"}, "cut off"],
)
def test_heartbeats_are_read_in_rank_order_without_one_that_no_rank_has_written(changes: Any, tmp_path: Path) -> None:
    for rank in (10, 9, 1):
        write_heartbeat(tmp_path, pulse(rank))
    path = tmp_path / "rank1.heartbeat"
    text = path.read_text()
    path.write_text(text[:9] if changes == "cut off" else json.dumps(json.loads(text) | changes))
    assert read_heartbeats(tmp_path) == [pulse(9), pulse(10)]


def test_no_rank_of_a_hung_run_makes_progress_and_the_cause_is_unresponsive_behind_or_outside_a_collective() -> None:
    assert stalled_seconds([pulse(0, progress=100), pulse(1, progress=160)], now=170) == 10
    assert stalled_seconds([], now=170) == 0
    same = [pulse(0), pulse(1)]
    assert suspects(same, unresponsive={0: "its process 1 is gone"}, stacks={}) == [0]
    assert suspects([pulse(0), pulse(1, micro_steps=3)], unresponsive={}, stacks={}) == [1]
    assert suspects(same, unresponsive={}, stacks={"0": OUTSIDE, "1": STACKS}) == [0]
    assert suspects(same, unresponsive={}, stacks={"0": STACKS, "1": STACKS}) == []
