"""The attempts in one run folder: nothing of an earlier run is touched until the new one has trained a step.

    start_attempt(folder, resume=False)        # before the ranks start
    begin_training(folder, continues=False)    # on rank 0, after the first optimizer step
    settle(folder)                             # when the processes are gone

A run that is started in the folder of an unfinished one writes into `attempts/002/`, and `attempts/starting.json` says
so. Once it has trained, the earlier run's files are renamed into `attempts/001/`, and its own to the top. If it never
trains, its log and failure stay in `attempts/002/`. Everything is a rename, and `settle` completes or takes back
whatever a killed process has left in the middle.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import SCHEMA_VERSION, RunFolder, StartingAttempt, is_attempt, write_json
from toolkit.record.timeline import close_timeline


def start_attempt(folder: RunFolder, *, resume: bool = False) -> None:
    """Prepare the folder, which this process holds, for a new run; a finished or running one is refused.

    Raises ToolkitError for a folder that holds a finished run, unless the run resumes, or cannot be written.
    """
    folder.check_unused(resume=resume)
    folder.check_writable()
    folder.make()
    try:
        _start(folder)
    except OSError as error:  # a full disk, a folder of somebody else's, a file in the place of a folder
        raise folder.unwritable(error) from None


def _start(folder: RunFolder) -> None:
    settle(folder)
    close_timeline(folder.timeline, folder.path / "ranks")
    folder.remove_heartbeats()
    earlier, trained = attempt_number(folder), has_trained(folder)
    if not trained:
        _set_aside(folder, earlier, _reports(folder))
    number = max([*_numbers(folder), earlier if trained else 0]) + 1
    new = folder.attempt(number) if trained else folder
    write_json(new.run_json, {"schema_version": SCHEMA_VERSION, "attempt": number})
    if trained:
        _write_starting(folder, StartingAttempt(attempt=number, earlier=earlier))


def begin_training(folder: RunFolder, *, continues: bool) -> None:
    """Move the earlier run's files into its own folder, and those of the attempt that has trained to the top.

    A run that `continues` from a checkpoint keeps the checkpoints, the rows and the log where they are.
    """
    starting = folder.starting()
    if starting is None or starting.trained:
        return
    new = folder.attempt(starting.attempt)
    moved = [] if continues else _results(folder)
    # A run that was started to resume appends to the log at the top.
    _set_aside(folder, starting.earlier, [*moved, *_reports(folder, log=new.log.exists())])
    _write_starting(folder, replace(starting, trained=True))  # from here on there is no way back
    _complete(folder, new)


def settle(folder: RunFolder) -> RunFolder:
    """Return the folder of the last attempt's files, after all of its processes have ended.

    Completes a move to the top that was interrupted; an attempt that never trained keeps its files in its own folder,
    and what was already moved away for it is moved back.
    """
    starting = folder.starting()
    if starting is None:
        return folder
    new = folder.attempt(starting.attempt)
    if starting.trained:
        _complete(folder, new)
        return folder
    _put_back(folder, folder.attempt(starting.earlier))
    folder.starting_json.unlink()
    return new


def has_trained(folder: RunFolder) -> bool:
    """Return True if the run at the top of the folder has trained a step: it has rows, or a checkpoint."""
    return any(path.stat().st_size for path in _row_files(folder)) or bool(list_checkpoints(folder.path))


def attempt_number(folder: RunFolder) -> int:
    """Return the number of the attempt whose files are at the top of the folder.

    The first that is free where run.json has none, or one that another attempt has.
    """
    recorded = (folder.read_run() or {}).get("attempt")
    taken = [number for number in _numbers(folder) if folder.attempt(number).run_json.exists()]
    if isinstance(recorded, int) and is_attempt(recorded) and recorded not in taken:
        return recorded
    return next(number for number in itertools.count(1) if number not in taken)


def _results(folder: RunFolder) -> list[Path]:
    """What a run that starts from its first step must not mix with its own: rows, checkpoints, profiles."""
    profile = folder.path / "profile"
    found = [*_row_files(folder), *(checkpoint.path for checkpoint in list_checkpoints(folder.path))]
    return [*found, *([profile] if profile.exists() else [])]


def _row_files(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "ranks").glob("rank*.jsonl"))


def _reports(folder: RunFolder, *, log: bool = True) -> list[Path]:
    """The files that a run of any length has. run.json is the last one: as long as it is there, so is its number."""
    logs = [folder.log, folder.timeline] if log else []
    return [path for path in [*logs, folder.failure_json, folder.attestation_json, folder.run_json] if path.exists()]


def _numbers(folder: RunFolder) -> list[int]:
    numbers = [int(path.name) for path in folder.attempts.glob("[0-9]*") if re.fullmatch("[0-9]{1,6}", path.name)]
    return [number for number in numbers if is_attempt(number)]


def _write_starting(folder: RunFolder, starting: StartingAttempt) -> None:
    write_json(folder.starting_json, asdict(starting))


def _set_aside(folder: RunFolder, number: int, paths: Iterable[Path]) -> None:
    """Move files of the top into the folder of their attempt. Interrupted and repeated, it moves the rest."""
    kept = folder.attempt(number)
    for path in paths:
        target = kept.path / path.relative_to(folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def _put_back(folder: RunFolder, kept: RunFolder) -> None:
    for path in [*kept.path.glob("ranks/*"), *(path for path in kept.path.glob("*") if path.name != "ranks")]:
        target = folder.path / path.relative_to(kept.path)
        if not target.exists():
            path.rename(target)
    for emptied in (kept.path / "ranks", kept.path):
        with contextlib.suppress(OSError):
            emptied.rmdir()


def _complete(folder: RunFolder, new: RunFolder) -> None:
    """Move the files of the attempt that has trained to the top, and forget that it was starting."""
    for path in sorted(new.path.glob("*"), key=lambda path: path.name != "run.json"):
        path.rename(folder.path / path.name)
    with contextlib.suppress(FileNotFoundError):
        new.path.rmdir()
    folder.starting_json.unlink(missing_ok=True)
