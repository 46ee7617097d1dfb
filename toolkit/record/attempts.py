"""The attempts in one run folder: what may be started in it, and what is left of the attempt before.

    start_attempt(folder, "resume")        # before the ranks start

A folder in which steps were trained belongs to that run: another attempt resumes it, or the user says that it replaces
it. One in which nothing was trained is used again.
"""

from __future__ import annotations

import shutil
from typing import Literal

from toolkit.errors import ToolkitError
from toolkit.record import status
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import SCHEMA_VERSION, RunFolder, write_json
from toolkit.record.measurements import last_step
from toolkit.record.timeline import close_timeline

Reuse = Literal["never", "resume", "resume_if_possible", "overwrite"]
"""What an attempt may do with a run that is in its folder: continue it from a checkpoint; continue it, or start over
where an unfinished run left no checkpoint; or replace it."""


def reuse_of(*, continues: bool, resumes: bool, overwrite: bool) -> Reuse:
    """Return what an attempt may do: it has a checkpoint to resume from, it is to resume, it replaces what is there."""
    return "resume" if continues else "overwrite" if overwrite else "resume_if_possible" if resumes else "never"


def check_start(folder: RunFolder, reuse: Reuse = "never") -> None:
    """Raise ToolkitError for a folder that holds a running, a finished or a trained run, unless it may be used."""
    folder.check_unused(resume=reuse in ("resume", "overwrite"))
    if reuse == "never" and has_trained(folder):
        steps = max(map(last_step, (folder.path / "ranks").glob("rank*.jsonl")), default=0)
        raise ToolkitError(
            f"{folder.path} holds a run that has trained {steps} step{'s' * (steps != 1)}",
            hint="`--resume_from_checkpoint latest` continues it, `--overwrite_output_dir true` replaces it;"
            " or name another folder: `--output_dir DIR`",
        )


def start_attempt(folder: RunFolder, reuse: Reuse = "never") -> None:
    """Prepare the folder, which this process holds, for a new attempt.

    Except to resume, what an earlier attempt trained is removed. Raises ToolkitError as `check_start` does, and for a
    folder that cannot be written.
    """
    check_start(folder, reuse)
    folder.check_writable()
    folder.make()
    try:
        close_timeline(folder.timeline, folder.path / "ranks")
        folder.remove_heartbeats()
        number = (folder.read_run() or {}).get("attempt")
        if reuse != "resume":
            _remove_results(folder)
        for path in (folder.failure_json, folder.attestation_json):
            path.unlink(missing_ok=True)
        attempt = number + 1 if type(number) is int and number > 0 else 1
        write_json(folder.run_json, {"schema_version": SCHEMA_VERSION, "attempt": attempt, "status": status.RUNNING})
    except OSError as error:  # a full disk, a folder of somebody else's, a folder in the place of a file
        raise folder.unwritable(error) from None


def has_trained(folder: RunFolder) -> bool:
    """Return True if the run in the folder has trained a step: it has rows, or a checkpoint."""
    rows = (folder.path / "ranks").glob("rank*.jsonl")
    return any(path.stat().st_size for path in rows) or bool(list_checkpoints(folder.path))


def _remove_results(folder: RunFolder) -> None:
    """Remove what a run that starts from its first step must not mix with its own."""
    for path in [*(checkpoint.path for checkpoint in list_checkpoints(folder.path)), folder.path / "profile"]:
        if path.is_dir():
            shutil.rmtree(path)
    for path in [*(folder.path / "ranks").glob("rank*.jsonl"), folder.log, folder.timeline]:
        path.unlink(missing_ok=True)
