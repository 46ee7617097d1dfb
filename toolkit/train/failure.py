"""A failure, said by the rank that has it: failure.json, once, and the exit code.

The first rank to create the file speaks; the others end quietly with the same exit code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.data import iter_rows, resolve_source
from toolkit.errors import AttestationFailed, OutOfMemory, RunFailed, ToolkitError
from toolkit.runs import status
from toolkit.runs.endings import failure_of_disk, failure_of_memory, is_disk_full, is_out_of_memory, kept
from toolkit.runs.folder import RunFolder
from toolkit.runs.pulses import Pulse, peak_resident_bytes, read_pulses

if TYPE_CHECKING:
    from toolkit.train.ladder import Ladder

RESUME = "the same command with `--resume_from_checkpoint latest` goes on from the last checkpoint"
# As gloo and NCCL's watchdog say it (torch 2.13).
COLLECTIVE_TIMEOUT_WORDS = ("Timed out waiting", "Watchdog caught collective operation timeout")


@dataclass(slots=True)
class Progress:
    """Where this rank is, for a failure to name, and when it got there."""

    phase: str = "start"
    """`start`, `arguments`, `data`, `load`, `engine`, `attest`, `train`, `forward`, `backward`, `step`,
    `evaluate`, `save`."""
    step: int = 0
    micro_steps: int = 0
    """Batches begun in this process."""
    output_dir: Path | None = None
    dataset: str | None = None
    swap_folder: Path | None = None
    """This run's own folder on an NVMe disk, removed at the end."""
    ladder: Ladder | None = None
    """Bytes at each stage of the first step; None before the engine is ready."""
    phases: list[tuple[str, float]] = field(default_factory=lambda: [("start", psutil.Process().create_time())])
    """Each phase of the run with the Unix time when it began; `start` is the start of this process."""

    def enter(self, phase: str) -> None:
        """Begin a phase and write down when; what every step repeats only sets `phase`."""
        self.phase = phase
        self.phases.append((phase, time.time()))


def status_of(error: BaseException) -> str:
    """The run status that an exception means."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return status.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, OutOfMemory):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, AttestationFailed):
        return status.ATTESTATION_FAILED
    if isinstance(error, (FloatingPointError, Diverged)):
        return status.DIVERGED
    if is_collective_timeout(error):
        return status.TIMED_OUT
    return status.INTERRUPTED if isinstance(error, (KeyboardInterrupt, Interrupted)) else status.FAILED


class Diverged(RunFailed):
    """The loss or the gradient is no longer a finite number."""

    def __init__(self, message: str, *, hint: str | None = None, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.rows = rows


class Interrupted(RunFailed):
    """A signal asked the run to end."""


def report_failure(error: BaseException, progress: Progress) -> int:
    """Write failure.json and run.json's status if no other rank has, print the cause, and give the exit code."""
    kind = status_of(error)
    wrong_input = isinstance(error, ToolkitError) and not isinstance(error, (RunFailed, OutOfMemory))
    code = status.exit_code_of(kind, wrong_input=wrong_input)
    rank = int(os.environ.get("RANK", "0"))
    with _FINISHED:  # a signal's thread may report beside the main one
        if _speak_first(progress, _failure(error, kind, rank, progress, wrong_input)):
            _print(error, rank, progress)
            _note_status(progress, kind, code)
    return code


_FINISHED = threading.Lock()


def report_hang(failure: dict[str, Any], progress: Progress) -> None:
    """The same, for what the watchdog found."""
    if _speak_first(progress, failure):
        print(f"error: {failure['message']}\n  hint: {failure['hint']}", file=sys.stderr, flush=True)
        _note_status(progress, status.TIMED_OUT, status.exit_code_of(status.TIMED_OUT))


def _note_status(progress: Progress, kind: str, code: int) -> None:
    if progress.output_dir is not None:
        with contextlib.suppress(OSError):  # a full disk; the launcher, if there is one, says it too
            RunFolder(progress.output_dir).update_run(status=kind, exit_code=code)


