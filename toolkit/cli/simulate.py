"""`toolkit simulate`: scale on paper, without torch and without GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_message
from toolkit.flags import JsonOutput
from toolkit.parallel.pipeline_schedule import INTERLEAVED, SCHEDULES
from toolkit.simulate.options import FailureOptions, PipelineOptions, StragglerOptions

if TYPE_CHECKING:
    from toolkit.simulate.failure_estimate import FailureEstimate
    from toolkit.simulate.pipeline_comparison import PipelineComparison
    from toolkit.simulate.simulation_report import SimulationReport
    from toolkit.simulate.stragglers import StragglerStudy

simulate_app = typer.Typer(
    no_args_is_help=True, help="Simulate schedules of a pipeline, failures and checkpoints, or stragglers."
)


@simulate_app.command()
@expand_options
def pipeline(options: PipelineOptions, as_json: JsonOutput = False) -> None:
    """Step time, bubble and peak micro-batches of pipeline schedules, with a timeline.

    Times are those of one micro-batch on one stage: given in milliseconds, planned for a model, or all equal.
    """
    from toolkit.simulate.pipeline_comparison import compare_schedules, pipeline_report

    comparison = compare_schedules(options)
    if options.chunks not in (None, 1) and INTERLEAVED not in (options.schedule or SCHEDULES):
        print_message("warning: --chunks has no effect: these schedules have one chunk per stage")
    page = None if options.output_dir is None else pipeline_report(comparison, timeline=False, on_page=True)
    _show(comparison, pipeline_report(comparison, timeline=options.timeline), as_json, options.output_dir, page=page)


@simulate_app.command()
@expand_options
def failures(options: FailureOptions, as_json: JsonOutput = False) -> None:
    """Time between failures, best checkpoint interval, and how much of a long job's time is progress.

    Closed forms and a seeded Monte Carlo simulation side by side.
    """
    from toolkit.simulate.failure_estimate import estimate_failures, failure_report

    estimate = estimate_failures(options)
    _show(estimate, failure_report(estimate), as_json, options.output_dir)


@simulate_app.command()
@expand_options
def stragglers(options: StragglerOptions, as_json: JsonOutput = False) -> None:
    """Cost of slow workers, and of updates that do not wait for them. With --model, its gradients are communicated."""
    from toolkit.simulate.stragglers import straggler_report, study_stragglers

    study = study_stragglers(options)
    _show(study, straggler_report(study), as_json, options.output_dir)


def _show(
    simulated: PipelineComparison | FailureEstimate | StragglerStudy,
    report: SimulationReport,
    as_json: bool,
    folder: Path | None,
    *,
    page: SimulationReport | None = None,
) -> None:
    written = json.dumps(simulated.as_json(), indent=2) + "\n"
    if folder is not None:
        from toolkit.report.rendering import write_report_file

        write_report_file(folder / "simulation.json", written)
        print_message(f"report: {write_report_file(folder / 'simulation.html', (page or report).page())}")
    if as_json:
        print(written, end="")
    else:
        report.print()
