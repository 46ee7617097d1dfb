"""`toolkit train`, `compare`, `tune` and `report`: run a job, alone or under several presets, and report."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import expand_options, recognising
from toolkit.compare.options import CompareOptions
from toolkit.entry_point import print_failure, print_message
from toolkit.errors import RunFailed, ToolkitError
from toolkit.flags import JsonOutput, PricePerGpuHour
from toolkit.hardware.gpus import ON_CPU_MESSAGE, default_num_processes
from toolkit.hardware.node import busy_cores
from toolkit.job.job import Job
from toolkit.launch.options import AUTO_PRESET, TrainOptions
from toolkit.tune.options import TuneOptions
from toolkit.units import counted, gib

if TYPE_CHECKING:
    from toolkit.launch.launch import PreparedRun


@expand_options
def train(options: TrainOptions, as_json: JsonOutput = False) -> None:
    """Check the job, print the launch command, and run it.

    After `--`: at least --model_name_or_path, --dataset and --output_dir, as flags or in a YAML file that goes first
    (examples/lora_8b.yaml is shipped). `demo` is a small model, and its data: `--model_name_or_path demo --dataset
    demo`. `toolkit train -- --help` lists all training arguments. With --script or --module, what follows `--` is for
    that program.
    """
    from toolkit.demo.assets import with_demo_inputs
    from toolkit.doctor.ops import compile_for_run
    from toolkit.launch.launch import prepare_run
    from toolkit.launch.launch import train as run_prepared
    from toolkit.launch.terminal import LiveLine
    from toolkit.record.folder import RunFolder

    if as_json and not options.dry_run:
        raise ToolkitError("--json needs --dry-run: a run is read from its folder", hint="run.json of --output_dir")
    with recognising(options.preset, *options.training_arguments[:1]):
        words = with_demo_inputs(options.training_arguments, runs_script=options.runs_script)
        options = replace(options, training_arguments=words)
        chosen = default_preset_of(options) if options.preset == AUTO_PRESET else None
        options = options if chosen is None else replace(options, preset=chosen[0])
        prepared = prepare_run(options, on_message=print_message)
    if chosen is not None:
        print_message(f"preset {chosen[0]}, the default for {chosen[1]}; `--preset NAME` takes another")
    if options.on_cpu and options.cpu is None:  # a device that the user did not choose
        print_message(ON_CPU_MESSAGE)
    if options.on_cpu and (busy := busy_cores()):
        print_message(f"warning: {busy}")
    if prepared.nvme is not None:
        print_message("\n".join([prepared.nvme.describe(), *prepared.nvme.warnings]))
    elif options.nvme_path is not None:
        print_message(f"--nvme-path has no effect: preset {prepared.command.preset.name!r} does not offload to a disk")
    if options.dry_run:
        for line in prepared.run.warnings:
            print_message(f"warning: {line}")
    plan = _plan(prepared)
    if options.dry_run:
        print(json.dumps(prepared.as_row(), indent=2) if as_json else prepared.command.shown)
        rows = "" if options.runs_script else " (of rows up to 32 MiB of a file; their tokens, the ranks check)"
        name = str(prepared.run.job.model_name_or_path)
        hub = "" if options.runs_script or Path(name).exists() else f"; {name} is not asked of the hub"
        print_message(f"every check passed{rows}{hub}; nothing was started")
        return
    compile_for_run([prepared.command.preset], on_cpu=options.on_cpu)
    with LiveLine(RunFolder(prepared.run.output_dir).timeline) as live:
        result = run_prepared(prepared, plan=plan, on_message=live.print)
    if result.failure is not None:
        if options.runs_script and result.failure.get("traceback"):
            print_message(str(result.failure["traceback"]).rstrip())
        print_failure(result.status, result.failure)
    raise typer.Exit(result.exit_code)


def default_preset_of(options: TrainOptions | TuneOptions) -> tuple[str, str]:
    """Return the preset of a run that names none, and what it is the default for."""
    from toolkit.hardware.gpu_table import chosen_gpu
    from toolkit.plan.planner import default_preset

    processes = options.num_processes or default_num_processes(on_cpu=options.on_cpu)
    name, why = ("single", "one process") if processes == 1 else ("ddp", f"{processes} processes")
    if not options.on_cpu and not options.runs_script:
        with contextlib.suppress(ToolkitError):  # the checks that follow report it, if it is a fault of the job
            gpu = chosen_gpu(options.gpu, memory_gib=None)
            job = Job.from_argv(options.training_arguments)
            name, why = default_preset(job, world_size=processes, gpu=gpu), f"this job on {processes} × {gpu.name}"
    return name, why


def _plan(prepared: PreparedRun) -> dict[str, Any] | None:
    """Plan the run on the GPUs that it uses, and print the planned peak; on a CPU only the host memory is checked."""
    if prepared.options.on_cpu:
        _check_node(prepared)
    if prepared.options.on_cpu or prepared.options.runs_script:
        return None
    from toolkit.hardware.gpu_table import find_gpu, shared_gpu
    from toolkit.plan.planner import check_ranks_fit, plan_line, plan_run, plan_run_here

    run, shared = prepared.run, prepared.options.ranks_per_gpu
    size = run.num_processes
    if prepared.options.gpu is None:
        return plan_run_here(run.preset, run.job, world_size=size, say=print_message, ranks_per_gpu=shared)
    gpu = find_gpu(prepared.options.gpu)
    plan = plan_run(run.preset, run.job, world_size=size, gpu=shared_gpu(gpu, shared))
    if shared > 1:
        check_ranks_fit(run.preset, run.job, world_size=size, gpu=gpu, ranks_per_gpu=shared)
    print_message(plan_line(plan))
    return None


def _check_node(prepared: PreparedRun) -> None:
    from toolkit.hardware.node import usable_memory_bytes
    from toolkit.models.read_model import read_model
    from toolkit.plan.planned_job import PlannedJob
    from toolkit.plan.training_setup import all_ranks_bytes

    run, cores, needed = prepared.run, len(os.sched_getaffinity(0)), 0
    if run.num_processes > cores:
        print_message(f"warning: {run.num_processes} processes share {counted(cores, 'core')}")
    with contextlib.suppress(ToolkitError):  # of a job that cannot be planned, as that of a script
        shape, job = read_model(str(run.job.model_name_or_path), count=False), PlannedJob.of(run.job)
        needed = all_ranks_bytes(shape, run.preset, world_size=run.num_processes, job=job)
    if needed > (memory := usable_memory_bytes()):
        raise ToolkitError(
            f"model states of {run.num_processes} processes take {gib(needed)} in fp32; this node has {gib(memory)}",
            hint="lower `--num-processes`; `--lora_r 16`, or a preset that shards (`toolkit presets`), takes less",
        )


@expand_options
def compare(options: CompareOptions, as_json: JsonOutput = False) -> None:
    """Train the same job under several presets, and report the differences.

    After `--`: the job, at least --model_name_or_path, --dataset and --max_steps, as for `toolkit train`.
    """
    from toolkit.compare.runner import run_comparison
    from toolkit.demo.assets import with_demo_inputs

    with recognising(*options.preset, *options.training_arguments[:1]):
        words = with_demo_inputs(options.training_arguments, runs_script=options.runs_script)
        run_comparison(replace(options, training_arguments=words), as_json=as_json)


@expand_options
def tune(options: TuneOptions, as_json: JsonOutput = False) -> None:
    """Find the fastest setting of a job that fits: preset, per-GPU batch, checkpointing, loss, compilation.

    The problem stays: sequences per step, length, optimizer, dtypes. Plans rule out what does not fit; trials of the
    rest run in rounds, and after each round what is slower than the fastest is eliminated.

    The job: a model, a YAML file (--config), or arguments as for `toolkit train`, after `--`.
    """
    from toolkit.demo.assets import with_demo_inputs
    from toolkit.launch.preflight import check_required
    from toolkit.tune.commands import run_tune

    with recognising(*options.preset, *options.job_words[:1]):
        words = with_demo_inputs(options.job_words, runs_script=options.runs_script)
        options = replace(options, training_arguments=words, config=None)
        if not options.runs_script:  # before hundreds of plans
            check_required(Job.from_argv(words), ("model_name_or_path", "dataset"))
        preset = options.baseline or next(iter(options.preset), None)
        if preset is None:
            preset = default_preset_of(options)[0]
        run_tune(options, preset, as_json=as_json)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="folder of a comparison; with --share a run, or files of rows", metavar="DIR")
    ],
    price_per_gpu_hour: PricePerGpuHour = None,
    share: Annotated[
        bool, typer.Option("--share", help="print all that others may read of a verified run; or check such a file")
    ] = False,
    as_json: JsonOutput = False,
) -> None:
    """Write the report of a comparison again, from its files alone.

    With --share and a run folder: one JSON row of it, from a fixed list of fields; nothing is sent. With --share and
    files of such rows: checks them.
    """
    if share:
        return _share(folders, as_json=as_json)
    from toolkit.compare.runner import write_report_again

    if len(folders) > 1:
        raise ToolkitError(f"got {len(folders)} folders, expected one", hint="report each of them alone")
    write_report_again(folders[0], price_per_gpu_hour=price_per_gpu_hour, as_json=as_json)


def _share(paths: list[Path], *, as_json: bool) -> None:
    from toolkit.record.shared_run import SharedRun, check_shared_rows

    if not paths[0].is_file():
        print(SharedRun.of_run(paths[0]).model_dump_json(indent=2))
        print_message("this is all that is shared, and nothing was sent: keep it with `> row.json`")
        return
    problems = [problem for path in paths for problem in check_shared_rows(path)]
    if problems:
        raise RunFailed("\n".join(problems))
    if as_json:
        print(json.dumps({"checked": list(map(str, paths))}, indent=2))
    print_message(f"{counted(len(paths), 'row')} checked")
