"""`toolkit compare` and `toolkit report`: check the job, run its trials, write the report, print table and files.

Each trial runs in fresh processes, and is in the ledger before the next one starts.

Before them, the largest per-GPU batch of each row is searched, by doubling and then halving. A probe is a run of two
steps and a record in the ledger, like a trial: an interrupted search resumes, and no size that ran out of memory is
tried again.

>>> side_run_arguments(["profile"], untimed_steps=2)
['--max_steps', '4', '--profile_steps', '3:4']
"""

import functools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from toolkit.cluster.allocation import Allocation
from toolkit.compare.build_results import at_price, build_results, is_search, unfinished_results
from toolkit.compare.comparison_report import console_table, write_report
from toolkit.compare.ledger import (
    LEDGER_FILE,
    Ledger,
    LedgerRecord,
    SideRunKind,
    comparison_lock,
    completed_sizes,
    failed_repeat,
    probes_of,
    read_run_record,
    read_side_run,
    side_runs_of,
    trials_of,
)
from toolkit.compare.options import PRICES, CompareOptions, check_timed_steps
from toolkit.compare.predictions import announcement, dry_run, dry_run_text, search_bounds
from toolkit.compare.results import RESULTS_FILE, Results, load_results, results_file
from toolkit.compare.rows import RowKey, Run, Trial
from toolkit.compare.significance import answer
from toolkit.compare.specification import ComparisonSpec, make_specification, open_comparison, with_largest_batches
from toolkit.demo.assets import attribution
from toolkit.doctor.ops import compile_for_run
from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError
from toolkit.files.paths import user_path
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.gpus import ON_CPU_MESSAGE, gpu_names
from toolkit.job.argument_values import check_range
from toolkit.job.global_batch import BATCH_ARGUMENT
from toolkit.job.job import Job
from toolkit.job.job_checks import check_values, refuse_arguments_of_comparison
from toolkit.launch.launch import run_training
from toolkit.launch.nvme import NvmeDisk, check_nvme
from toolkit.launch.preflight import check_arguments_of, check_libraries, check_process_count, check_run, device_of
from toolkit.launch.process import terminate_as_interrupt
from toolkit.launch.resume import TrainingRun
from toolkit.launch.terminal import LiveLine
from toolkit.observe.script_file import check_script_preset
from toolkit.plan.planner import check_ranks_fit
from toolkit.presets.support import check_degrees_given
from toolkit.record import status
from toolkit.record.folder import RunFolder
from toolkit.record.run_files import read_run
from toolkit.record.training_progress import STEP_LINE
from toolkit.rehearse.rehearsal import refuse_rehearsals
from toolkit.report.rendering import one_line
from toolkit.units import number, seconds, time_left

# How long the processes of a killed runner may hold a run folder: ranks notice within seconds that the launcher
# is gone; a save that is under way may take longer.
ORPHAN_SECONDS = 120.0
PROFILED_STEPS = 2
PROBE_STEPS = 2  # optimizer states are allocated in the first step; the second holds everything
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
        took = "before the resume" if record.wall_seconds is None else f"in {seconds(record.wall_seconds)}"
        note = "already in the ledger" if from_ledger else took
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
        """Train one row in fresh processes, unless it has completed. Raises ToolkitError for a damaged run.json."""
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
    """Return the largest batch up to `cap` that runs, or None; a failure other than memory before any ran ends it."""
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


TABLE_COLUMNS = 100  # a narrower table would break presets and statuses over lines


def run_comparison(options: CompareOptions, *, as_json: bool = False) -> None:
    """Run or resume a comparison and write its report. Raises ToolkitError, before any trial, for an invalid job."""
    comparison = Runner(options=options, spec=make_specification(options))
    checked, spec = check_comparison(comparison), comparison.spec
    options, folder, price = checked.options, checked.folder, checked.options.price_per_gpu_hour
    if options.dry_run:
        planned = dry_run(options, spec, checked.unsupported)
        return print(json.dumps(planned, indent=2) if as_json else dry_run_text(planned, spec, price))
    open_comparison(folder, spec, resume=options.resume)
    checked.ledger.read()  # a damaged line is reported before anything starts
    with comparison_lock(folder):
        if options.on_cpu and options.cpu is None:  # a device that the user did not choose
            print_message(ON_CPU_MESSAGE)
        if options.on_cpu and price is not None:
            print_message("--price-per-gpu-hour has no effect: no GPU is used")
        print_message(announcement(options, spec, checked.unsupported))
        for credit in filter(None, map(attribution, spec.own_job.dataset if spec.own_job else ())):
            print_message(f"data: {credit}")
        compile_for_run(map(spec.preset, spec.preset_sources), on_cpu=options.on_cpu)
        try:
            with terminate_as_interrupt(), checked.progress:
                runner = checked if options.find_max_batch is None else find_largest_batches(checked)
                runner.run()
                runner.run_side_runs()
        except KeyboardInterrupt:
            hint = f"`toolkit report {folder}` shows the finished trials; the same command with `--resume` resumes"
            raise RunFailed("stopped; finished trials are kept", hint=hint) from None
        results = build_results(runner.spec, folder, checked.unsupported, price_per_gpu_hour=price)
        _publish(results, folder, as_json=as_json)


