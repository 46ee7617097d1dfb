"""`toolkit train`, `compare` and `report`: run a job, alone or under several presets, and report the differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import expand_options
from toolkit.compare.options import CompareOptions
from toolkit.entry_point import print_failure, print_message
from toolkit.errors import ToolkitError
from toolkit.flags import PricePerGpuHour
from toolkit.hardware.gpus import ON_CPU_MESSAGE
from toolkit.launch.options import TrainOptions

if TYPE_CHECKING:
    from toolkit.launch.launch import PreparedRun


@expand_options
def train(options: TrainOptions) -> None:
    """Check the job, print the launch command, and run it.

    After `--`: at least --model_name_or_path, --dataset and --output_dir; `demo` is a small model, and its data. All
    training arguments: `python -m toolkit.train --help`. With --script or --module, what follows `--` is for that
    program.
    """
    from toolkit.demo.assets import with_demo_inputs
    from toolkit.doctor.ops import compile_for_run
    from toolkit.launch.launch import prepare_run
    from toolkit.launch.launch import train as run_prepared
    from toolkit.launch.terminal import LiveLine

    if not options.runs_script:
        options = replace(options, training_arguments=with_demo_inputs(options.training_arguments))
    prepared = prepare_run(options, on_message=print_message)
    if options.on_cpu and options.cpu is None:  # a device that the user did not choose
        print_message(ON_CPU_MESSAGE)
    if prepared.nvme is not None:
        print_message("\n".join([prepared.nvme.describe(), *prepared.nvme.warnings]))
    elif options.nvme_path is not None:
        print_message(f"--nvme-path has no effect: preset {prepared.command.preset.name!r} does not offload to a disk")
    if options.dry_run:
        for line in prepared.run.warnings:
            print_message(f"warning: {line}")
        _plan(prepared)
        print(prepared.command.shown)
        print_message("every check passed; nothing was started")
        return
    plan = _plan(prepared)
    compile_for_run([prepared.command.preset], on_cpu=options.on_cpu)
    with LiveLine() as live:
        result = run_prepared(prepared, plan=plan, on_message=live.print)
    if result.failure is not None:
        print_failure(result.status, result.failure)
    raise typer.Exit(result.exit_code)


def _plan(prepared: PreparedRun) -> dict[str, Any] | None:
    """Plan the run on the GPUs that it uses, and print the planned peak; runs on a CPU are not planned."""
    if prepared.options.on_cpu or prepared.options.runs_script:
        return None
    from toolkit.hardware.gpu_table import find_gpu, shared_gpu
    from toolkit.plan.planner import check_ranks_fit, plan_line, plan_run, plan_run_here

    run, shared = prepared.run, prepared.options.ranks_per_gpu
    size = run.num_processes
    if prepared.options.gpu is None:
        return plan_run_here(run.preset, run.job, world_size=size, say=print_message, ranks_per_gpu=shared)
    gpu = find_gpu(prepared.options.gpu)
    if shared > 1:
        check_ranks_fit(run.preset, run.job, world_size=size, gpu=gpu, ranks_per_gpu=shared)
    print_message(plan_line(plan_run(run.preset, run.job, world_size=size, gpu=shared_gpu(gpu, shared))))
    return None


@expand_options
def compare(options: CompareOptions) -> None:
    """Train the same job under several presets, and report the differences.

    After `--`: the job, at least --model_name_or_path, --dataset and --max_steps, as for `toolkit train`.
    """
    from toolkit.compare.commands import run_comparison
    from toolkit.demo.assets import with_demo_inputs

    if not options.runs_script:
        options = replace(options, training_arguments=with_demo_inputs(options.training_arguments))
    run_comparison(options)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="folder of a comparison; or two: before and after", metavar="DIR [DIR]")
    ],
    price_per_gpu_hour: PricePerGpuHour = None,
) -> None:
    """Write the report of a comparison again, or compare two.

    Reads the comparison's files alone. Two comparisons must train the same job; otherwise the differences are listed
    and the exit code is 2.
    """
    from toolkit.compare.commands import report_both, write_report_again

    if len(folders) > 2:
        raise ToolkitError(f"got {len(folders)} folders, expected one, or two to compare")
    if len(folders) == 1:
        write_report_again(folders[0], price_per_gpu_hour=price_per_gpu_hour)
    elif price_per_gpu_hour is None:
        report_both(*folders)
    else:
        raise ToolkitError("--price-per-gpu-hour applies to the report of a single comparison", hint="name one folder")
