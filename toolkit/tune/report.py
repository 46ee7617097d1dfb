"""The result of a search, as people and programs read it, and the command that trains with it."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.files.secrets import hide_words
from toolkit.job.argument_reading import has_config_file
from toolkit.job.job import Job
from toolkit.plan.recommended_commands import broken
from toolkit.record.columns import Interval
from toolkit.screen_text import table_lines
from toolkit.tune.elimination import ERROR, SAME_SPEED, mean_interval
from toolkit.tune.field import YOURS, Field, Setting
from toolkit.tune.options import TuneOptions
from toolkit.tune.standing import Measured, Standing
from toolkit.units import NOT_AVAILABLE, number, percent

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
    return [*lines, f"ended     {result['ended']}", f"error     {METHOD}", "", "train with it:", command]


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
