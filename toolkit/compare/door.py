"""`toolkit compare` and `toolkit report`: check first, show progress, end with the table and the files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.compare.report import console_table, summary_sentence, write_report
from toolkit.compare.results import Results, load_results
from toolkit.compare.rows import Row
from toolkit.compare.run import Stopped, results_of, run_trials
from toolkit.compare.trials import Comparison, Trial, open_comparison, plan_comparison, refuse_own_arguments
from toolkit.errors import EXIT_RUN_FAILED
from toolkit.hardware.gpus import count_gpus
from toolkit.launch.nvme import NvmeDisk, check_nvme
from toolkit.launch.preflight import check_job, check_process_count
from toolkit.launch.process import terminate_as_interrupt
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.runs.argv import integer
from toolkit.runs.rehearsals import refuse_rehearsals
from toolkit.runs.switches import check_switches
from toolkit.units import number, seconds

TABLE_COLUMNS = 100  # narrower, presets and statuses would be broken over lines
STEP_LINE = re.compile(r"^step (\d+)/(\d+) ")


def run_comparison(
    presets: Sequence[str],
    *,
    output: Path,
    num_processes: Sequence[int],
    training_arguments: Sequence[str],
    resume: bool,
    retry_failed: bool,
    untimed_steps: int,
    reference: str | None,
    cpu: bool,
    on_checked: Callable[[bool], None],
    timeout_seconds: float,
    nvme_path: str | None,
) -> None:
    """Run or resume a comparison, write its report, print its table.

    Raises ToolkitError before any trial for what is wrong with the job; a trial that fails is a row.
    """
    chosen = [load_preset(name) for name in presets]
    comparison = plan_comparison(
        chosen,
        num_processes=num_processes,
        training_arguments=training_arguments,
        untimed_steps=untimed_steps,
        reference=reference,
        cpu=cpu,
    )
    gpus = None if cpu else count_gpus()
    for preset in chosen:
        for n in comparison.num_processes:
            check_process_count(n, gpus=gpus, preset=preset)
    largest = max(comparison.num_processes)
    job = check_job(chosen[0], num_processes=largest, training_argv=training_arguments, cpu=cpu)
    for preset in chosen:
        check_switches(job.arguments, preset, num_processes=largest, on_cpu=cpu)
    refuse_own_arguments(job.arguments, integer(job.arguments, "max_steps", 0), untimed_steps)
    nvme = {preset.name: check_nvme(preset, nvme_path=nvme_path, arguments=job.arguments, cpu=cpu) for preset in chosen}
    open_comparison(output, comparison, resume=resume)
    on_checked(cpu)
    given = {preset.name: name for preset, name in zip(chosen, presets, strict=True)}
    _run(comparison, output, given, nvme, retry_failed, timeout_seconds)
    _publish(results_of(comparison, output), output)


def _run(
    comparison: Comparison,
    output: Path,
    presets: dict[str, str],
    nvme: dict[str, NvmeDisk | None],
    retry_failed: bool,
    timeout_seconds: float,
) -> None:
    screen = _Screen(len(comparison.trials()))
    try:
        with terminate_as_interrupt(), screen:
            run_trials(
                comparison,
                output,
                presets,
                retry_failed=retry_failed,
                timeout_seconds=timeout_seconds,
                on_start=screen.start,
                on_line=screen.line,
                on_finish=screen.finish,
                nvme=nvme,
            )
    except (Stopped, KeyboardInterrupt):
        _talk().print("stopped; finished trials are kept. The same command with `--resume` goes on.")
        raise typer.Exit(EXIT_RUN_FAILED) from None


def write_report_again(folder: Path) -> None:
    """The report from results.json."""
    refuse_rehearsals([folder])
    _publish(load_results(folder), folder)


def _publish(results: Results, folder: Path) -> None:
    files = write_report(results, folder)
    Console(width=max(Console().width, TABLE_COLUMNS)).print(console_table(results))
    print(summary_sentence(results))
    for path in (files.markdown, files.html, files.results_json, files.results_csv, files.plot):
        print(path)


def _talk() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)  # a pipe keeps one line a trial


class _Screen:
    """Bars on a terminal; one line when a trial starts and one when it ends anywhere else."""

    def __init__(self, total: int) -> None:
        self.console = _talk()
        self.total, self.finished = total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=self.console) if self.console.is_terminal else None
        self.trials = self.bars.add_task("trials", total=total) if self.bars else None
        self.steps: Any = None

    def __enter__(self) -> None:
        (self.bars or nullcontext()).__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.bars:
            self.bars.__exit__(*exception)

    def start(self, trial: Trial) -> None:
        if self.bars:
            self.steps = self.bars.add_task(f"{trial.id}: starting", total=None)
        else:
            self.console.print(f"[{self.finished + 1}/{self.total}] {trial.id}: starting", markup=False)
        sys.stderr.flush()

    def line(self, text: str) -> None:
        """A line of the trial's own output: its steps move the bar."""
        match = STEP_LINE.match(text)
        if match and self.bars:
            name = str(self.bars.tasks[self.steps].description).split(":")[0]
            completed, total = int(match[1]), int(match[2])
            self.bars.update(self.steps, completed=completed, total=total if total > 0 else None, description=name)

    def finish(self, trial: Trial, row: Row, from_ledger: bool) -> None:
        self.finished += 1
        if self.bars and self.steps is not None and not from_ledger:
            self.bars.remove_task(self.steps)
        if self.bars and self.trials is not None:
            self.bars.update(self.trials, completed=self.finished)
        note = "already in the ledger" if from_ledger else f"in {seconds(row['wall_seconds'])}"
        if row["status"] == status.COMPLETED:
            words = (
                f"completed, {number(row['tokens_per_second'], 0)} tokens/s, last loss {number(row['last_loss'], 4)}"
            )
        else:
            words = f"{row['status']}: {row['message']}"
        self.console.print(f"[{self.finished}/{self.total}] {trial.id}: {words} ({note})", markup=False)
