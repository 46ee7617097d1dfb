"""Run the trials of a comparison: each in fresh processes, each in the ledger before the next one starts.

>>> side_run_arguments(["profile"], untimed_steps=2)
['--max_steps', '4', '--profile_steps', '3:4']
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from toolkit.cluster.allocation import Allocation
from toolkit.compare.ledger import (
    LEDGER_FILE,
    Ledger,
    SideRunKind,
    TrialRecord,
    failed_repeat,
    side_runs_of,
    trials_of,
)
from toolkit.compare.rows import RowKey, RunRecord, Trial
from toolkit.compare.run_record import read_run_record, read_side_run
from toolkit.compare.specification import ComparisonSpec
from toolkit.launch.command import inherited_environment
from toolkit.launch.launch import command_of, run_training
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.options import TrainOptions
from toolkit.launch.warm_start import fork_server
from toolkit.presets.preset import load_preset
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.run_files import read_run
from toolkit.rehearse.rehearsal import refuse_rehearsals
from toolkit.units import number, seconds

# How long the processes of a killed runner may hold a run folder: ranks notice within seconds that the launcher
# is gone; a save that is under way may take longer.
ORPHAN_SECONDS = 120.0
PROFILED_STEPS = 2
STEP_LINE = re.compile(r"^step (\d+)/(\d+) ")


class ComparisonInterrupted(Exception):
    """A signal ended the comparison; the ledger has every trial that finished."""


def stderr_console() -> Console:
    """Return a console for messages; stdout is for data."""
    return Console(stderr=True, highlight=False, soft_wrap=True)  # a pipe gets one line per trial


class ConsoleProgress:
    """Progress of `total` trials and side runs on stderr: lines, and bars on a terminal. A context manager."""

    def __init__(self, total: int) -> None:
        self.console, self.total, self.finished = stderr_console(), total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.trials = self.bars.add_task("trials", total=total)
        self.steps: TaskID | None = None

    def __enter__(self) -> None:
        self.bars.start()

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def start(self, name: str) -> None:
        """Announce a run, whose steps have a bar of their own."""
        self.steps = self.bars.add_task(name, total=None)
        self.console.print(f"[{self.finished + 1}/{self.total}] {name}: starting", markup=False)

    def output_line(self, line: str) -> None:
        """Advance the bar when the line reports a step."""
        match = STEP_LINE.match(line)
        if match and self.steps is not None:
            self.bars.update(self.steps, completed=int(match[1]), total=int(match[2]) or None)

    def finish(self, record: RunRecord, *, from_ledger: bool = False) -> None:
        """Print the outcome, with the speed or the message."""
        if self.steps is not None and not from_ledger:
            self.bars.remove_task(self.steps)
            self.steps = None
        note = "already in the ledger" if from_ledger else f"in {seconds(record.wall_seconds)}"
        outcome = f"{record.status}: {record.message}"
        if record.completed:
            speed, loss = number(record.tokens_per_second, 0), number(record.last_loss, 4)
            outcome = f"completed, {speed} tokens/s, last loss {loss}"
        self._count(f"{record.trial}: {outcome} ({note})")

    def finish_probe(self, record: RunRecord) -> None:
        """Print the outcome; probes are not counted."""
        ended = record.status + (f" in phase {record.phase}" if record.phase else "")
        self.console.print(f"probe {record.trial}: {ended} (in {seconds(record.wall_seconds)})", markup=False)

    def skip(self, name: str, reason: str) -> None:
        """Print the reason; a skipped trial counts as finished."""
        self._count(f"{name}: not run, since {reason}")

    def _count(self, text: str) -> None:
        self.finished += 1
        self.bars.update(self.trials, completed=self.finished)
        self.console.print(f"[{self.finished}/{self.total}] {text}", markup=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs the trials of one comparison into its folder."""

    spec: ComparisonSpec
    folder: Path
    timeout_seconds: float | None
    """Of one run, which then ends as `timed_out`."""
    nvme: Mapping[str, NvmeDisk | None]
    """The disk of each preset that swaps to one, by the name under which the preset is compared."""
    progress: ConsoleProgress
    warm_start: bool = False
    """Runs are forked from a process that has imported the libraries."""
    allocation: Allocation | None = None
    """The SLURM job on whose nodes the runs are started; None for this node."""

    @property
    def ledger(self) -> Ledger:
        """The ledger in the folder."""
        return Ledger(self.folder / LEDGER_FILE)

    def run(self, unsupported: Mapping[str, str], *, retry_failed: bool) -> None:
        """Run what the ledger lacks; no other repeat of a row that failed. Raises ComparisonInterrupted on a signal."""
        trials = [trial for trial in self.spec.trials() if trial.row.name not in unsupported]
        refuse_rehearsals([self.folder / "trials" / trial.id for trial in trials])
        finished = self.ledger.read()
        if retry_failed:
            finished = {name: record for name, record in finished.items() if record.completed}
        for position, trial in enumerate(self.spec.trials()):
            if trial not in trials:
                continue
            done = finished.get(trial.id)
            if done is not None:
                self.progress.finish(done, from_ledger=True)
            elif failed := failed_repeat(finished, trial):
                self.progress.skip(trial.id, f"{failed.trial} ended as {failed.status}")
            else:
                self.progress.start(trial.id)
                run_folder = self.start_run(trial.row, self.folder / "trials" / trial.id)
                steps = self.spec.untimed_steps
                measured = read_run_record(trial, run_folder, self.folder, untimed_steps=steps, position=position)
                finished[trial.id] = record = TrialRecord.of(measured)
                self.ledger.append(record)
                self.progress.finish(record)

    def run_side_runs(
        self, unsupported: Mapping[str, str], kinds: Sequence[SideRunKind], *, retry_failed: bool
    ) -> None:
        """Run each row with a completed trial once more, with a profile or a checkpoint, as far as the ledger lacks it.

        No speed counts these runs. Raises ComparisonInterrupted on a signal.
        """
        for row in self.spec.rows():
            records = self.ledger.read()
            last = {kind: next(reversed(side_runs_of(records, row, kind)), None) for kind in kinds}
            missing = [kind for kind, run in last.items() if run is None or (retry_failed and not run.completed)]
            # A row without a completed trial ran out of memory, and would do so again.
            completed = any(trial.completed for trial in trials_of(records, row))
            if row.name in unsupported or not missing or not completed:
                continue
            name, untimed_steps = f"{row.name}-{'-'.join(missing)}", self.spec.untimed_steps
            self.progress.start(name)
            arguments = side_run_arguments(missing, untimed_steps=untimed_steps)
            run_folder = self.start_run(row, self.folder / "extras" / name, arguments)
            for checkpoint in run_folder.path.glob("checkpoint-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)  # its size is recorded; nothing resumes from it
            trial = Trial(row=row, repeat=0)
            measured = read_run_record(trial, run_folder, self.folder, untimed_steps=untimed_steps)
            record = read_side_run(measured.updated(trial=name), run_folder, missing)
            self.ledger.append(record)
            self.progress.finish(record)

    def start_run(self, row: RowKey, output_dir: Path, extra_arguments: Sequence[str] = ()) -> RunFolder:
        """Train one row in fresh processes until it ends: the one place where a comparison starts a run.

        A run that completed before its line was in the ledger is not repeated.
        Raises ComparisonInterrupted on a signal, and ToolkitError for a run folder whose run.json is damaged.
        """
        run_folder = RunFolder(output_dir)
        if (lock := run_folder.hold(wait_seconds=ORPHAN_SECONDS)) is not None:
            os.close(lock)
        if read_run(run_folder).status == status.COMPLETED:
            return run_folder
        options = TrainOptions(
            preset=self.spec.preset_sources[row.preset],
            num_processes=row.world_size,
            training_arguments=(*self.spec.training_argv(row, output_dir), *extra_arguments),
            cpu=self.spec.cpu,
            timeout_minutes=None if self.timeout_seconds is None else self.timeout_seconds / 60,
            stop_minutes=0,  # an interrupted trial is repeated from its beginning: no checkpoint
        )
        nvme = self.nvme.get(row.preset)
        command = command_of(options, load_preset(options.preset), nvme=nvme)
        if self.allocation is not None:
            command = self.allocation.spread(command)
        result = run_training(
            command,
            options=options,
            output_dir=output_dir,
            nvme=nvme,
            on_line=self.progress.output_line,
            fork_server=fork_server(inherited_environment() | command.environment) if self.warm_start else None,
            overwrite=True,
        )
        if result.status == status.INTERRUPTED:
            raise ComparisonInterrupted
        return result.folder


def side_run_arguments(kinds: Sequence[SideRunKind], *, untimed_steps: int) -> list[str]:
    """Return the training arguments of a side run: a few steps, of which the profiled ones are the last."""
    last = untimed_steps + PROFILED_STEPS
    words = ["--max_steps", str(last)]
    if "profile" in kinds:
        words += ["--profile_steps", f"{untimed_steps + 1}:{last}"]
    if "save" in kinds:
        words += ["--save_strategy", "steps", "--save_steps", str(last)]
    return words
