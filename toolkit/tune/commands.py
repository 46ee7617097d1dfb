"""`toolkit tune`: make the field, run trials of `toolkit compare` until the search ends, and print the fastest setting.

The folder is one of a comparison as well: `toolkit report DIR` shows every figure of its trials.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import typer

from toolkit.compare.commands import check_comparison
from toolkit.compare.ledger import comparison_lock
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import expected_duration, read_shape
from toolkit.compare.runner import Runner
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.doctor.ops import compile_for_run
from toolkit.entry_point import print_message
from toolkit.errors import EXIT_OUT_OF_MEMORY, EXIT_RUN_FAILED, ToolkitError
from toolkit.hardware.gpus import ON_CPU_MESSAGE
from toolkit.job.job import Job
from toolkit.job.job_checks import ARGUMENTS_OF_COMPARISON
from toolkit.launch.process import terminate_as_interrupt
from toolkit.record.folder import write_json
from toolkit.screen_text import print_lines
from toolkit.tune.field import YOURS, Field, make_field
from toolkit.tune.options import TuneOptions
from toolkit.tune.report import field_lines, result_json, result_lines
from toolkit.tune.standing import stand, trial_of
from toolkit.units import counted, number

TUNE_FILE = "tune.json"
# What a trial leaves out of the user's job: what the comparison sets, and evaluations, which no step time counts.
NOT_IN_TRIALS = (*ARGUMENTS_OF_COMPARISON, "eval_strategy", "eval_on_start", "load_best_model_at_end")


def run_tune(options: TuneOptions, preset: str, *, as_json: bool = False) -> None:
    """Search, and print the fastest setting. Raises ToolkitError, before any trial, for an invalid job."""
    field = make_field(options, preset)
    compared = compare_options(options, field)
    runner = check_comparison(Runner(options=compared, spec=make_specification(compared)))
    if options.dry_run:
        planned = result_json(field, stand(field.settings, runner.spec, {}), options)
        print_lines([json.dumps(planned, indent=2)] if as_json else field_lines(planned, _time(runner, field, options)))
        return
    if len(field.settings) == 1:
        why = f"{field.not_tried[0].name}: {field.not_tried[0].why}" if field.not_tried else "every part is kept"
        raise ToolkitError(f"there is no setting to try but your own ({why})", hint="`--dry-run` lists them all")
    open_comparison(options.output_dir, runner.spec, resume=options.resume)
    runner.ledger.read()  # a damaged line is reported before anything starts
    with comparison_lock(options.output_dir):
        if options.on_cpu and options.cpu is None:  # a device that the user did not choose
            print_message(ON_CPU_MESSAGE)
        print_message(f"{counted(len(field.settings), 'setting')}, {len(field.not_tried)} not tried")
        compile_for_run(map(runner.spec.preset, runner.spec.preset_sources), on_cpu=options.on_cpu)
        interrupted, ended = False, None
        try:
            with terminate_as_interrupt(), runner.progress:
                ended = race(runner, field, options)
        except KeyboardInterrupt:
            interrupted, ended = True, "stopped; the same command with `--resume` continues"
        standing = stand(field.settings, runner.spec, runner.ledger.read())
        standing = standing if ended is None else replace(standing, ended=ended)
        result = result_json(field, standing, options)
        write_json(options.output_dir / TUNE_FILE, result)
    print_lines([json.dumps(result, indent=2)] if as_json else result_lines(result))
    print_message(str(options.output_dir / TUNE_FILE))
    if interrupted or standing.winner is None:
        tried = {each.outcome for each in standing.measured} - {"left", "not_tried"}
        raise typer.Exit(EXIT_OUT_OF_MEMORY if tried == {"out_of_memory"} and not interrupted else EXIT_RUN_FAILED)


def race(runner: Runner, field: Field, options: TuneOptions) -> str | None:
    """Run trials until the search ends or its budget does; return why, if it is the budget."""
    ends = time.monotonic() + 60 * options.budget_minutes
    while (standing := stand(field.settings, runner.spec, records := runner.ledger.read())).missing:
        trial = trial_of(standing.missing[0], runner.spec, standing.round - 1)
        finished = sum(each.kind == "trial" for each in records.values())
        expected = expected_duration(trial.row, records, runner.spec)
        if time.monotonic() + (expected.low if expected else 0.0) > ends:
            return f"the budget of {number(options.budget_minutes, 1)} minutes, in round {standing.round}"
        runner.progress.total, runner.progress.finished = finished + len(standing.missing), finished
        runner.progress.scope = f"in round {standing.round}"
        runner.run_trial(trial, position=finished)
    return None


def compare_options(options: TuneOptions, field: Field) -> CompareOptions:
    """Return the comparison whose variants are the settings, and whose baseline is the user's own."""
    steps = options.untimed_steps + options.trial_steps
    words, given = options.training_arguments, dict[str, Any](stop_after_steps=steps)
    if not options.runs_script:
        job = Job.from_argv(words).without(*NOT_IN_TRIALS)
        steps = min(steps, job.max_steps) if job.max_steps > 0 else steps
        words, given = tuple(job.with_values(max_steps=steps).to_argv()), {}
    names = ("script", "module", "untimed_steps", "target_interval", "trial_timeout_minutes", "order_seed")
    given |= {name: getattr(options, name) for name in (*names, "resume", "dry_run", "gpu", "cpu", "output_dir")}
    return CompareOptions(
        **given,
        num_processes=(str(options.world_size),),
        variant=tuple(setting.variant for setting in field.settings),
        baseline=YOURS,
        repeats=options.rounds,
        training_arguments=words,
    )


def _time(runner: Runner, field: Field, options: TuneOptions) -> str:
    """How many trials, and how long two rounds take, the fewest that eliminate anything, as far as it is known."""
    records, shape = runner.ledger.read(), read_shape(runner.spec.own_job)
    trials = [trial_of(setting, runner.spec, 0) for setting in field.settings]
    spans = [
        expected_duration(trial.row, records, runner.spec, shape=shape, gpu=options.planned_gpu) for trial in trials
    ]
    known = [span for span in spans if span is not None]
    text = (
        f"{counted(len(trials), 'setting')}, 2 to {options.rounds} rounds, {options.budget_minutes:g} minutes at most"
    )
    if len(known) < len(spans):
        return f"{text}; how long a trial takes is known after the first"
    low, high = (2 * sum(getattr(span, end) for span in known) / 60 for end in ("low", "high"))
    loading = "" if known[0].source != "planner" else " of steps, without starting and loading"
    return f"{text}; two rounds take {number(low, 1)} to {number(high, 1)} minutes{loading}"
