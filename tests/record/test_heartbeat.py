"""Heartbeats and stacks of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from heartbeats import STACKS, pulse
from launching import ROOT

from toolkit.record.heartbeat import collect_stacks, main_thread, read_heartbeats, stacks_path, write_heartbeat

# Its threads create and leave frames all the time.
BUSY_THREADS = """
import json, pathlib, sys, threading, time
from toolkit.record.heartbeat import write_stacks_on_signal

write_stacks_on_signal(open(sys.argv[1], "w"))

class Nested:
    def __init__(self, depth):
        self.inner = depth and Nested(depth - 1)

def create_frames():
    while True:
        Nested(5)
        pathlib.Path("a") / "b"
        json.dumps({"step": [1, 2.5]}, indent=1)

def descend(depth):
    if depth:
        descend(depth - 1)
    else:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)

for _ in range(4):
    threading.Thread(target=create_frames, daemon=True).start()
descend(30)
"""


def test_the_main_threads_frames_are_read_innermost_first() -> None:
    assert main_thread(STACKS) == [
        "barrier (distributed/distributed_c10d.py, line 9)",
        "train (transformers/trainer.py, line 7)",
    ]
    assert main_thread("no answer") == []


def test_heartbeats_are_read_in_rank_order_without_incomplete_ones(tmp_path: Path) -> None:
    for rank in (10, 9):
        write_heartbeat(tmp_path, pulse(rank))
    (tmp_path / "rank1.heartbeat").write_text('{"rank": ')
    assert read_heartbeats(tmp_path) == [pulse(9), pulse(10)]


def test_a_stopped_process_writes_its_main_threads_stack_and_stays_stopped(tmp_path: Path) -> None:
    script = tmp_path / "busy_threads.py"
    script.write_text(BUSY_THREADS)
    command = [sys.executable, str(script), str(stacks_path(tmp_path, 0))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = psutil.Process(process.pid)
            rank = replace(
                pulse(0), host=os.uname().nodename, pid=process.pid, process_started_unix=found.create_time()
            )
            for _ in range(60):
                os.kill(process.pid, signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
                stacks_path(tmp_path, 0).write_text("")
                frames = [frame.split()[0] for frame in main_thread(collect_stacks(tmp_path, [rank])["0"])]
                assert frames[-32:] == [*["descend"] * 31, "<module>"]
                os.waitpid(process.pid, os.WUNTRACED)
                assert found.status() == psutil.STATUS_STOPPED
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("pid", pid) for pid in (-1, 0, True, "1", 10**30, None)),
        *[("step", [[[]]]), ("step", "3"), ("rank", {}), ("host", 5), ("phase", None), ("progress_unix", "now")],
    ],
)
def test_a_heartbeat_that_no_rank_has_written_is_not_read(key: str, value: object, tmp_path: Path) -> None:
    write_heartbeat(tmp_path, pulse(0))
    write_heartbeat(tmp_path, pulse(1))
    path = tmp_path / "rank1.heartbeat"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert [heartbeat.rank for heartbeat in read_heartbeats(tmp_path)] == [0]
