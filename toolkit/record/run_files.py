"""The files of a run folder as who reads them needs them: each key with its type.

A file that is missing is empty: a run that was killed may lack any of them. One that is damaged is an error, since a
figure that is left out would look like one that was not measured.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.documents import explain, read_json_object
from toolkit.record import status
from toolkit.record.columns import Bytes, Count, Interval, NonNegativeReal, Real
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import Figures, MemoryByPhase
from toolkit.record.reading import RankReading
from toolkit.record.status import RunStatus
from toolkit.record.timeline import Goodput


class _RunFile(BaseModel):
    model_config = ConfigDict(frozen=True)


Parsed = TypeVar("Parsed", bound=_RunFile)


class ProfiledStep(_RunFile):
    step_seconds: NonNegativeReal
    communication_seconds: NonNegativeReal
    exposed_communication_seconds: NonNegativeReal


class ProfiledRank(_RunFile):
    """One rank of the last profiled step."""

    rank: Count
    start_unix: Real
    seconds: NonNegativeReal
    lanes: dict[str, tuple[Interval, ...]]


class Profile(_RunFile):
    last_step: Count = 0
    steps: tuple[ProfiledStep, ...] | None = ()
    timeline: tuple[ProfiledRank, ...] | None = ()


class SaveRecord(BaseModel):
    """How long one save of a run took; sizes are those of all ranks' files."""

    kind: str  # `checkpoint`, or `model` for the one at the end
    step: Count
    seconds: NonNegativeReal | None = None  # from the first write to the complete checkpoint; None until it is complete
    stall_seconds: NonNegativeReal = 0.0  # training stood still
    waited_seconds: NonNegativeReal = 0.0  # the part of it in which an earlier checkpoint was still being written
    write_seconds: NonNegativeReal | None = None  # writing, until every file is on the disk, in whichever thread
    bytes: Bytes = None

    def complete(self, size: int, *, began: float, writing_began: float) -> None:
        """Note that files of `size` bytes in all are complete; both times are readings of `time.monotonic`."""
        now = time.monotonic()
        self.seconds, self.write_seconds = now - began, now - writing_began
        self.bytes = size

    @property
    def seconds_after_step(self) -> float:
        """Seconds from the end of a step, with the fingerprint, without the wait for an earlier save."""
        return max(self.seconds or 0.0, self.stall_seconds - self.waited_seconds)


# Between the notice and the end of a spot node, at most:
# https://cloud.google.com/compute/docs/instances/spot and https://learn.microsoft.com/azure/virtual-machines/spot-vms
# (30 s), https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html (2 minutes).
SHORTEST_NOTICE_SECONDS, LONGEST_NOTICE_SECONDS = 30, 120
# In the environment of ranks that a scheduler has started, on nodes that a cloud may take back.
SCHEDULER_VARIABLES = {"SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID"}


def describe_slowest_save(saves: Sequence[SaveRecord], environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning where the slowest checkpoint exceeds clouds' notice and the run may lose a node; else None."""
    complete = [save for save in saves if save.kind == "checkpoint" and save.seconds is not None]
    if not complete:
        return None
    slowest = max(complete, key=lambda save: save.seconds_after_step)
    seconds = slowest.seconds_after_step
    several_nodes = environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE")
    is_restarted = several_nodes or environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if seconds <= SHORTEST_NOTICE_SECONDS or not (is_restarted or SCHEDULER_VARIABLES & environment.keys()):
        return None
    return (
        f"warning: checkpoint-{slowest.step} took {seconds:.1f} s to save; clouds take spot nodes back"
        f" {SHORTEST_NOTICE_SECONDS} s (Google Cloud, Azure) to {LONGEST_NOTICE_SECONDS} s (AWS) after notice: where"
        " that is too short, `--save_steps` more often bounds what is lost"
    )


_UNFINISHED = (status.PLANNED, status.RUNNING)
RecordedStatus = Annotated[RunStatus, BeforeValidator(lambda value: status.FAILED if value in _UNFINISHED else value)]
"""A run that never reported how it ended has failed."""


class RecordedRun(_RunFile):
    """`run.json`."""

    schema_version: Literal[1] = 1
    preset: str | None = None
    world_size: int | None = None
    script: str | None = None
    argv: tuple[str, ...] | None = None
    hardware: dict[str, Any] | None = None
    rehearsal: dict[str, Any] | None = None
    measured: Figures | None = None
    status: RecordedStatus = "failed"
    wall_seconds: NonNegativeReal | None = None
    command: str = ""
    started_unix: Real | None = None
    phases: tuple[tuple[str, Real], ...] | None = ()
    spec: dict[str, Any] | None = None
    profile: Profile | None = None
    saves: tuple[SaveRecord, ...] | None = ()
    goodput: Goodput | None = None
    versions: dict[str, str | None] | None = None
    git_commit: str | None = None
    nodes: tuple[str, ...] = ()  # host names of the ranks
    warnings: tuple[str, ...] = ()  # signs that a run which completed has diverged


class RecordedFailure(_RunFile):
    """`failure.json`."""

    message: str | None = None
    phase: str | None = None
    step: Count | None = None
    rank: int | None = None
    peak_bytes: Bytes = None
    memory_by_phase: MemoryByPhase | None = None


class RecordedAttestation(_RunFile):
    ranks: tuple[RankReading, ...] | None = ()
    expected: RankReading | None = None
    kernels: tuple[dict[str, Any], ...] = ()
    sha256: str | None = None


def read_run_file(path: Path, kind: type[Parsed]) -> Parsed:
    """Return a file of a run folder, empty where there is none. Raises ToolkitError for a damaged one."""
    try:
        # A loss that no comparison reads may be no number.
        return kind.model_validate(read_json_object(path, allow_nan=True) if os.path.lexists(path) else {})
    except ValidationError as error:
        raise ToolkitError(f"{path}: {explain(error)}", hint=damaged_hint(path)) from None
    except ToolkitError as error:
        raise type(error)(error.message, hint=error.hint or damaged_hint(path)) from None


def read_run(folder: RunFolder) -> RecordedRun:
    """Return a run's `run.json`. Raises ToolkitError as `read_run_file` does."""
    return read_run_file(folder.run_json, RecordedRun)


def damaged_hint(path: Path) -> str:
    """Return what to do about a damaged file of a run folder."""
    return f"move {path.parent} elsewhere, and `--resume` repeats its run"
