"""The restarts of a run, as `run.json` records them: how each earlier attempt ended, and the steps that it lost."""

from __future__ import annotations

from typing import Any

from toolkit.record import status
from toolkit.record.attempts import has_trained
from toolkit.record.folder import RunFolder, read_json
from toolkit.record.measurements import last_step, rows_after

UNREPORTED = "no rank reported why it ended: they were killed, or their node was lost"


def restart_record(
    folder: RunFolder, *, ended: str, failure: dict[str, Any], world_size: int | None, resumed_step: int
) -> dict[str, Any]:
    """Return the entry of `restarts` for an attempt that ended; the next one resumes from `resumed_step`."""
    reached = completed_steps(folder)
    return {
        "rank": failure.get("rank"),
        "step": failure.get("step"),
        "status": ended,
        "message": failure.get("message"),
        "world_size": world_size,
        "resumed_from_step": resumed_step,
        "lost_steps": max(0, reached - resumed_step),
        "lost_seconds": rows_after(folder.rank_rows(0), resumed_step).seconds,
    }


def completed_steps(folder: RunFolder) -> int:
    """Return the optimizer steps that every rank completed, by the rows of the ranks that the run has."""
    ranks = (folder.read_run() or {}).get("world_size")
    paths = sorted(folder.path.glob("ranks/rank*.jsonl"))
    if isinstance(ranks, int):  # with more of them, an earlier attempt had more ranks
        paths = [path for path in paths if path in {folder.rank_rows(rank) for rank in range(ranks)}]
    return min(map(last_step, paths), default=0)


def record_restart(folder: RunFolder, *, resumed_step: int) -> list[dict[str, Any]]:
    """Return the `restarts` of a run that resumes in its own folder, of which the last is that of the attempt before.

    An attempt whose ranks could not write how they ended has failed. Empty where there is nothing to resume.
    """
    run = folder.read_run() or {}
    if not has_trained(folder) or run.get("status") == status.COMPLETED:
        return list(run.get("restarts", []))
    failure, ended = read_json(folder.failure_json) or {}, run.get("status")
    if ended == status.RUNNING:
        ended, failure = status.FAILED, failure or {"message": UNREPORTED}
    record = restart_record(
        folder, ended=str(ended), failure=failure, world_size=run.get("world_size"), resumed_step=resumed_step
    )
    return [*run.get("restarts", []), record]
