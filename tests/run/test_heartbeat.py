"""Heartbeats and stacks of the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
from heartbeats import STACKS, pulse

from toolkit.run.heartbeat import collect_stacks, main_thread, read_heartbeats, stacks_path, write_heartbeat

# Its stacks are some 400 kB, of which the main thread's come last.
MANY_THREADS = """
import faulthandler, signal, sys, threading, time

faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "w"), all_threads=True)

def sleep_at_depth(depth, started):
    if depth:
        sleep_at_depth(depth - 1, started)
    else:
        started.set()
        time.sleep(600)

def wait_in_the_main_thread():
    print("ready", flush=True)
    time.sleep(600)

for _ in range(60):
    started = threading.Event()
    threading.Thread(target=sleep_at_depth, args=(90, started), daemon=True).start()
    started.wait()
wait_in_the_main_thread()
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
    (tmp_path / "rank1.pulse").write_text('{"rank": ')
    assert read_heartbeats(tmp_path) == [pulse(9), pulse(10)]


def test_a_stopped_process_is_continued_until_its_stacks_are_complete(tmp_path: Path) -> None:
    script = tmp_path / "many_threads.py"
    script.write_text(MANY_THREADS)
    command = [sys.executable, str(script), str(stacks_path(tmp_path, 0))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            found = psutil.Process(process.pid)
            rank = replace(
                pulse(0), host=os.uname().nodename, pid=process.pid, process_started_unix=found.create_time()
            )
            stacks = collect_stacks(tmp_path, [rank])["0"]
            assert [frame.split()[0] for frame in main_thread(stacks)] == ["wait_in_the_main_thread", "<module>"]
            deadline = time.monotonic() + 10
            while found.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
                time.sleep(0.01)
            assert found.status() == psutil.STATUS_STOPPED
        finally:
            process.kill()