def is_collective_timeout(error: BaseException) -> bool:
    """Whether a collective gave up on a rank after `ddp_timeout`."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in COLLECTIVE_TIMEOUT_WORDS)


def _failure(error: BaseException, kind: str, rank: int, progress: Progress, wrong_input: bool) -> dict[str, Any]:
    message = error.message if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
    hint = getattr(error, "hint", None)
    if isinstance(error, Diverged) and progress.output_dir is not None:
        hint = f"{hint}; {kept(progress.output_dir)}"
    if kind == status.HOST_OUT_OF_MEMORY:
        message, hint = failure_of_memory(f"rank {rank}", progress.phase, progress.step, message)
    elif (lost := _lost_peer(error, kind, progress, rank)) is not None:
        rank, message, hint = (
            lost.rank,
            f"rank {lost.rank} is gone: its process {lost.pid} was ended from outside",
            RESUME,
        )
    elif is_disk_full(error) and progress.output_dir is not None:
        message, hint = failure_of_disk(progress.output_dir, f"rank {rank}", progress.phase, progress.step)
    return {
        "kind": kind,
        "phase": progress.phase,
        "step": progress.step,
        "rank": rank,
        "message": message,
        "hint": hint,
        "wrong_input": wrong_input,
        "peak_bytes": _peak_bytes(kind),
        "memory_ladder": None if progress.ladder is None else progress.ladder.facts(),
        "traceback": None if isinstance(error, ToolkitError) else traceback.format_exc(),
        **(_rows(error.rows, progress) if isinstance(error, Diverged) else {}),
    }


def _rows(numbers: tuple[int, ...], progress: Progress) -> dict[str, Any]:
    """The rows of this rank's part of the step, counted from 1, and where a local file has them."""
    rows = sorted(number + 1 for number in numbers)
    places: list[str] = []
    with contextlib.suppress(ToolkitError, OSError, TypeError, ValueError):
        source = resolve_source(str(progress.dataset))
        if source.path is not None and rows:
            found = itertools.islice(iter_rows(source.path), rows[-1])
            places = [place for number, (place, _) in enumerate(found, start=1) if number in rows]
    return {"rows": rows, "places": places}


def _lost_peer(error: BaseException, kind: str, progress: Progress, rank: int) -> Pulse | None:
    """The rank whose process is gone, where that is what this rank's error comes from."""
    if kind != status.FAILED or isinstance(error, ToolkitError) or progress.output_dir is None:
        return None
    time.sleep(0.2)  # a connection breaks before its process is quite gone
    pulses = read_pulses(progress.output_dir / "ranks")
    return next((pulse for pulse in pulses if pulse.rank != rank and pulse.is_gone), None)


def _speak_first(progress: Progress, failure: dict[str, Any]) -> bool:
    """Create failure.json; False when another rank did. Without a folder yet, rank 0 speaks."""
    if progress.output_dir is None or not progress.output_dir.is_dir():
        return int(os.environ.get("RANK", "0")) == 0
    try:
        with RunFolder(progress.output_dir).failure_json.open("x") as file:
            json.dump(failure, file, indent=2)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _print(error: BaseException, rank: int, progress: Progress) -> None:
    if isinstance(error, ToolkitError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    where = f"rank {rank}, phase {progress.phase}, step {progress.step}"
    print(f"error ({where}): {type(error).__name__}: {error}", file=sys.stderr)
    traceback.print_exc()


def _peak_bytes(kind: str) -> int:
    """The allocator's peak on a GPU; the resident one on a CPU, and where it is host memory that ran out."""
    import torch

    of_host = kind == status.HOST_OUT_OF_MEMORY or not torch.cuda.is_available()
    return peak_resident_bytes() if of_host else torch.cuda.max_memory_allocated()
