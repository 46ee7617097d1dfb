"""Run a program from outside: its exit, wall and CPU seconds, memory of all its processes, and its steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SAMPLE_SECONDS = 0.5
# What ends a traceback, or a program's own refusal; the last such line says why it failed.
ERROR_LINE = re.compile(r"^(\[rank\d+\]:\s*)?([\w.]*(Error|Exception|Interrupt|NotImplemented)\b|error:|ValueError).*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Figures of one run."""

    exit_code: int
    wall_seconds: float
    started: float
    """Seconds since the epoch, when the command was started."""
    cpu_seconds: float
    """Of all its processes, from start to exit, as last sampled."""
    peak_pss_bytes: int
    """Highest sum over its processes: memory that they share is counted once."""
    ranks: list[list[dict[str, Any]]]
    """Per rank, what the hook recorded of each step."""
    error: str | None = None


@dataclass(kw_only=True)
class Sampler:
    """Reads memory and CPU time of a process and its descendants until it is stopped."""

    process: psutil.Process
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    peak_pss_bytes: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopped.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                    total += pss_bytes(process.pid)
                    times = process.cpu_times()
                    self.cpu_seconds[process.pid] = times.user + times.system
        self.peak_pss_bytes = max(self.peak_pss_bytes, total)


def pss_bytes(pid: int) -> int:
    """Return a process's proportional set size: pages that it shares with others count in part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def run(argv: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout_seconds: float, cwd: Path) -> Run:
    """Run a command to its end, with its output in the folder's `log`, and read what the hook wrote."""
    steps = folder / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    started, clock = time.time(), time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, env=dict(environment), cwd=cwd, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        sampler = Sampler(process=psutil.Process(process.pid))
        thread = threading.Thread(target=sampler.run, daemon=True)
        thread.start()
        try:
            exit_code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            exit_code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sampler.stopped.set()
            thread.join()
    wall_seconds = time.perf_counter() - clock
    ranks = [json.loads(path.read_text()) for path in sorted(steps.glob("rank*.json"))]
    error = None
    if exit_code == 124:
        error = f"not finished after {timeout_seconds:.0f} s"
    elif exit_code != 0 or not ranks:
        error = error_line(log.read_text(errors="replace"))
    return Run(
        exit_code=exit_code,
        wall_seconds=wall_seconds,
        started=started,
        cpu_seconds=sum(sampler.cpu_seconds.values()),
        peak_pss_bytes=sampler.peak_pss_bytes,
        ranks=ranks,
        error=error,
    )


def error_line(text: str) -> str:
    """Return the line that says why a program ended: the last error that is not only a launcher's report of one.

    >>> error_line("Traceback (most recent call last):\\n  x()\\nValueError: no such engine\\nsee the log")
    'ValueError: no such engine'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR_LINE.match(line) and "ChildFailedError" not in line]
    found = [line for line in errors if "CalledProcessError" not in line] or errors or lines
    return re.sub(r"^\[rank\d+\]:\s*", "", found[-1])[:300] if found else "no output"
