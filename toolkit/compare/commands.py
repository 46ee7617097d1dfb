"""`toolkit compare` and `toolkit report`: check the job, run the trials, write the report, print table and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolkit.cluster.allocation import Allocation
from toolkit.compare.answer import answer
from toolkit.compare.build_results import at_price, build_results, unfinished_results
from toolkit.compare.comparison_report import console_table, write_report
from toolkit.compare.ledger import comparison_lock
from toolkit.compare.options import PRICES, CompareOptions, check_timed_steps
from toolkit.compare.predictions import announcement, dry_run, dry_run_text
from toolkit.compare.results import RESULTS_FILE, Results, load_results, results_file
from toolkit.compare.rows import RowKey
from toolkit.compare.runner import Runner, find_largest_batches
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.demo.assets import attribution
from toolkit.doctor.ops import compile_for_run
from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError
from toolkit.files.paths import user_path
from toolkit.hardware.gpu_table import common_gpu
from toolkit.hardware.gpus import ON_CPU_MESSAGE, gpu_names
from toolkit.job.argument_values import check_range
from toolkit.job.job import Job
from toolkit.job.job_checks import check_values, refuse_arguments_of_comparison
from toolkit.launch.nvme import NvmeDisk, check_nvme
from toolkit.launch.preflight import check_arguments_of, check_libraries, check_process_count, check_run, device_of
from toolkit.launch.process import terminate_as_interrupt
from toolkit.launch.resume import TrainingRun
from toolkit.observe.script_file import check_script_preset
from toolkit.plan.planner import check_ranks_fit
from toolkit.presets.support import check_degrees_given
from toolkit.rehearse.rehearsal import refuse_rehearsals
from toolkit.report.rendering import one_line

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
    """Check everything that can be known before a trial, and return the comparison with what was found.

    Raises ToolkitError for an invalid job.
    """
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
    """Write the report from results.json, or of a stopped comparison from its ledger; with costs at another price.

    Raises ToolkitError for a file of another name: its report would replace that of its folder.
    """
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
