"""`toolkit compare` and `toolkit report`: check first, show progress, end with the table and the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from toolkit.compare.asked import (
    Entry,
    entries,
    numbers_of_processes,
    scaling_of,
    strong_batches,
    unsupported_rows,
)
from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.efficiency import shape_of_model
from toolkit.compare.extras import run_extras
from toolkit.compare.largest_batch import find_largest_batches
from toolkit.compare.ledger import LEDGER_FILE, Ledger, alone
from toolkit.compare.loading import load_results
from toolkit.compare.probes import with_largest_batches
from toolkit.compare.replay import replay_row
from toolkit.compare.report import (
    console_table,
    pair_sentence,
    pair_table,
    pair_up,
    summary_sentence,
    write_pair,
    write_report,
)
from toolkit.compare.reported import at_price
from toolkit.compare.results import Results
from toolkit.compare.run import Runner, Stopped, Telling, results_of
from toolkit.compare.screen import Screen, talk
from toolkit.compare.trials import (
    Comparison,
    open_comparison,
    plan_comparison,
    read_comparison,
    refuse_own_arguments,
    row_name,
)
from toolkit.errors import EXIT_RUN_FAILED, ToolkitError
from toolkit.hardware.gpu_table import Gpu, common_gpu, find_gpu
from toolkit.hardware.machine import gpu_names
from toolkit.launch.nvme import NvmeDisk, check_nvme
from toolkit.launch.preflight import check_job
from toolkit.launch.process import terminate_as_interrupt
from toolkit.runs.argv import integer, read_arguments
from toolkit.runs.rehearsals import refuse_rehearsals

# Half the 95 % interval of a trial's median step, over the median. Offloading waits for host memory, and a CPU for
# its neighbours: both vary more from step to step.
TARGET_ON_GPU, TARGET_ON_CPU = 0.01, 0.03
TABLE_COLUMNS = 100  # narrower, presets and statuses would be broken over lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `toolkit compare` was given, beside the folder and what only this call does."""

    presets: Sequence[str]
    variants: Sequence[str] = ()
    num_processes: Sequence[str]
    training_arguments: Sequence[str]
    repeats: int = 3
    order_seed: int = 0
    untimed_steps: int = 2
    target_interval: float | None = None
    """None: by the device and the preset."""
    trial_minutes: float | None = None
    reference: str | None = None
    scaling: str | None = None
    find_max_batch: int | None = None
    cpu: bool
    nvme_path: str | None = None
    gpu: str | None = None
    """With `--dry-run`: the GPU that is predicted for, which need not be here."""

    @property
    def gpus(self) -> int | None:
        """GPUs of the machine that is predicted for: as many as are asked for; None where it is this one."""
        return None if self.gpu is None else max(numbers_of_processes(self.num_processes))

    def check(self) -> None:
        """Numbers that mean something."""
        for name, value in {"repeats": self.repeats, "find-max-batch": self.find_max_batch}.items():
            if value is not None and value < 1:
                raise ToolkitError(f"--{name} is {value}, expected 1 or more")
        if self.trial_minutes is not None and not self.trial_minutes > 0:
            raise ToolkitError(f"--trial-minutes is {self.trial_minutes:g}, expected more than 0")
        if self.find_max_batch is not None and self.scaling == "strong":
            raise ToolkitError(
                "--find-max-batch with --scaling strong: each searches a micro-batch, for another reason",
                hint="leave one of them out; weak scaling compares each row at its largest micro-batch",
            )
        if self.target_interval is not None and not 0 <= self.target_interval < 1:
            raise ToolkitError(f"--target-interval is {self.target_interval}, expected a share from 0 to below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What is measured or said beside the trials; a comparison may be resumed with more of it."""

    profile: bool = False
    measure_save: bool = False
    price_per_gpu_hour: float | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the runs that no speed counts."""
        return tuple(kind for kind, asked in (("profile", self.profile), ("save", self.measure_save)) if asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A comparison that can start."""

    comparison: Comparison
    unsupported: dict[str, str]
    nvme: dict[str, NvmeDisk | None]


def check_comparison(asked: Asked) -> Checked:
    """Everything that can be known before a trial. Raises ToolkitError for what is wrong with the job."""
    found = entries(asked.presets, asked.variants)
    comparison = plan(asked, found)
    unsupported = unsupported_rows(found, comparison, gpus=asked.gpus)
    rows = [(entry, n) for n in comparison.num_processes for entry in found]
    can = [(entry, n) for entry, n in rows if row_name(entry.name, n) not in unsupported]
    preset, n = can[-1][0].preset, can[-1][1]
    job = check_job(preset, num_processes=n, training_argv=asked.training_arguments, cpu=asked.cpu, gpus=asked.gpus)
    refuse_own_arguments(job.arguments, integer(job.arguments, "max_steps", 0), asked.untimed_steps)
    for entry in found:
        refuse_own_arguments(read_arguments(entry.extra_arguments), 0, 0)
    nvme = {
        entry.name: check_nvme(entry.preset, nvme_path=asked.nvme_path, arguments=job.arguments, cpu=asked.cpu)
        for entry in {id(entry): entry for entry, _ in can}.values()
    }
    return Checked(comparison=comparison, unsupported=unsupported, nvme=nvme)


def plan(asked: Asked, found: Sequence[Entry]) -> Comparison:
    """The comparison, before anything is looked at but names and numbers."""
    asked.check()
    numbers = numbers_of_processes(asked.num_processes)
    scaling = scaling_of(asked.scaling, numbers)
    arguments = read_arguments(asked.training_arguments)
    return plan_comparison(
        {entry.name: entry.preset for entry in found},
        loads={entry.name: entry.given for entry in found},
        extra_arguments={entry.name: entry.extra_arguments for entry in found if entry.extra_arguments},
        num_processes=numbers,
        training_arguments=asked.training_arguments,
        untimed_steps=asked.untimed_steps,
        reference=asked.reference,
        cpu=asked.cpu,
        repeats=asked.repeats,
        order_seed=asked.order_seed,
        target_interval=target_interval(asked, found),
        trial_minutes=asked.trial_minutes,
        scaling=scaling,
        find_max_batch=asked.find_max_batch,
        batches=strong_batches(found, arguments, numbers) if scaling == "strong" else {},
    )


def target_interval(asked: Asked, found: Sequence[Entry]) -> float | None:
    """Half the interval of the median step at which a trial has timed enough; 0 times all steps."""
    if asked.target_interval is not None:
        return asked.target_interval or None
    offloads = any(entry.preset.offload_optimizer or entry.preset.offload_param for entry in found)
    return TARGET_ON_CPU if asked.cpu or offloads else TARGET_ON_GPU


def run_comparison(
    asked: Asked,
    *,
    output: Path,
    resume: bool,
    retry_failed: bool,
    dry_run: bool,
    on_checked: Callable[[bool], None],
    timeout_seconds: float,
    beside: Beside,
) -> None:
    """Run or resume a comparison, write its report, print its table.

    Raises ToolkitError before any trial for what is wrong with the job; a trial that fails is a row.
    """
    if asked.gpu is not None and not dry_run:
        raise ToolkitError("--gpu belongs to --dry-run: trials run on the GPUs that are here", hint="add `--dry-run`")
    gpu = gpu_of(asked)
    checked = check_comparison(asked)
    if dry_run:
        shape = shape_of_model(read_arguments(asked.training_arguments)["model_name_or_path"])
        price = beside.price_per_gpu_hour
        print(
            dry_run_text(
                checked.comparison, output, checked.unsupported, price_per_gpu_hour=price, shape=shape, gpu=gpu
            )
        )
        return
    open_comparison(output, checked.comparison, resume=resume)
    with alone(output):
        on_checked(asked.cpu)
        if asked.cpu and beside.price_per_gpu_hour is not None:
            talk().print("--price-per-gpu-hour has no effect: no GPU is used")
        comparison = _run(checked, output, beside, retry_failed=retry_failed, timeout_seconds=timeout_seconds)
        found = results_of(comparison, output, checked.unsupported, price_per_gpu_hour=beside.price_per_gpu_hour)
        _publish(found, output)


def gpu_of(asked: Asked) -> Gpu | None:
    """The GPU that is named, or that is here, as far as the planner lists it; None on a CPU."""
    if asked.gpu is not None:
        return find_gpu(asked.gpu)
    return None if asked.cpu else common_gpu(gpu_names())


def _run(checked: Checked, output: Path, beside: Beside, *, retry_failed: bool, timeout_seconds: float) -> Comparison:
    """All trials, after the search for each row's largest micro-batch where that is asked for."""
    comparison = checked.comparison
    runs = [trial.row for trial in comparison.trials() if trial.row not in checked.unsupported]
    screen = Screen(len(runs) + (len(set(runs)) if beside.kinds else 0))
    runner = Runner(
        comparison=comparison,
        folder=output,
        timeout_seconds=timeout_seconds,
        nvme=checked.nvme,
        telling=Telling(
            start=screen.start, line=screen.line, finish=screen.finish, skip=screen.skip, probe=screen.probe
        ),
    )
    cannot = dict(checked.unsupported)
    try:
        with terminate_as_interrupt(), screen:
            if comparison.find_max_batch is not None:
                runner, without = find_largest_batches(runner, cannot, retry_failed=retry_failed)
                cannot |= without
            runner.run(cannot, retry_failed=retry_failed)
            run_extras(runner, cannot, kinds=beside.kinds, retry_failed=retry_failed)
    except (Stopped, KeyboardInterrupt):
        talk().print("stopped; finished trials are kept. The same command with `--resume` goes on.")
        raise typer.Exit(EXIT_RUN_FAILED) from None
    return runner.comparison


def replay(folder: Path, row: str, *, timeout_seconds: float, nvme_path: str | None) -> None:
    """Run one row of a comparison again, and say whether its speed lands where its repeats expect it."""
    comparison = with_largest_batches(read_comparison(folder), Ledger(folder / LEDGER_FILE))
    screen = Screen(1)
    telling = Telling(start=screen.start, line=screen.line, finish=screen.finish, skip=screen.skip, probe=screen.probe)
    with alone(folder), terminate_as_interrupt(), screen:
        said = replay_row(
            comparison, folder, row, telling=telling, timeout_seconds=timeout_seconds, nvme_path=nvme_path
        )
    print(said)


def write_report_again(folder: Path, *, price_per_gpu_hour: float | None) -> None:
    """The report from results.json, its costs at another price if there is one."""
    refuse_rehearsals([folder])
    results = load_results(folder)
    _publish(results if price_per_gpu_hour is None else at_price(results, price_per_gpu_hour), folder)


def report_both(before: Path, after: Path) -> None:
    """Two comparisons of one job side by side; the files go beside the later one's."""
    paired = pair_up(load_results(before), load_results(after))
    folder = after if after.is_dir() else after.parent
    files = write_pair(paired, folder)
    Console(width=max(Console().width, TABLE_COLUMNS)).print(pair_table(paired))
    for name, old, new in paired.environment:
        print(f"{name}: {old} -> {new}")
    print(pair_sentence(paired))
    for path in (files.markdown, files.html):
        print(path)


def _publish(results: Results, folder: Path) -> None:
    files = write_report(results, folder)
    Console(width=max(Console().width, TABLE_COLUMNS)).print(console_table(results))
    print(summary_sentence(results))
    for path in (files.markdown, files.html, files.results_json, files.results_csv, files.plot):
        print(path)
