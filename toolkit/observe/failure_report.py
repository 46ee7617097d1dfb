"""Report a failure from the rank that has it: failure.json, run.json's status, one message and the exit code.

The first rank to create failure.json reports; the others end quietly with the same exit code.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from toolkit.errors import AttestationFailed, OutOfMemory, RunFailed, ToolkitError
from toolkit.files.secrets import hide_secrets
from toolkit.hardware.shared_gpu import refused_by_nccl
from toolkit.installation import missing_package
from toolkit.observe.progress import Progress
from toolkit.record import status
from toolkit.record.checkpoints import describe_full_disk, describe_latest_checkpoint, resume_hint
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import Heartbeat, is_superseded, peak_resident_bytes, read_heartbeats

# gloo's and the NCCL watchdog's messages (torch 2.13), after `--ddp_timeout`.
COLLECTIVE_TIMEOUT_MESSAGES = ("Timed out waiting", "Watchdog caught collective operation timeout")
# Another rank's connection breaks shortly before its process is gone.
LOST_RANK_GRACE_SECONDS = 0.2
# Before there is a folder all ranks fail alike: as soon as rank 0 has said so, the launcher ends the others.
RANK_0_SECONDS = 5.0

OBSERVE_FOLDER = str(Path(__file__).parent)

_REPORTING = threading.Lock()  # the thread that handles signals may report at the same time as the main thread


class Diverged(RunFailed):
    """The loss, the gradient or the weights are no longer finite. `rows` are the row numbers of the step, from 0."""

    def __init__(self, message: str, *, hint: str | None = None, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.rows = rows


class Interrupted(RunFailed):
    """A signal ended the run."""


def status_of(error: BaseException) -> str:
    """Return the run status that an exception means."""
    torch = sys.modules.get("torch")  # None where it could not be imported
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return status.OUT_OF_MEMORY
    if isinstance(error, (MemoryError, OutOfMemory)) or status.is_out_of_memory(str(error)):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, AttestationFailed):
        return status.ATTESTATION_FAILED
    if isinstance(error, (FloatingPointError, Diverged)):
        return status.DIVERGED
    if isinstance(error, RuntimeError) and any(words in str(error) for words in COLLECTIVE_TIMEOUT_MESSAGES):
        return status.TIMED_OUT
    return status.INTERRUPTED if isinstance(error, (KeyboardInterrupt, Interrupted)) else status.FAILED


def report_failure(error: BaseException, progress: Progress) -> int:
    """Write failure.json and run.json's status unless another rank has, print the cause, and return the exit code."""
    error = refused_by_nccl(str(error)) or error
    if isinstance(error, ModuleNotFoundError):
        error = missing_package((error.name or "").partition(".")[0]) or error
    kind, rank = status_of(error), int(os.environ.get("RANK", "0"))
    invalid_input = isinstance(error, ToolkitError) and not isinstance(error, (RunFailed, OutOfMemory))
    code = status.exit_code_of(kind, invalid_input=invalid_input)
    text = f"error: {error}"
    if not isinstance(error, ToolkitError):
        where = f"rank {rank}, phase {progress.phase}, step {progress.step}"
        is_printed, error.is_printed = getattr(error, "is_printed", False), True  # type: ignore[attr-defined]
        text = "" if is_printed else f"error ({where}): {type(error).__name__}: {error}\n{script_traceback(error)}"
    with _REPORTING:
        failure = _failure(error, kind, rank, progress)
        if failure["hint"] and not isinstance(error, ToolkitError):  # failure.json may have no place
            text += f"error: {failure['message']}\n  hint: {failure['hint']}"
        _report(failure | {"invalid_input": invalid_input}, progress, code, text)
    return code


