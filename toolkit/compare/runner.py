"""Run the trials of a comparison: each in fresh processes, each in the ledger before the next one starts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.allocation import Allocation
from toolkit.compare.console_progress import ConsoleProgress
from toolkit.compare.ledger import LEDGER_FILE, Ledger, LedgerRecord, TrialRecord, trials_of
from toolkit.compare.rows import RowKey
from toolkit.compare.run_record import read_run_record
from toolkit.compare.specification import ComparisonSpec, Trial
from toolkit.errors import ToolkitError
from toolkit.launch.environment import inherited_environment
from toolkit.launch.launch import command_of, run_training
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.options import TrainOptions
from toolkit.launch.warm_start import fork_server
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.run_files import read_run
from toolkit.rehearse.rehearsed_rank import refuse_rehearsals

# Ranks notice within seconds that the launcher is gone; a save that is under way may take longer.
ORPHAN_SECONDS = 120.0


class ComparisonInterrupted(Exception):
    """A signal ended the comparison; the ledger has every trial that finished."""


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
        """Run every trial that the ledger lacks; after a failure the other repeats of its row are skipped.

        `unsupported` maps the rows that are not run to the reason. Raises ComparisonInterrupted on a signal.
        """
        trials = self.spec.trials()
        refuse_rehearsals([self.folder / "trials" / trial.id for trial in trials])
        finished = self.ledger.read()
        if retry_failed:
            finished = {name: record for name, record in finished.items() if record.completed}
        for position, trial in enumerate(trials):
            if trial.row.name in unsupported:
                continue
            done = finished.get(trial.id)
            if done is not None:
                self.progress.finish(done, from_ledger=True)
            elif failed := failed_repeat(finished, trial):
                self.progress.skip(trial.id, f"{failed.trial} ended as {failed.status}")
            else:
                self.progress.start(trial.id)
                run_folder = self.start_run(trial.row, self.folder / "trials" / trial.id)
                finished[trial.id] = self._record(trial, run_folder, position)

    def start_run(self, row: RowKey, output_dir: Path, extra_arguments: Sequence[str] = ()) -> RunFolder:
        """Train one row in fresh processes until it ends: the one place where a comparison starts a run.

        A run that completed before its line was in the ledger is not repeated.
        Raises ComparisonInterrupted on a signal, and ToolkitError for a run folder whose run.json is damaged.
        """
        run_folder = RunFolder(output_dir)
        wait_until_free(run_folder)
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
        nvme, on_line = self.nvme.get(row.preset), self.progress.output_line
        command = command_of(options, nvme=nvme)
        if self.allocation is not None:
            command = self.allocation.spread(command)
        result = run_training(
            command,
            options=options,
            output_dir=output_dir,
            nvme=nvme,
            on_line=on_line,
            fork_server=fork_server(inherited_environment() | command.environment) if self.warm_start else None,
            overwrite=True,
        )
        if result.status == status.INTERRUPTED:
            raise ComparisonInterrupted
        return result.folder

    def _record(self, trial: Trial, run_folder: RunFolder, position: int) -> TrialRecord:
        untimed_steps = self.spec.untimed_steps
        measured = read_run_record(trial, run_folder, self.folder, untimed_steps=untimed_steps, position=position)
        record = TrialRecord.of(measured)
        self.ledger.append(record)
        self.progress.finish(record)
        return record


def wait_until_free(folder: RunFolder, seconds: float = ORPHAN_SECONDS) -> None:
    """Wait until the processes of a killed runner, which hold the folder, have ended.

    Raises ToolkitError if they still hold it after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            lock = folder.hold()
        except ToolkitError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
            continue
        if lock is not None:
            os.close(lock)
        return


def failed_repeat(records: Mapping[str, LedgerRecord], trial: Trial) -> TrialRecord | None:
    """Return another repeat of the trial's row that failed; what ran out of memory once would do so again."""
    repeats = trials_of(records, trial.row)
    return next((record for record in repeats if record.trial != trial.id and not record.completed), None)
