"""The run folder of the run in progress, as one rank sees it: claimed, opened, and completed.

One attempt owns the folder, and every node sees it: found out before a model is loaded. Rank 0 writes the attempt's id
to `ranks/attempt.id`, and the other ranks look for it. The id also separates this attempt's heartbeats and keys in the
process group's store from those of an attempt that a restart has replaced.
"""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json_object
from toolkit.files.secrets import hide_words
from toolkit.hardware.node import describe_node, git_commit, library_versions
from toolkit.hardware.shared_gpu import sharing_ranks
from toolkit.observe.progress import Progress
from toolkit.record import status
from toolkit.record.attempts import Reuse, check_start, start_attempt
from toolkit.record.checkpoints import remove_unfinished
from toolkit.record.folder import MEASUREMENT_VERSION, RunFolder, start_facts
from toolkit.record.heartbeat import read_attempt_id, write_attempt_id
from toolkit.record.kernel_table import table_lines
from toolkit.record.measurements import drop_rows_after, measure, read_steps
from toolkit.record.run_files import SaveRecord, describe_slowest_save
from toolkit.record.timeline import Moment, measure_goodput, read_timeline
from toolkit.record.training_progress import repeated_epoch, signs_of_divergence
from toolkit.units import number

# A network file system may answer from its cache for some seconds.
VISIBLE_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """One rank's part of the record of the run in progress."""

    folder: RunFolder
    progress: Progress
    rank: int
    world_size: int
    preset: str | None = None
    resumed_step: int = 0  # the step of the checkpoint that the run resumes from; 0 without one
    continues: bool = False  # true if the run resumes from a checkpoint, and keeps rows and log
    single_process: bool = False  # true where this process is the only one, whatever its rank and world size

    @property
    def writes(self) -> bool:
        """True in the process that writes run.json and prints what is printed once."""
        return self.rank == 0 or self.single_process

    def open(self, *, prepared: bool = False, reuse: Reuse = "never", **facts: Any) -> None:
        """Let one rank write run.json with `facts`, and begin the timeline. Collective.

        Refuses another run's folder on every rank before any rank writes, unless it may `reuse` it. `prepared`: the
        launcher has done so.
        """
        if not prepared:
            check_start(self.folder, reuse)
            barrier()
            if self.writes:
                start_attempt(self.folder, reuse)
                copy_output_to(self.folder.log)
        if self.writes:
            started = {} if prepared else start_facts() | {"plan": None}
            self.folder.update_run(
                **started,
                status=status.RUNNING,
                exit_code=None,
                world_size=self.world_size,
                ranks_per_gpu=sharing_ranks(),
                argv=hide_words(sys.argv),
                versions=library_versions(),
                hardware=describe_node(),
                git_commit=git_commit(Path(__file__).parent),
                measurement_version=MEASUREMENT_VERSION,
                **facts,
            )
        barrier()  # now another rank may fail: its status is not replaced by this one
        self.progress.step, self.progress.output_dir = self.resumed_step, self.folder.path
        if self.writes and not self.single_process:
            self.progress.open_timeline(self.folder.timeline)

    def begin_training(self) -> None:
        """Remove what an earlier attempt left unfinished, now that this one has trained a step. Collective.

        So are the rows, of ranks that are no longer there, of steps that are trained again; other ranks drop their own.
        """
        if self.writes:
            remove_unfinished(self.folder.path)
            own = {self.folder.rank_rows(rank) for rank in range(self.world_size)}
            for rows in {*self.folder.path.glob("ranks/rank*.jsonl")} - own if self.continues else ():
                drop_rows_after(rows, self.resumed_step)
        barrier()

    def complete(self, *, untimed_steps: int, saves: Sequence[SaveRecord] = ()) -> None:
        """Write the summary of all ranks' rows, rank 0's phases and the status. Collective."""
        self.begin_training()  # a run without steps; and every rank has written its rows
        if not self.writes:
            return
        steps = read_steps(self.folder)
        measured = measure(steps, untimed_steps=untimed_steps)
        goodput = measure_goodput([*read_timeline(self.folder.timeline), Moment(unix=time.time(), phase="end")], steps)
        signs = signs_of_divergence(steps, measured.losses)
        self.write_completion(
            measured=measured.summary(),
            goodput=goodput.model_dump(),
            saves=[save.model_dump() for save in saves],
            warnings=signs,
        )
        loss = f"loss {number(measured.first_loss, 4)} to {number(measured.last_loss, 4)}; " if measured.losses else ""
        speed = f"{number(measured.tokens_per_second, 0)} tokens/s over {measured.timed_steps} timed"
        if measured.ranks_per_gpu is not None:
            speed = f"speeds n/a: {measured.ranks_per_gpu} ranks share a GPU"
        elif not measured.timed_steps:
            speed = f"no speed: the first {untimed_steps} steps are not timed"
        attested = read_json_object(self.folder.attestation_json) if self.folder.attestation_json.is_file() else {}
        for line in (*table_lines(attested.get("kernels") or ()), goodput.describe()):
            print(line, flush=True)
        if (slowest := describe_slowest_save(saves)) is not None:
            print(slowest, flush=True)
        if period := repeated_epoch(steps):
            print(f"note: each epoch has the same order ({period} steps); `set_epoch` changes it", flush=True)
        done = "done"
        if signs:
            done = "done, but it may have diverged"
            print(f"warning: {'; '.join(signs)}: the run may have diverged; lower `--learning_rate`", flush=True)
        print(f"{done}: {len(measured.step_tokens)} steps, {loss}{speed}; {self.folder.path}", flush=True)

    def write_completion(self, **facts: Any) -> None:
        self.progress.enter("end")
        self.folder.update_run(
            status=status.COMPLETED,
            exit_code=0,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            phases=self.progress.phases,
            **facts,
        )


