"""`toolkit simulate`: scale on paper, without torch and without GPUs."""

from __future__ import annotations

import json

import typer

from toolkit.cli.options import expand_options
from toolkit.flags import JsonOutput
from toolkit.simulate.options import FailureOptions, PipelineOptions

simulate_app = typer.Typer(no_args_is_help=True, help="Simulate a pipeline's schedules, or failures and checkpoints.")


@simulate_app.command()
@expand_options
def pipeline(options: PipelineOptions, as_json: JsonOutput = False) -> None:
    """Step time, bubble and peak micro-batches of pipeline schedules, with a timeline.

    Times are those of one micro-batch on one stage: given in milliseconds, planned for a model, or all equal.
    """
    from toolkit.simulate.pipeline_comparison import compare_schedules
    from toolkit.simulate.pipeline_report import print_comparison, write_report

    comparison = compare_schedules(options)
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
    from toolkit.simulate.failure_estimate import estimate_failures
    from toolkit.simulate.failure_report import print_estimate, write_report

    estimate = estimate_failures(options)
    if as_json:
        print(json.dumps(estimate.as_json(), indent=2))
    else:
        print_estimate(estimate)
    if options.output_dir is not None:
        write_report(estimate, options.output_dir)
