"""Run the trials of a comparison: each in fresh processes, each in the ledger before the next one starts.

Before them, the largest per-GPU batch of each row is searched, by doubling and then halving. A probe is a run of two
steps and a record in the ledger, like a trial: an interrupted search resumes, and no size that ran out of memory is
tried again.

>>> side_run_arguments(["profile"], untimed_steps=2)
['--max_steps', '4', '--profile_steps', '3:4']
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.cluster.allocation import Allocation
from toolkit.compare.ledger import (
    LEDGER_FILE,
    Ledger,
    LedgerRecord,
    SideRunKind,
    completed_sizes,
    failed_repeat,
    probes_of,
    read_run_record,
    read_side_run,
    side_runs_of,
    trials_of,
)
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import search_bounds
from toolkit.compare.rows import RowKey, Run, Trial
from toolkit.compare.specification import ComparisonSpec, with_largest_batches
from toolkit.job.global_batch import BATCH_ARGUMENT
from toolkit.launch.launch import run_training
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.terminal import LiveLine
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.run_files import read_run
from toolkit.record.training_progress import STEP_LINE
from toolkit.rehearse.rehearsal import refuse_rehearsals
from toolkit.units import number, seconds, time_left

# How long the processes of a killed runner may hold a run folder: ranks notice within seconds that the launcher
# is gone; a save that is under way may take longer.
ORPHAN_SECONDS = 120.0
PROFILED_STEPS = 2
# Optimizer states are allocated in the first step; the second holds everything.
PROBE_STEPS = 2
SECONDS_BETWEEN_LINES = 60.0


class ConsoleProgress(LiveLine):
    """Progress of `total` trials and side runs on stderr: lines, and on a terminal how far the current one is."""

    def __init__(self, total: int = 0) -> None:
        self.total, self.finished, self.name, self.printed = total, 0, "", 0.0
        self.scope = "in all"
        """What `total` counts."""
        self.run_seconds: list[float] = []
        """Wall seconds of the trials and side runs that have ended."""
        super().__init__()

    def start(self, name: str) -> None:
        self.name, self.text, self.started = f"[{self.finished + 1}/{self.total}] {name}", "starting", time.monotonic()
        self.printed = self.started
        self.print(f"{self.name}: starting")

    def output_line(self, line: str) -> None:
        """Show a line that reports a step; in a file, now and then."""
        now = time.monotonic()
        if not STEP_LINE.match(line):
            return
        if self.is_live:
            self.text = line
        elif now - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = now
            self.print(f"{self.name}: {line}")

    def finish(self, record: Run, *, from_ledger: bool = False) -> None:
        self.run_seconds += [] if record.wall_seconds is None else [record.wall_seconds]
        note = "already in the ledger" if from_ledger else f"in {seconds(record.wall_seconds)}"
        outcome = f"{record.status}: {record.message}"
        if record.completed:
            speed, loss = number(record.tokens_per_second, 0), number(record.last_loss, 4)
            outcome = f"completed, {speed} tokens/s, last loss {loss}"
            outcome += f"; it may have diverged: {record.message}" if record.message else ""
        self._count(f"{record.label}: {outcome} ({note})")

    def skip(self, name: str, reason: str) -> None:
        """Print the reason; a skipped trial counts as finished."""
        self._count(f"{name}: not run, since {reason}")

    def _count(self, text: str) -> None:
        self.finished, self.name, self.text = self.finished + 1, "", ""
        left = self.left(0.0)
        self.print(f"[{self.finished}/{self.total}] {text}" + (f"; {left}" if left else ""))

    def left(self, elapsed: float) -> str:
        """Return the time left in all, if as long runs follow as have ended; empty before one has ended."""
        if not self.run_seconds or self.finished >= self.total:
            return ""
        mean = statistics.fmean(self.run_seconds)
        return f"about {time_left((self.total - self.finished) * mean - min(elapsed, mean))} left {self.scope}"

    def describe(self, elapsed: float) -> str:
        """Return the live line: the run, the time left, and its newest step."""
        return "  ".join(filter(None, (self.name, time_left(elapsed), self.left(elapsed), self.text)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A comparison. Once it is checked, its methods run what the ledger lacks; a signal raises KeyboardInterrupt."""

    options: CompareOptions
    spec: ComparisonSpec
    unsupported: Mapping[str, str] = field(default_factory=dict)  # name of each row that does not run here: the reason
    nvme: Mapping[str, NvmeDisk | None] = field(default_factory=dict)
    """The disk of each preset that swaps to one, by the name under which the preset is compared."""
    progress: ConsoleProgress = field(default_factory=ConsoleProgress)
    allocation: Allocation | None = None  # the SLURM job on whose nodes the runs are started; None for this node

    @property
    def folder(self) -> Path:
        return self.options.output_dir

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / LEDGER_FILE)

    @property
    def rows(self) -> list[RowKey]:
        return [row for row in self.spec.rows() if row.name not in self.unsupported]

    def run(self) -> None:
        """Run the trials, but no other repeat of a row that failed."""
        rows = self.rows
        refuse_rehearsals([self.folder / "trials" / trial.id for trial in self.spec.trials() if trial.row in rows])
        finished = self.ledger.read()
        if self.options.retry_failed:
            finished = {name: record for name, record in finished.items() if record.completed}
        for position, trial in enumerate(self.spec.trials()):
            if trial.row not in rows:
                continue
            done = finished.get(trial.id)
            if done is not None:
                self.progress.finish(done, from_ledger=True)
            elif failed := failed_repeat(finished, trial):
                self.progress.skip(trial.label, f"{failed.label} ended as {failed.status}")
            else:
                finished[trial.id] = self.run_trial(trial, position)

    def run_trial(self, trial: Trial, position: int) -> LedgerRecord:
        self.progress.start(trial.label)
        run_folder = self.start_run(trial.row, self.folder / "trials" / trial.id)
        steps = self.spec.untimed_steps
        record = read_run_record(trial, run_folder, self.folder, untimed_steps=steps, position=position)
        self.ledger.append(record)
        self.progress.finish(record)
        return record

    def run_side_runs(self) -> None:
        """Run each row with a completed trial once more, with a profile or a checkpoint; no speed counts these runs."""
        for row in self.rows:
            records, retry_failed = self.ledger.read(), self.options.retry_failed
            last = {kind: next(reversed(side_runs_of(records, row, kind)), None) for kind in self.options.side_runs}
            missing = [kind for kind, run in last.items() if run is None or (retry_failed and not run.completed)]
            # A row without a completed trial ran out of memory, and would do so again.
            if not missing or not any(trial.completed for trial in trials_of(records, row)):
                continue
            name, untimed_steps = f"{row.name}-{'-'.join(missing)}", self.spec.untimed_steps
            self.progress.start(name)
            arguments = side_run_arguments(missing, untimed_steps=untimed_steps)
            run_folder = self.start_run(row, self.folder / "extras" / name, arguments)
            for checkpoint in run_folder.path.glob("checkpoint-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)  # its size is recorded; nothing resumes from it
            trial = Trial(row=row, repeat=0)
            measured = read_run_record(trial, run_folder, self.folder, untimed_steps=untimed_steps)
            record = read_side_run(measured, name, run_folder, missing)
            self.ledger.append(record)
            self.progress.finish(record)

    def start_run(self, row: RowKey, output_dir: Path, extra_arguments: Sequence[str] = ()) -> RunFolder:
        """Train one row in fresh processes until it ends: the one place where a comparison starts a run.

        A run that completed before its line was in the ledger is not repeated.
        Raises ToolkitError for a run folder whose run.json is damaged.
        """
        run_folder = RunFolder(output_dir)
        if (lock := run_folder.hold(wait_seconds=ORPHAN_SECONDS)) is not None:
            os.close(lock)
        if read_run(run_folder).status == status.COMPLETED:
            return run_folder
        options = self.spec.train_options(row, output_dir, extra_arguments)
        options = replace(options, timeout_minutes=self.options.trial_timeout_minutes)
        nvme = self.nvme.get(row.preset)
        command = self.spec.command(options, nvme_path=None if nvme is None else nvme.path)
        if self.allocation is not None:
            command = self.allocation.spread(command)
        result = run_training(
            command,
            options=options,
            output_dir=output_dir,
            nvme=nvme,
            on_line=self.progress.output_line,
            reuse="overwrite",
        )
        if result.status == status.INTERRUPTED:
            raise KeyboardInterrupt
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


# The largest per-GPU batch


def search(
    known: Mapping[int, LedgerRecord], probe: Callable[[int], LedgerRecord], *, start: int, cap: int
) -> int | None:
    """Return the largest per-GPU batch up to `cap` that runs, None if none does. Sizes in `known` are not probed again.

    A failure for another reason than memory means that the size does not run. If no size has run yet, the reason is
    not the size, and no smaller one is tried.
    """
    probes = dict(known)
    low, high, size = 0, cap + 1, min(start, cap)  # low runs, high does not
    while high - low > 1:
        if size not in probes:
            probes[size] = probe(size)
        outcome = probes[size]
        if not (outcome.completed or outcome.out_of_memory or completed_sizes(probes)):
            return None
        low, high = (size, high) if outcome.completed else (low, size)
        size = min(2 * low, cap) if high == cap + 1 and low else (low + high) // 2
    return low or None


def find_largest_batches(runner: Runner) -> Runner:
    """Return a runner with each row at its largest per-GPU batch, which does not run the rows without any."""
    without: dict[str, str] = {}
    for row in runner.rows:
        known = probes_of(runner.ledger.read(), row)
        if runner.options.retry_failed and not completed_sizes(known):
            known = {}
        start, cap = search_bounds(runner.spec, row)
        if search(known, functools.partial(_probe, runner, row), start=start, cap=cap) is None:
            without[row.name] = _record_failure(runner, row)
    spec = with_largest_batches(runner.spec, runner.ledger.read())
    return replace(runner, spec=spec, unsupported={**runner.unsupported, **without})


def _probe(runner: Runner, row: RowKey, size: int) -> LedgerRecord:
    name, job = f"{row.name}-b{size}", runner.spec.job(row)
    arguments = [f"--{BATCH_ARGUMENT}", str(size), "--max_steps", str(PROBE_STEPS)]
    if not (job.streaming or job.packing):  # the longest rows first: no trial pads a batch further
        arguments += ["--train_sampling_strategy", "group_by_length"]
    run_folder = runner.start_run(row, runner.folder / "probes" / name, arguments)
    measured = read_run_record(Trial(row=row, repeat=0), run_folder, runner.folder, untimed_steps=0)
    record = measured.updated(trial=name, kind="probe", per_device_train_batch_size=size)
    runner.ledger.append(record)
    ended = record.status + (f" in phase {record.phase}" if record.phase else "")
    runner.progress.print(f"probe {name}: {ended} (in {seconds(record.wall_seconds)})")
    return record


def _record_failure(runner: Runner, row: RowKey) -> str:
    """Record the outcome of the smallest size as the row's first trial; return the reason."""
    records = runner.ledger.read()
    size, probe = next(iter(probes_of(records, row).items()))
    reason = f"per-GPU batch {size} ended as {probe.status}"
    trials = [Trial(row=row, repeat=repeat) for repeat in range(runner.spec.repeats)]
    message = f"with a per-GPU batch of {size}: {probe.message}"
    failed = probe.updated(trial=trials[0].id, kind="trial", per_device_train_batch_size=None, message=message)
    if records.get(trials[0].id) != failed:
        runner.ledger.append(failed)
    for trial in trials:
        runner.progress.skip(trial.label, reason)
    return reason