def script_traceback(error: BaseException) -> str:
    """Return an exception's traceback from the first line of the program on, also where it is caught further in.

    Frames of what observes the program, and of what starts it, are left out.
    """
    formatted, outer = traceback.TracebackException.from_exception(error), []
    if error.__traceback__ is not None:
        outer = list(traceback.extract_stack(error.__traceback__.tb_frame.f_back))
    frames: list[traceback.FrameSummary] = []
    for frame in [*outer, *formatted.stack]:
        if "runpy" in Path(frame.filename).name:
            frames.clear()
        elif not frame.filename.startswith(OBSERVE_FOLDER):
            frames.append(frame)
    formatted.stack = traceback.StackSummary.from_list(frames)
    return "".join(formatted.format())


def report_hang(failure: dict[str, Any], progress: Progress) -> None:
    """Report a hang that the watchdog found; `failure` is the content of failure.json."""
    code = status.exit_code_of(status.TIMED_OUT)
    _report(failure, progress, code, f"error: {failure['message']}\n  hint: {failure['hint']}")


def _report(failure: dict[str, Any], progress: Progress, code: int, text: str) -> None:
    """Create failure.json and set the status, unless another rank has.

    Before there is a folder, rank 0 reports; another rank that ended first would end it before it has.
    A rank whose attempt a restart has replaced says nothing: the folder is no longer its own.
    """
    if progress.output_dir is None or not progress.output_dir.is_dir():
        if int(os.environ.get("RANK", "0")) != 0:
            if failure["kind"] == status.INTERRUPTED:
                return
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_SECONDS)
    elif is_superseded(progress.output_dir / "ranks", progress.attempt_id):
        return
    else:
        try:
            with RunFolder(progress.output_dir).failure_json.open("x", encoding="utf-8") as file:
                json.dump(hide_secrets(failure), file, indent=2)
        except FileExistsError:
            return
        except OSError:  # a full disk: the message is printed at least
            pass
    if text:  # not for a later record of the same error
        print(hide_secrets(text), file=sys.stderr, flush=True)
    if progress.output_dir is not None:
        with contextlib.suppress(OSError):  # a full disk: the launcher, if there is one, reports it too
            RunFolder(progress.output_dir).update_run(status=failure["kind"], exit_code=code)


def _failure(error: BaseException, kind: str, rank: int, progress: Progress) -> dict[str, Any]:
    own, folder = isinstance(error, ToolkitError), progress.output_dir
    message = error.message if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
    hint = getattr(error, "hint", None)
    if isinstance(error, Diverged) and folder is not None:
        hint = f"{hint}; {describe_latest_checkpoint(folder)}"
    if kind == status.HOST_OUT_OF_MEMORY:
        message, hint = status.describe_host_oom(f"rank {rank}", progress.phase, progress.step, message)
    elif folder is not None and kind == status.FAILED and not own and (lost := _lost_rank(folder / "ranks", rank)):
        rank, hint = lost.rank, resume_hint(RunFolder(folder))
        message = f"rank {lost.rank} is gone: its process {lost.pid} was ended from outside"
    elif folder is not None and status.is_disk_full(error):
        message, hint = describe_full_disk(folder, f"rank {rank}", progress.phase, progress.step)
    torch = sys.modules.get("torch")
    on_host = kind == status.HOST_OUT_OF_MEMORY or torch is None or not torch.cuda.is_available()
    return {
        "kind": kind,
        "phase": progress.phase,
        "step": progress.step,
        "rank": rank,
        "message": message,
        "hint": hint,
        "peak_bytes": peak_resident_bytes() if torch is None or on_host else torch.cuda.max_memory_allocated(),
        "memory_by_phase": None if progress.memory_by_phase is None else progress.memory_by_phase.model_dump(),
        "traceback": None if own else hide_secrets(script_traceback(error)),
        **(progress.describe_rows(error.rows) if isinstance(error, Diverged) else {}),
    }


def _lost_rank(ranks: Path, rank: int) -> Heartbeat | None:
    """Return the heartbeat of another rank whose process is gone: this rank's error may come from that."""
    time.sleep(LOST_RANK_GRACE_SECONDS)
    return next((other for other in read_heartbeats(ranks) if other.rank != rank and other.is_gone), None)
