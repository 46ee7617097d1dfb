"""The attempts in one run folder: what may be started in it, and what is left of the attempt before.

A folder in which steps were trained belongs to that run: another attempt resumes it, or the user says that it replaces
it. One in which nothing was trained is used again.
"""

import math
import shutil
from typing import Any, Literal

from toolkit.errors import ToolkitError
from toolkit.record import status
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import SCHEMA_VERSION, RunFolder, read_json, write_json
from toolkit.record.measurements import last_step, written_rows
from toolkit.record.timeline import close_timeline

Reuse = Literal["never", "resume", "resume_if_possible", "overwrite"]
"""What an attempt may do with a run that is in its folder: continue it from a checkpoint; continue it, or start over
where an unfinished run left no checkpoint; or replace it."""


def reuse_of(*, continues: bool, resumes: bool, overwrite: bool) -> Reuse:
    """Return what an attempt may do: it has a checkpoint to resume from, it is to resume, it replaces what is there."""
    return "resume" if continues else "overwrite" if overwrite else "resume_if_possible" if resumes else "never"


def check_start(folder: RunFolder, reuse: Reuse = "never") -> None:
    """Raise ToolkitError for a folder that holds a finished or a trained run, unless it may be used."""
    if folder.path.exists() and not folder.path.is_dir():
        raise ToolkitError(f"output_dir {folder.path} is a file", hint=f"name a folder: `{folder.flag} DIR`")
    another = f"name another folder: `{folder.flag} DIR`"
    replaces = f"; `{folder.overwrite}` replaces the run" if folder.overwrite else ""
    finished = (folder.read_run() or {}).get("status") == status.COMPLETED
    if finished and reuse not in ("resume", "overwrite"):
        raise ToolkitError(f"{folder.path} already holds a finished run", hint=another + replaces)
    if reuse == "never" and has_trained(folder):
        steps = max(map(last_step, (folder.path / "ranks").glob("rank*.jsonl")), default=0)
        raise ToolkitError(
            f"{folder.path} holds a run that has trained {steps} step{'s' * (steps != 1)}",
            hint=("`--resume_from_checkpoint latest` continues it; " if folder.flag == "--output_dir" else "")
            + another
            + replaces,
        )


def start_attempt(folder: RunFolder, reuse: Reuse = "never") -> None:
    """Prepare a held folder for an attempt, without what was trained unless it resumes. Raises ToolkitError."""
    check_start(folder, reuse)
    folder.check_writable()
    folder.make()
    try:
        close_timeline(folder.timeline, folder.path / "ranks")
        folder.remove_heartbeats()
        number = (folder.read_run() or {}).get("attempt")
        outdated = [folder.failure_json, folder.attestation_json]
        if reuse != "resume":
            for trained in [*(each.path for each in list_checkpoints(folder.path)), folder.path / "profile"]:
                if trained.is_dir():
                    shutil.rmtree(trained)
            outdated += [*(folder.path / "ranks").glob("*rank*.jsonl"), folder.log, folder.timeline]
        for path in outdated:
            path.unlink(missing_ok=True)
        attempt = number + 1 if type(number) is int and number > 0 else 1
        write_json(folder.run_json, {"schema_version": SCHEMA_VERSION, "attempt": attempt, "status": status.RUNNING})
    except OSError as error:  # a full disk, a folder of somebody else's, a folder in the place of a file
        raise folder.unwritable(error) from None


def has_trained(folder: RunFolder) -> bool:
    """Return True if the run in the folder has trained a step: it has rows, or a checkpoint."""
    rows = (folder.path / "ranks").glob("rank*.jsonl")
    return any(path.stat().st_size for path in rows) or bool(list_checkpoints(folder.path))


# -- `restarts` in run.json: how each earlier attempt ended, and the steps that it lost


def restart_record(
    folder: RunFolder, *, ended: str, failure: dict[str, Any], world_size: int | None, resumed_step: int
) -> dict[str, Any]:
    """Return the entry of `restarts` for an attempt that ended; the next one resumes from `resumed_step`."""
    ranks = (folder.read_run() or {}).get("world_size")
    paths = set(folder.path.glob("ranks/rank*.jsonl"))
    if isinstance(ranks, int):  # with more of them, an earlier attempt had more ranks
        paths &= {folder.rank_rows(rank) for rank in range(ranks)}
    reached = min(map(last_step, paths), default=0)  # the steps that every rank completed
    lost = [row for row in written_rows(folder.rank_rows(0)) if row["step"] > resumed_step]
    return {
        "rank": failure.get("rank"),
        "step": failure.get("step"),
        "status": ended,
        "message": failure.get("message"),
        "world_size": world_size,
        "resumed_from_step": resumed_step,
        "lost_steps": max(0, reached - resumed_step),
        "lost_seconds": math.fsum(row.get("seconds", 0.0) for row in lost),
    }


def record_restart(folder: RunFolder, *, resumed_step: int) -> list[dict[str, Any]]:
    """Return the `restarts` of a run that resumes in its own folder, with that of the attempt before."""
    run = folder.read_run() or {}
    if not has_trained(folder) or run.get("status") == status.COMPLETED:
        return list(run.get("restarts", []))
    failure, ended, ranks = read_json(folder.failure_json) or {}, str(run.get("status")), run.get("world_size")
    if ended == status.RUNNING:
        unreported = "no rank reported why it ended: they were killed, or their node was lost"
        ended, failure = status.FAILED, failure or {"message": unreported}
    record = restart_record(folder, ended=ended, failure=failure, world_size=ranks, resumed_step=resumed_step)
    return [*run.get("restarts", []), record]