def check_comparison(runner: Runner) -> Runner:
    """Check what can be known before a trial, and return it. Raises ToolkitError for an invalid job."""
    options, spec = runner.options, runner.spec
    allocation, gpus = spec.allocation(), None if options.gpu is None else max(options.world_sizes)
    if allocation is not None and not spec.cpu:
        gpus = allocation.max_processes
    nodes = 1 if allocation is None else len(allocation.nodes)
    device = device_of(on_cpu=spec.cpu, ranks_per_gpu=spec.ranks_per_gpu, gpus=gpus)
    rows = {
        row: TrainingRun(
            preset=spec.preset(row.preset),
            job=spec.job(row),
            num_processes=row.world_size,
            device=device,
            nodes=nodes,
            is_here=gpus is None and nodes == 1,
            starts=not options.dry_run,
            nvme_path=options.nvme_path,
        )
        for row in spec.rows()
    }
    unsupported = unsupported_rows(rows, allocation, runs_script=options.runs_script)
    supported = [row for row in rows if row.name not in unsupported]
    largest = {row.preset: row for row in supported}  # rows are in the order of their number of processes
    presets = {name: rows[row].preset for name, row in largest.items()}
    own = [row for name, row in largest.items() if name in spec.extra_arguments or presets[name].degrees]
    for preset in () if options.dry_run else presets.values():
        check_libraries(preset, runs_script=options.runs_script)
    nvme: dict[str, NvmeDisk | None] = {}
    if not options.runs_script:
        checked, *_ = [check_run(rows[row]) for row in dict.fromkeys([supported[-1], *own])]
        for job in (checked.job, *map(Job.from_argv, spec.extra_arguments.values())):
            refuse_arguments_of_comparison(job)
        check_timed_steps("--max_steps", checked.job.max_steps, untimed_steps=options.untimed_steps)
        nvme = {name: check_nvme(replace(checked, preset=preset)) for name, preset in presets.items()}
    runner.progress.total = len(supported) * (spec.repeats + bool(options.side_runs))
    return replace(runner, unsupported=unsupported, nvme=nvme, allocation=allocation)


def unsupported_rows(
    rows: Mapping[RowKey, TrainingRun], allocation: Allocation | None, *, runs_script: bool
) -> dict[str, str]:
    """Return the rows that cannot run here, with the reason. Raises the first reason if no row can.

    Also raises for a value that works under no preset, and for a preset whose degree of parallelism is missing: those
    are mistakes, in the arguments or in a `--variant`.
    """
    reasons: dict[RowKey, ToolkitError] = {}
    for row, run in rows.items():
        preset, job = run.preset, run.job
        if runs_script:
            check_script_preset(preset)
        check_values(job, on_cpu=run.device.type == "cpu")
        check_degrees_given(preset, job.degrees)
        try:
            if allocation is not None:
                allocation.check(row.world_size)
                if preset.uses_nvme:
                    raise ToolkitError(
                        f"preset {preset.name!r} offloads to a disk of each node, which a comparison checks on one"
                        " node only",
                        hint="compare it on one node, without `--nproc-per-node`",
                    )
            check_process_count(run)
            check_arguments_of(run)
            shared = run.device.ranks_per_gpu
            if shared > 1 and not runs_script and (gpu := common_gpu(gpu_names())) is not None:
                check_ranks_fit(preset, job, world_size=row.world_size, gpu=gpu, ranks_per_gpu=shared)
        except ToolkitError as error:
            reasons[row] = error
    if len(reasons) == len(rows):
        raise next(iter(reasons.values()))
    return {row.name: error.message for row, error in reasons.items()}


def write_report_again(folder: Path, *, price_per_gpu_hour: float | None, as_json: bool = False) -> None:
    """Write the report again, with costs at another price. Raises ToolkitError for a file of another name."""
    check_range("--price-per-gpu-hour", price_per_gpu_hour, PRICES)
    refuse_rehearsals([folder])
    if (unfinished := unfinished_results(user_path(folder), price_per_gpu_hour)) is not None:
        _publish(unfinished, user_path(folder), as_json=as_json)
        return
    file = results_file(folder)
    if file.name != RESULTS_FILE:
        raise ToolkitError(
            f"{file} has another name than {RESULTS_FILE}: its report would replace that of its folder",
            hint=f"copy it into a folder of its own, as {RESULTS_FILE}",
        )
    results = load_results(file)
    results = results if price_per_gpu_hour is None else at_price(results, price_per_gpu_hour)
    _publish(results, file.parent, as_json=as_json)


def _publish(results: Results, folder: Path, *, as_json: bool = False) -> None:
    files = write_report(results, folder)
    if as_json:
        print((folder / RESULTS_FILE).read_text(), end="")
        print_message("\n".join(map(str, files)))
    else:
        Console(width=max(Console().width, TABLE_COLUMNS)).print(console_table(results))
        print("\n".join([*map(one_line, answer(results.as_reported()).lines), *map(str, files)]))
    if is_search(folder):
        print_message("a search of `toolkit tune`: tune.json has its answer; `--resume --rounds N` continues it")
