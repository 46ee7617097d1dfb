"""The run folder: the files of one run, written so that a reader never sees an incomplete one.

>>> RunFolder(Path("out")).rank_rows(1).name
'rank1.jsonl'
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import read_json_object
from toolkit.files.secrets import hide_secrets

# In the environment of a rank: its launcher has made the run folder and written run.json.
PREPARED_VARIABLE = "TOOLKIT_RUN_PREPARED"
# For a script of the user's own: the checkpoint that its first training resumes from; empty if a restart may name one.
RESUME_VARIABLE = "TOOLKIT_RESUME"
WORLD_SIZE_VARIABLE = "TOOLKIT_WORLD_SIZE"  # the ranks that the job asked for, in all
SCHEMA_VERSION = 1
# Incremented whenever the meaning of a number changes, so that reports are not compared across the change.
MEASUREMENT_VERSION = 1
LOCK = "run.lock"
RUN_JSON_LOCK = "run.json.lock"


class RunFolder:
    """The files of one run."""

    flag, overwrite = "--output_dir", "--overwrite_output_dir true"
    """What names another folder, and what replaces the run in it if anything does, for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / "run.json"
        """Configuration, plan, versions, status and results of the run."""
        self.attestation_json = path / "attestation.json"
        """What was in effect on each rank, verified at run time."""
        self.failure_json = path / "failure.json"
        """Why the run failed; only there if it did."""
        self.log = path / "train.log"
        """Standard output and error of all ranks."""
        self.timeline = path / "timeline.jsonl"
        """When rank 0 and its launcher began what (`toolkit.record.timeline`)."""

    def rank_rows(self, rank: int) -> Path:
        """Return the path of one rank's rows: one JSON line per step."""
        return self.path / "ranks" / f"rank{rank}.jsonl"

    def read_run(self) -> dict[str, Any] | None:
        """Return run.json, or None where it cannot be read."""
        return read_json(self.run_json)

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are: here, or where a script of the user's own saves them."""
        return Path((self.read_run() or {}).get("checkpoints_folder") or self.path)

    def update_run(self, **facts: Any) -> dict[str, Any]:
        """Merge facts into run.json, one process after the other, and return its content."""
        with _alone(self.path / "ranks" / RUN_JSON_LOCK):
            run = (self.read_run() or {"schema_version": SCHEMA_VERSION}) | facts
            write_json(self.run_json, run)
        return run

    def hold(self, *, wait_seconds: float = 0) -> int | None:
        """Lock the folder as `lock_file` does, and wait `wait_seconds` for another run to release it."""
        self.make()
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                return self._lock()
            except OSError as error:
                raise self.unwritable(error) from None
            except ToolkitError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(1)

    def check_free(self) -> None:
        """Raise ToolkitError while another process holds the folder."""
        with contextlib.suppress(OSError):
            if (self.path / LOCK).is_file() and (lock := self._lock()) is not None:
                os.close(lock)

    def _lock(self) -> int | None:
        hint = f"wait for it, stop it, or name another folder: `{self.flag} DIR`"
        return lock_file(self.path / LOCK, holds="a run", hint=hint)

    def remove_heartbeats(self) -> None:
        """Remove the heartbeats and stacks of earlier processes."""
        for pattern in ("rank*.heartbeat", "rank*.stacks", "hang.claim"):
            for leftover in (self.path / "ranks").glob(pattern):
                leftover.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise ToolkitError for a folder that cannot be created or written, leaving nothing behind."""
        ancestors = [self.path, *self.path.absolute().parents]
        existing = next(path for path in ancestors if os.path.lexists(path))
        try:
            with tempfile.TemporaryDirectory(dir=existing, prefix=".write-probe-"):
                pass
        except OSError as error:
            raise self.unwritable(error) from None

    def make(self) -> None:
        try:
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> ToolkitError:
        """Return the error for a folder that the system refuses to write."""
        hint = f"name a folder that you can write to: `{self.flag} DIR`"
        return ToolkitError(f"output_dir {self.path} cannot be written: {error.strerror}", hint=hint)


def lock_file(path: Path, *, holds: str, hint: str) -> int | None:
    """Lock a file for this process and those that inherit the descriptor, until the last of them exits.

    Returns the descriptor, or None on a file system without locks. Raises ToolkitError while another process holds the
    lock: the file's folder `holds` what is still running.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise ToolkitError(f"{path.parent} holds {holds} that is still running (process {holder})", hint=hint) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in here with this file; where none can be locked, do not wait."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a full disk, or a file system without locks
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # also for a process forked meanwhile
        yield


def start_facts() -> dict[str, Any]:
    now = time.time()
    return {"started": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"), "started_unix": now}


def content_sha256(content: Mapping[str, Any]) -> str:
    """Return the digest of everything in a record but its own `sha256`."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename it: a reader sees the old or the new. Secrets are `***`."""
    text = json.dumps(hide_secrets(content), indent=2, default=lambda value: hide_secrets(str(value)))
    write_text(path, text + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file, or return None where there is none; a loss in it may be no number."""
    try:
        return read_json_object(path, allow_nan=True)
    except ToolkitError:
        return None
