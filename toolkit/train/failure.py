"""A failure, said by the rank that has it: failure.json, once, and the exit code.

The first rank to create the file speaks; the others end quietly with the same exit code.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from toolkit.errors import AttestationFailed, OutOfMemory, RunFailed, ToolkitError
from toolkit.runs import status
from toolkit.runs.folder import RunFolder

HOST_MEMORY_WORDS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "DefaultCPUAllocator")


@dataclass(slots=True)
class Progress:
    """Where this rank is, for a failure to name, and when it got there."""

    phase: str = "start"
    """`start`, `arguments`, `data`, `load`, `engine`, `attest`, `train`, `forward`, `backward`, `step`,
    `evaluate`, `save`."""
    step: int = 0
    output_dir: Path | None = None
    swap_folder: Path | None = None
    """This run's own folder on an NVMe disk, removed at the end."""
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
    if isinstance(error, MemoryError) or any(word in str(error) for word in HOST_MEMORY_WORDS):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, OutOfMemory):
        return status.HOST_OUT_OF_MEMORY
    if isinstance(error, AttestationFailed):
        return status.ATTESTATION_FAILED
    if isinstance(error, (FloatingPointError, Diverged)):
        return status.DIVERGED
    return status.INTERRUPTED if isinstance(error, KeyboardInterrupt) else status.FAILED


class Diverged(RunFailed):
    """The loss is no longer a finite number."""


def report_failure(error: BaseException, progress: Progress) -> int:
    """Write failure.json and run.json's status if no other rank has, print the cause, and give the exit code."""
    kind = status_of(error)
    wrong_input = isinstance(error, ToolkitError) and not isinstance(error, (RunFailed, OutOfMemory))
    code = status.exit_code_of(kind, wrong_input=wrong_input)
    rank = int(os.environ.get("RANK", "0"))
    if _speak_first(progress, _failure(error, kind, rank, progress, wrong_input)):
        _print(error, rank, progress)
        if progress.output_dir is not None:
            RunFolder(progress.output_dir).update_run(status=kind, exit_code=code)
    return code


def _failure(error: BaseException, kind: str, rank: int, progress: Progress, wrong_input: bool) -> dict[str, Any]:
    message = error.message if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
    return {
        "kind": kind,
        "phase": progress.phase,
        "step": progress.step,
        "rank": rank,
        "message": message,
        "hint": getattr(error, "hint", None),
        "wrong_input": wrong_input,
        "peak_bytes": _peak_bytes(),
        "traceback": None if isinstance(error, ToolkitError) else traceback.format_exc(),
    }


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


def _peak_bytes() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
