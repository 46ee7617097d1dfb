"""The result of a search, as people and programs read it, and the command that trains with it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

from toolkit.files.secrets import hide_words
from toolkit.job.argument_reading import has_config_file
from toolkit.job.job import Job
from toolkit.plan.recommended_commands import broken
from toolkit.record.columns import Interval
from toolkit.screen_text import table_lines
from toolkit.tune.elimination import ERROR, SAME_SPEED
from toolkit.tune.field import YOURS, Field, Setting
from toolkit.tune.options import TuneOptions
from toolkit.tune.standing import Measured, Standing
from toolkit.units import NOT_AVAILABLE, counted, number, percent

METHOD = (
    f"sequential elimination: the truly fastest setting is eliminated in at most {percent(ERROR)} of searches; one that"
    f" may be up to {percent(SAME_SPEED)} faster than the winner can be left"
)
VERDICTS = {"fits": "fits", "too_close": "too close", "does_not_fit": "does not fit", None: NOT_AVAILABLE}
OUTCOMES = {"another_problem": "trained another problem", "out_of_memory": "out of memory"}
NOT_REACHED = "the search ended before its first trial"
SHOWN = 2  # settings of each kind that are not tried


def train_command(setting: Setting, options: TuneOptions) -> str:
    """Return the command that trains with a setting: the user's own arguments, and those that it changes."""
    words = ["toolkit", "train", "--preset", setting.preset, "--num-processes", str(options.world_size)]
    words += ["--cpu"] if options.cpu else []
    script = {"--script": options.script, "--module": options.module}
    words += [word for option, value in script.items() if value is not None for word in (option, value)]
    given, changed = list(options.training_arguments), setting.added_words
    if changed and not options.runs_script and not has_config_file(given):
        given = Job.from_argv([*given, *changed]).to_argv()
    else:
        given += changed
    return shlex.join([*words, "--", *hide_words(given)])


def result_json(field: Field, standing: Standing, options: TuneOptions) -> dict[str, Any]:
    """Return what tune.json holds, and what `toolkit tune --json` prints."""
    winner = standing.winner
    ratio = None if winner is None else standing.ratio_to_yours(winner.setting.name)
    return {
        "schema_version": 1,
        "winner": None if winner is None else winner.setting.name,
        "command": None if winner is None else train_command(winner.setting, options),
        "ratio_to_yours": ratio and ratio[0],
        "ratio_interval": ratio and ratio[1],
        "ended": standing.ended,
        "rounds": standing.round,
        "error": ERROR,
        "method": METHOD,
        "settings": [_row(each, standing) for each in standing.measured],
        "not_tried": [{"name": each.name, "kind": each.kind, "why": each.why} for each in field.not_tried],
    }


def _row(measured: Measured, standing: Standing) -> dict[str, Any]:
    setting, ratio = measured.setting, standing.ratio_to_yours(measured.setting.name)
    reached = measured.logs or measured.outcome != "left"
    return {
        "name": setting.name,
        "preset": setting.preset,
        "changes": dict(setting.changes) or list(setting.words if setting.name != YOURS else ()),
        "verdict": setting.verdict,
        "planned_step_seconds": setting.planned_step_seconds,
        "outcome": measured.outcome if reached else "not_tried",
        "round": measured.round,
        "why": measured.why if reached else NOT_REACHED,
        "trials": len(measured.logs),
        "seconds_per_step": measured.seconds_per_step,
        "seconds_interval": standing.seconds_interval(setting.name),
        "ratio_to_yours": ratio and ratio[0],
        "ratio_interval": ratio and ratio[1],
    }


def result_lines(field: Field, standing: Standing, options: TuneOptions) -> list[str]:
    """Return the table, the winner with what it is worth, and its command."""
    order = sorted(standing.measured, key=lambda each: (each.seconds_per_step is None, each.seconds_per_step or 0.0))
    header = ("setting", "plan", "trials", "s per step", "95 % interval", "x yours", "interval", "outcome")
    rows = [header, *(_cells(each, standing) for each in order)]
    lines = [*table_lines(rows, left=(0, 1, 7)), ""]
    lines += [f"{each.setting.name}: {each.why}" for each in order if each.why and each.outcome != "eliminated"]
    lines += not_tried_lines(field)
    winner = standing.winner
    if winner is None:
        return [*lines, f"no setting has completed a trial: {standing.ended}"]
    lines += ["", f"fastest   {winner.setting.name}: {_worth(winner, standing)}"]
    if alike := [each.setting.name for each in standing.others_left]:
        lines.append(f"left      {', '.join(alike)}: not shown to be slower")
    lines += [f"ended     {standing.ended}", f"error     {METHOD}", "", "train with it:"]
    return [*lines, broken(train_command(winner.setting, options))]


def _cells(measured: Measured, standing: Standing) -> tuple[str, ...]:
    name, ratio = measured.setting.name, standing.ratio_to_yours(measured.setting.name)
    outcome = OUTCOMES.get(measured.outcome, measured.outcome.replace("_", " "))
    if measured is standing.winner:
        outcome = "fastest"
    elif measured.outcome == "left" and not measured.logs:
        outcome = "not tried"
    at_round = f", round {measured.round}" if measured.round else ""
    return (
        name,
        VERDICTS[measured.setting.verdict],
        str(len(measured.logs)),
        number(measured.seconds_per_step, 4),
        _ends(standing.seconds_interval(name), 4),
        number(ratio and ratio[0], 3),
        _ends(ratio and ratio[1], 3),
        outcome + at_round,
    )


def _ends(interval: Interval | None, digits: int) -> str:
    return NOT_AVAILABLE if interval is None else " to ".join(number(end, digits) for end in interval)


def _worth(winner: Measured, standing: Standing) -> str:
    """The winner's seconds per step beside those of the user's own setting."""
    if winner.setting.name == YOURS:
        return "your own setting; no other was shown to be faster"
    if (ratio := standing.ratio_to_yours(winner.setting.name)) is None:
        return "your own setting has no completed trial to compare with"
    interval = "no interval from single trials" if ratio[1] is None else f"interval {_ends(ratio[1], 3)}"
    return f"{ratio[0]:.3f} times the seconds per step of your setting ({interval})"


def not_tried_lines(field: Field) -> Iterator[str]:
    """Yield how many settings are not tried for each kind of reason, with the first of them."""
    for kind, count in Counter(each.kind for each in field.not_tried).items():
        yield f"not tried, {kind}: {count}"
        shown = [each for each in field.not_tried if each.kind == kind][:SHOWN]
        yield from (f"  {each.name}: {each.why}" for each in shown)


def field_lines(field: Field, options: TuneOptions, minutes: str) -> list[str]:
    """Return what a dry run prints: the settings to try, what is not tried, and the time."""
    rows = [("setting", "plan", "planned s per step", "changes")]
    for setting in field.settings:
        changes = shlex.join(setting.added_words) or "-"
        changes = changes if setting.name == YOURS else f"--preset {setting.preset} {changes}".removesuffix(" -")
        rows.append((setting.name, VERDICTS[setting.verdict], _ends(setting.planned_step_seconds, 3), changes))
    tried = counted(len(field.settings), "setting")
    lines = [*table_lines(rows, left=(0, 1, 3)), "", *not_tried_lines(field), ""]
    return [*lines, f"{tried}, up to {options.rounds} rounds, {minutes}; nothing was started"]
