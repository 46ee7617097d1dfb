"""`toolkit simulate`: scale on paper, without torch and without GPUs."""

from __future__ import annotations

import json
import os

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_message
from toolkit.flags import JsonOutput
from toolkit.simulate.options import FailureOptions, PipelineOptions, StragglerOptions

simulate_app = typer.Typer(
    no_args_is_help=True, help="Simulate schedules of a pipeline, failures and checkpoints, or stragglers."
)


@simulate_app.command()
@expand_options
def pipeline(options: PipelineOptions, as_json: JsonOutput = False) -> None:
    """Step time, bubble and peak micro-batches of pipeline schedules, with a timeline.

    Times are those of one micro-batch on one stage: given in milliseconds, planned for a model, or all equal.
    """
    from toolkit.simulate.pipeline_comparison import chunks_without_effect, compare_schedules
    from toolkit.simulate.pipeline_report import print_comparison, write_report

    comparison = compare_schedules(options)
    if chunks_without_effect(options):
        print_message("warning: --chunks has no effect: these schedules have one chunk per stage")
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2))
    else:
        print_comparison(comparison, timeline=options.timeline)
    if options.output_dir is not None:
        write_report(comparison, options.output_dir)


@simulate_app.command()
@expand_options
def failures(options: FailureOptions, as_json: JsonOutput = False) -> None:
    """Time between failures, best checkpoint interval, and how much of a long job's time is progress.

    Closed forms and a seeded Monte Carlo simulation side by side.
    """
    from toolkit.simulate.estimate_report import print_estimate, write_report
    from toolkit.simulate.failure_estimate import estimate_failures

    estimate = estimate_failures(options)
    if as_json:
        print(json.dumps(estimate.as_json(), indent=2))
    else:
        print_estimate(estimate)
    if options.output_dir is not None:
        write_report(estimate, options.output_dir)


@simulate_app.command()
@expand_options
def stragglers(options: StragglerOptions, as_json: JsonOutput = False) -> None:
    """Cost of slow workers, and of synchronous, backup-worker, bounded-staleness and asynchronous updates.

    Speed, waste and staleness are simulated; losses are those of a small network, trained under each policy. With
    --model, its gradients are communicated.
    """
    # Read when NumPy is imported, below: threads of BLAS only wait for each other in matrices as small as these.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from toolkit.simulate.straggler_report import print_study, write_report
    from toolkit.simulate.stragglers import study_stragglers

    study = study_stragglers(options, say=print_message)
    if as_json:
        print(json.dumps(study.as_json(), indent=2))
    else:
        print_study(study)
    if options.output_dir is not None:
        print_message(f"report: {write_report(study, options.output_dir)}")
