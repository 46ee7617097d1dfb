"""Run a program from outside: its exit, wall and CPU seconds, memory of all its processes, and its steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    started: float  # seconds since the epoch, when the command was started
    cpu_seconds: float  # of all its processes, from start to exit, as last sampled
    peak_pss_bytes: int  # highest sum over its processes: memory that they share is counted once
    ranks: list[list[dict[str, Any]]]  # per rank, what the hook recorded of each step
    error: str | None = None


def run(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_seconds: float,
    cwd: Path,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Run:
    """Run a command to its end, with its output in the folder's `log`, and read what the hook wrote."""
    steps, log = folder / "steps", folder / "log"
    steps.mkdir(parents=True, exist_ok=True)
    started, clock = time.time(), time.perf_counter()
    exit_code, cpu_seconds, peak_pss_bytes = None, dict[int, float](), 0
    with log.open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(argv, env=dict(environment), cwd=cwd, **streams)
        try:
            while exit_code is None:
                peak_pss_bytes = max(peak_pss_bytes, sample(process.pid, cpu_seconds))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(sample_seconds)
                if exit_code is None and time.perf_counter() - clock > timeout_seconds:
                    exit_code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall_seconds = time.perf_counter() - clock
    ranks = [json.loads(path.read_text()) for path in sorted(steps.glob("rank*.json"))]
    error = None
    if exit_code == 124:
        error = f"not finished after {timeout_seconds:.0f} s"
    elif exit_code != 0 or not ranks:
        error = error_line(log.read_text(errors="replace"))
    seconds = {"wall_seconds": wall_seconds, "started": started, "cpu_seconds": sum(cpu_seconds.values())}
    return Run(exit_code=exit_code, **seconds, peak_pss_bytes=peak_pss_bytes, ranks=ranks, error=error)


def sample(pid: int, cpu_seconds: dict[int, float]) -> int:
    """Note the CPU seconds of a process and its descendants; return the bytes of memory that they hold."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                total += process.memory_full_info().pss  # pages that it shares with others count in part
                times = process.cpu_times()
                cpu_seconds[process.pid] = times.user + times.system
    return total


def error_line(text: str) -> str:
    """Return the line that says why a program ended: the last error that is not only a launcher's report of one.

    >>> error_line("Traceback (most recent call last):\\n  x()\\nValueError: no such engine\\nsee the log")
    'ValueError: no such engine'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR_LINE.match(line) and "ChildFailedError" not in line]
    found = [line for line in errors if "CalledProcessError" not in line] or errors or lines
    return re.sub(r"^\[rank\d+\]:\s*", "", found[-1])[:300] if found else "no output"