def barrier(group: Any = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def gather_from_ranks(value: Any, *, single_process: bool = False, group: Any = None) -> list[Any]:
    """Return every rank's value, on every rank of the group. Collective."""
    if single_process or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def copy_output_to(log: Path) -> None:
    """Copy this process's stdout and stderr into train.log, where no launcher does it, in their order if both are one.

    SLURM sends SIGTERM to every process of a job step: the copies ignore it, and end with the rank, which saves first.
    """
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    together = os.path.sameopenfile(*(stream.fileno() for stream in streams))  # a terminal, or `2>&1`
    for copied in [streams] if together else [[stream] for stream in streams]:
        copy = subprocess.Popen(
            ["sh", "-c", "trap '' TERM INT HUP; exec tee -a \"$0\"", str(log)],
            stdin=subprocess.PIPE,
            stdout=copied[0].fileno(),
            start_new_session=True,
        )
        assert copy.stdin is not None
        for stream in copied:
            os.dup2(copy.stdin.fileno(), stream.fileno())


# -- whose folder it is


def claim_folder(output_dir: Path, *, writes: bool, gather: Callable[[Any], list[Any]]) -> tuple[str, tuple[str, ...]]:
    """Make this attempt the owner of the run folder, and return its id and nodes, the same on all ranks. Collective.

    Nodes are host names, each once, in the order of their ranks; `gather` returns every rank's value. Raises
    ToolkitError on every rank where the node of one does not see what rank 0 has written.
    """
    ranks = output_dir / "ranks"
    attempt_id = str(gather(uuid.uuid4().hex if writes else None)[0])
    if writes:
        ranks.mkdir(parents=True, exist_ok=True)
        write_attempt_id(ranks, attempt_id)
    return attempt_id, _check_seen(output_dir, lambda: read_attempt_id(ranks) == attempt_id, gather)


def check_visible(folder: Path, *, gather: Callable[[Any], list[Any]]) -> None:
    """Raise ToolkitError on every rank where the node of one does not see the folder. Collective."""
    _check_seen(folder, folder.is_dir, gather)


def _check_seen(folder: Path, is_seen: Callable[[], bool], gather: Callable[[Any], list[Any]]) -> tuple[str, ...]:
    """Return the names of the nodes, each once, in the order of their ranks."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (seen := is_seen()) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = gather((os.uname().nodename, seen))
    if blind := sorted({node for node, sees in found if not sees}):
        see = "does" if len(blind) == 1 else "do"
        raise ToolkitError(
            f"{folder.absolute()} is not shared: {', '.join(blind)} {see} not see what {found[0][0]} has written there",
            hint="name a folder on a file system that all nodes mount: `--output_dir DIR`",
        )
    return tuple(dict.fromkeys(node for node, _ in found))
