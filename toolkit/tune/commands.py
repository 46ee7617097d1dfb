"""`toolkit tune`: make the field, run trials of `toolkit compare` until the search ends, and print the fastest setting.

The folder is one of a comparison as well: `toolkit report DIR` shows every figure of its trials.
"""

import json
import math
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import typer

from toolkit.compare.ledger import comparison_lock
from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import expected_duration, read_shape
from toolkit.compare.runner import Runner, check_comparison
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.doctor.ops import compile_for_run
from toolkit.entry_point import print_message
from toolkit.errors import EXIT_OUT_OF_MEMORY, EXIT_RUN_FAILED, ToolkitError
from toolkit.files.secrets import hide_words
from toolkit.hardware.gpus import ON_CPU_MESSAGE
from toolkit.job.argument_reading import has_config_file
from toolkit.job.job import Job
from toolkit.job.job_checks import ARGUMENTS_OF_COMPARISON
from toolkit.launch.process import terminate_as_interrupt
from toolkit.plan.recommended_commands import broken
from toolkit.record.columns import Interval
from toolkit.record.folder import write_json
from toolkit.screen_text import print_lines, table_lines
from toolkit.tune.field import YOURS, Field, Setting, make_field
from toolkit.tune.options import TuneOptions
from toolkit.tune.standing import ERROR, SAME_SPEED, Measured, Standing, mean_interval, stand, trial_of
from toolkit.units import NOT_AVAILABLE, counted, number, percent

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


METHOD = (
    f"the truly fastest setting is eliminated in at most {percent(ERROR)} of searches; one that is left may be up to"
    f" {percent(SAME_SPEED)} faster than the one named"
)
SHOWN = 2  # settings of each kind that are not tried


def train_command(setting: Setting, options: TuneOptions) -> str:
    """Return the command that trains with a setting: the user's own arguments, and those that it changes."""
    words = ["toolkit", "train", "--preset", setting.preset, "--num-processes", str(options.world_size)]
    words += ["--cpu"] if options.cpu else []
    script = {"--script": options.script, "--module": options.module}
    words += [word for option, value in script.items() if value is not None for word in (option, value)]
    given, changed = list(options.training_arguments), setting.added_words
    if not options.runs_script and "output_dir" not in Job.from_argv(given).given:  # `toolkit train` needs one
        changed = (*changed, "--output_dir", str(options.output_dir / "trained"))
    if changed and not options.runs_script and not has_config_file(given):
        given = Job.from_argv([*given, *changed]).to_argv()
    else:
        given += changed
    return shlex.join([*words, "--", *hide_words(given)])


def result_json(field: Field, standing: Standing, options: TuneOptions) -> dict[str, Any]:
    """Return what tune.json holds, and what `toolkit tune --json` prints."""
    left = [each.setting for each in standing.left]
    rows = {each.setting.name: _row(each, standing) for each in standing.measured}
    return {
        "schema_version": 1,
        "winner": left[0].name if left else None,
        "command": train_command(left[0], options) if left else None,
        "not_shown_to_be_slower": [setting.name for setting in left[1:]],
        "ratio_to_yours": rows[left[0].name]["ratio_to_yours"] if left else None,
        "ratio_interval": rows[left[0].name]["ratio_interval"] if left else None,
        "ended": standing.ended,
        "rounds": standing.round,
        "error": ERROR,
        "settings": list(rows.values()),
        "not_tried": [{"name": each.name, "kind": each.kind, "why": each.why} for each in field.not_tried],
    }


def _row(measured: Measured, standing: Standing) -> dict[str, Any]:
    setting, logs = measured.setting, measured.logs
    reached = logs or measured.outcome != "left"
    ratio, interval = standing.ratio_to_yours(setting.name) or (None, None)
    return {
        "name": setting.name,
        "preset": setting.preset,
        "changes": list(setting.added_words),
        "verdict": setting.verdict,
        "planned_step_seconds": setting.planned_step_seconds,
        "outcome": measured.outcome if reached else "not_tried",
        "round": measured.round,
        "why": measured.why if reached else "it has no trial",
        "trials": len(logs),
        "seconds_per_step": math.exp(statistics.fmean(logs)) if logs else None,
        "seconds_interval": mean_interval(standing.figures, setting.name) if logs else None,
        "ratio_to_yours": ratio,
        "ratio_interval": interval,
    }


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the table, the winner with what it is worth, and its command."""
    winner = result["winner"]
    order = sorted(result["settings"], key=lambda row: row["seconds_per_step"] or math.inf)
    cells = [("setting", "plan", "trials", "s per step", "95 % interval", "x yours", "interval", "outcome")]
    for row in order:
        outcome = "fastest" if row["name"] == winner else row["outcome"].replace("_", " ")
        numbers = number(row["seconds_per_step"], 4), _ends(row["seconds_interval"], 4)
        ratio = number(row["ratio_to_yours"], 3), _ends(row["ratio_interval"], 3)
        at_round = f", round {row['round']}" if row["round"] else ""
        cells.append((row["name"], _verdict(row), str(row["trials"]), *numbers, *ratio, outcome + at_round))
    lines = [*table_lines(cells, left=(0, 1, 7)), ""]
    lines += [f"{row['name']}: {row['why']}" for row in order if row["why"] and row["outcome"] != "eliminated"]
    lines += not_tried_lines(result)
    if winner is None:
        return [*lines, f"no setting has completed a trial: {result['ended']}"]
    worth = "no trial of your own setting has completed"
    if winner == YOURS:
        worth = "your own setting; no other was shown to be faster"
    elif result["ratio_to_yours"] is not None:
        interval = _ends(result["ratio_interval"], 3)
        worth = f"{result['ratio_to_yours']:.3f} times the seconds per step of your setting (interval {interval})"
    lines += ["", f"fastest   {winner}: {worth}"]
    if result["not_shown_to_be_slower"]:
        lines.append(f"left      {', '.join(result['not_shown_to_be_slower'])}: not shown to be slower")
    command = broken(result["command"])
    return [*lines, f"ended     {result['ended']}", f"method    {METHOD}", "", "train with it:", command]


def field_lines(result: Mapping[str, Any], minutes: str) -> list[str]:
    """Return what a dry run prints: the settings to try, what is not tried, and the time."""
    cells = [("setting", "plan", "planned s per step", "preset and changes")]
    for row in result["settings"]:
        changes = "your arguments" if row["name"] == YOURS else shlex.join(row["changes"])
        span = _ends(row["planned_step_seconds"], 3)
        cells.append((row["name"], _verdict(row), span, f"{row['preset']} {changes}"))
    return [*table_lines(cells, left=(0, 1, 3)), "", *not_tried_lines(result), "", f"{minutes}; nothing was started"]


def not_tried_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many settings are not tried for each kind of reason, with the first of them."""
    for kind, count in Counter(each["kind"] for each in result["not_tried"]).items():
        yield f"not tried, {kind}: {count}"
        shown = [each for each in result["not_tried"] if each["kind"] == kind][:SHOWN]
        yield from (f"  {each['name']}: {each['why']}" for each in shown)


def _verdict(row: Mapping[str, Any]) -> str:
    return NOT_AVAILABLE if row["verdict"] is None else str(row["verdict"]).replace("_", " ")


def _ends(interval: Interval | None, digits: int) -> str:
    return NOT_AVAILABLE if interval is None else " to ".join(number(end, digits) for end in interval)
