"""A rehearsal: one rank of a world that is not there. What its two processes and its readers agree on.

    refuse_rehearsals([Path("out")])    # ToolkitError: out is a rehearsal, ...

Nothing of a rehearsal is a result of training: its collectives move nothing, so losses mean nothing and no speed
counts them. Its run.json says `rehearsal`, by which every reader of runs knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.runs.folder import RunFolder

RANK_VARIABLE = "TOOLKIT_REHEARSAL_RANK"
# As `--dataset`: rows of exactly `max_seq_length` tokens, the most that a batch can hold.
SYNTHETIC = "synthetic"
DEFAULT_STEPS = 3
# What a rehearsal would only lose time with; weights are not worth saving.
FORCED_ARGUMENTS = {"save_model": "false", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
FAKE_TENSORS_VARIABLE = "TOOLKIT_REHEARSAL_FAKE_TENSORS"
TRACE_CANNOT_TELL = (
    "what an allocator adds: rounding, fragmentation, cached blocks",
    "workspaces of kernels and libraries, the CUDA context, the communication library's buffers",
    "the peak while the model is loaded",
    "time, losses and gradient norms",
)
CANNOT_TELL = (
    "losses, gradient norms and accuracies (what other ranks would have sent is not there)",
    "the speed of collectives, and of a step that waits for them",
    "whether all ranks hold the same weights and different batches",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """Which rank of which world."""

    world_size: int
    rank: int
    fake_tensors: bool = False
    """Shapes without memory: peaks by part instead of readings of real tensors."""


def rehearsal_of(run: dict[str, Any] | None) -> Rehearsed | None:
    """What run.json says of a rehearsal; None for a run."""
    said = (run or {}).get("rehearsal")
    return None if not said else Rehearsed(**{name: said[name] for name in ("world_size", "rank")})


def refuse_rehearsals(folders: Sequence[Path]) -> None:
    """Where results of training are wanted."""
    for folder in folders:
        said = rehearsal_of(RunFolder(folder).read_run())
        if said is not None:
            raise ToolkitError(
                f"{folder} is a rehearsal (rank {said.rank} of {said.world_size}): it has no speed and no loss",
                hint="`toolkit train` or `toolkit compare` make runs",
            )
