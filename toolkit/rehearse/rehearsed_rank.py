"""The rank that a rehearsal stands for, and how a reader recognizes a rehearsal's run folder.

Nothing of a rehearsal is a result of training: its collectives move nothing, so losses mean nothing and no speed
includes them. Its run.json has `rehearsal`, by which every reader of run folders recognizes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import shown
from toolkit.launch.preflight import WEIGHT_SUFFIXES
from toolkit.record.folder import RunFolder

# A value of `--dataset`: rows of exactly `max_seq_length` tokens, the most that a batch can hold.
SYNTHETIC = "synthetic"


def has_local_weights(model: str) -> bool:
    """Return True for a local folder with weights. All else is rehearsed with random ones: memory is the same."""
    folder = Path(model)
    return folder.is_dir() and any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """One rank of a world whose other ranks have no process."""

    world_size: int
    rank: int
    fake_tensors: bool = False
    """Shapes without memory: peaks by part instead of readings of real tensors."""


def rehearsed_rank(run: dict[str, Any] | None) -> RehearsedRank | None:
    """Return the rank that a run.json was rehearsed for; None for a real run."""
    facts = (run or {}).get("rehearsal")
    if not facts:
        return None
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), int) for key in ("world_size", "rank")):
        raise ToolkitError(f"run.json: rehearsal is {shown(facts)}, expected world_size and rank")
    return RehearsedRank(world_size=facts["world_size"], rank=facts["rank"])


def refuse_rehearsals(folders: Sequence[Path]) -> None:
    """Raise ToolkitError if one of the run folders holds a rehearsal, where results of training are needed."""
    for folder in folders:
        rehearsed = rehearsed_rank(RunFolder(folder).read_run())
        if rehearsed is not None:
            raise ToolkitError(
                f"{folder} is a rehearsal (rank {rehearsed.rank} of {rehearsed.world_size}): it has no speed and no"
                " loss",
                hint="`toolkit train` or `toolkit compare` make runs",
            )
