"""Report a failure from the rank that has it: failure.json, run.json's status, one message and the exit code.

The first rank to create failure.json reports; the others end quietly with the same exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import torch

from toolkit.errors import AttestationFailed, OutOfMemory, RunFailed, ToolkitError
from toolkit.files.secrets import hide_secrets
from toolkit.observe.progress import Progress
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import Heartbeat, is_superseded, peak_resident_bytes, read_heartbeats
from toolkit.record.resource_exhaustion import (
    describe_full_disk,
    describe_host_oom,
    describe_latest_checkpoint,
    is_disk_full,
    is_out_of_memory,
)

RESUME = "the same command with `--resume_from_checkpoint latest` resumes from the last checkpoint"
# gloo's and the NCCL watchdog's messages (torch 2.13).
COLLECTIVE_TIMEOUT_MESSAGES = ("Timed out waiting", "Watchdog caught collective operation timeout")
# Another rank's connection breaks shortly before its process is gone.
LOST_RANK_GRACE_SECONDS = 0.2


class Diverged(RunFailed):
    """The loss, the gradient or the weights are no longer finite. `rows` are the row numbers of the step, from 0."""

    def __init__(self, message: str, *, hint: str | None = None, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.rows = rows


class Interrupted(RunFailed):
    """A signal ended the run."""


def status_of(error: BaseException) -> str:
    """Return the run status that an exception means."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return status.OUT_OF_MEMORY
    if isinstance(error, (MemoryError, OutOfMemory)) or is_out_of_memory(str(error)):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, AttestationFailed):
        return status.ATTESTATION_FAILED
    if isinstance(error, (FloatingPointError, Diverged)):
        return status.DIVERGED
    # a collective gave up on a rank after `--ddp_timeout`
    if isinstance(error, RuntimeError) and any(words in str(error) for words in COLLECTIVE_TIMEOUT_MESSAGES):
        return status.TIMED_OUT
    return status.INTERRUPTED if isinstance(error, (KeyboardInterrupt, Interrupted)) else status.FAILED


_REPORTING = threading.Lock()  # the thread that handles signals may report at the same time as the main thread


def report_failure(error: BaseException, progress: Progress) -> int:
    """Write failure.json and run.json's status unless another rank has, print the cause, and return the exit code."""
    kind = status_of(error)
    invalid_input = isinstance(error, ToolkitError) and not isinstance(error, (RunFailed, OutOfMemory))
    code = status.exit_code_of(kind, invalid_input=invalid_input)
    rank = int(os.environ.get("RANK", "0"))
    with _REPORTING:
        if _claim_report(progress, _failure(error, kind, rank, progress, invalid_input)):
            where = f"rank {rank}, phase {progress.phase}, step {progress.step}"
            unexpected = f"error ({where}): {type(error).__name__}: {error}\n{traceback.format_exc()}"
            _print(f"error: {error}" if isinstance(error, ToolkitError) else unexpected)
            _write_status(progress, kind, code)
    return code


def report_hang(failure: dict[str, Any], progress: Progress) -> None:
    """Report a hang that the watchdog found; `failure` is the content of failure.json."""
    if _claim_report(progress, failure):
        _print(f"error: {failure['message']}\n  hint: {failure['hint']}")
        _write_status(progress, status.TIMED_OUT, status.exit_code_of(status.TIMED_OUT))


def _claim_report(progress: Progress, failure: dict[str, Any]) -> bool:
    """Create failure.json; return False if another rank has. Before there is a folder, rank 0 reports.

    A rank whose attempt a restart has replaced says nothing: the folder is no longer its own.
    """
    if progress.output_dir is None or not progress.output_dir.is_dir():
        return int(os.environ.get("RANK", "0")) == 0
    if is_superseded(progress.output_dir / "ranks", progress.attempt_id):
        return False
    try:
        with RunFolder(progress.output_dir).failure_json.open("x", encoding="utf-8") as file:
            json.dump(hide_secrets(failure), file, indent=2)
    except FileExistsError:
        return False
    except OSError:  # a full disk: the message is printed at least
        return True
    return True


def _write_status(progress: Progress, kind: str, code: int) -> None:
    if progress.output_dir is not None:
        with contextlib.suppress(OSError):  # a full disk: the launcher, if there is one, reports it too
            RunFolder(progress.output_dir).update_run(status=kind, exit_code=code)


def _print(text: str) -> None:
    print(hide_secrets(text), file=sys.stderr, flush=True)


def _failure(error: BaseException, kind: str, rank: int, progress: Progress, invalid_input: bool) -> dict[str, Any]:
    """Return the content of failure.json."""
    message = error.message if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
    hint = getattr(error, "hint", None)
    if isinstance(error, Diverged) and progress.output_dir is not None:
        hint = f"{hint}; {describe_latest_checkpoint(progress.output_dir)}"
    if kind == status.HOST_OUT_OF_MEMORY:
        message, hint = describe_host_oom(f"rank {rank}", progress.phase, progress.step, message)
    elif (lost := _lost_rank(error, kind, progress, rank)) is not None:
        rank, hint = lost.rank, RESUME
        message = f"rank {lost.rank} is gone: its process {lost.pid} was ended from outside"
    elif is_disk_full(error) and progress.output_dir is not None:
        message, hint = describe_full_disk(progress.output_dir, f"rank {rank}", progress.phase, progress.step)
    memory = progress.memory_by_phase
    on_host = kind == status.HOST_OUT_OF_MEMORY or not torch.cuda.is_available()
    return {
        "kind": kind,
        "phase": progress.phase,
        "step": progress.step,
        "rank": rank,
        "message": message,
        "hint": hint,
        "invalid_input": invalid_input,
        "peak_bytes": peak_resident_bytes() if on_host else torch.cuda.max_memory_allocated(),
        "memory_by_phase": None if memory is None else memory.facts(),
        "traceback": None if isinstance(error, ToolkitError) else traceback.format_exc(),
        **(progress.describe_rows(error.rows) if isinstance(error, Diverged) else {}),
    }


def _lost_rank(error: BaseException, kind: str, progress: Progress, rank: int) -> Heartbeat | None:
    """Return the heartbeat of a rank whose process is gone, where this rank's error comes from that."""
    if kind != status.FAILED or isinstance(error, ToolkitError) or progress.output_dir is None:
        return None
    time.sleep(LOST_RANK_GRACE_SECONDS)
    heartbeats = read_heartbeats(progress.output_dir / "ranks")
    return next((other for other in heartbeats if other.rank != rank and other.is_gone), None)
