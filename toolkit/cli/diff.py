"""`toolkit diff`: what a change to configuration files does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.entry_point import print_message
from toolkit.errors import EXIT_RUN_FAILED, ToolkitError, shown
from toolkit.flags import JsonOutput

FORMS = ("text", "markdown", "json")


def diff(
    base: Annotated[str, typer.Argument(help="commit or branch to compare with", metavar="BASE")],
    paths: Annotated[list[Path] | None, typer.Argument(help="only below these", metavar="[PATH]...")] = None,
    gpu: Annotated[str, typer.Option(help="GPU that jobs are planned on")] = "h100",
    num_processes: Annotated[int, typer.Option(min=1, help="number of GPUs, where a file does not say it")] = 8,
    level: Annotated[str, typer.Option(help="error, warning, note or never: what fails")] = "error",
    form: Annotated[str, typer.Option("--format", help="text, markdown (for a pull request) or json")] = "text",
    as_json: JsonOutput = False,
) -> None:
    """Show what a change to configuration files does: new findings, and memory before and after.

    Compares the working tree with its common ancestor with BASE, as a pull request does. Exit code 1 if a finding of
    --level or above is new, or a job fits no longer.
    """
    from toolkit.diff.change import changes, markdown
    from toolkit.lint.findings import LEVELS
    from toolkit.plan.options import PlanOptions

    form = "json" if as_json else form
    if form not in FORMS:
        raise ToolkitError(f"--format is {shown(form)}, expected {', '.join(FORMS)}")
    if level not in (*LEVELS, "never"):
        raise ToolkitError(f"--level is {shown(level)}, expected {', '.join((*LEVELS, 'never'))}")
    found = changes(base, PlanOptions(gpu=gpu, num_processes=(num_processes,)), paths or ())
    if form == "json":
        print(json.dumps({"changes": [change.as_row() for change in found]}, indent=2))
    elif form == "markdown":
        print(markdown(found), end="")
    for change in found if form == "text" else ():
        plan = change.plan_line()
        print(f"{change.file} ({change.status}){': ' + plan if plan else ''}")
        for finding in change.new:
            place = "" if finding.line is None else f":{finding.line}"
            print(f"  new {finding.level}[{finding.rule}]{place} {finding.key}: {finding.message}; fix: {finding.fix}")
        for finding in change.gone:
            print(f"  gone {finding.level}[{finding.rule}] {finding.key}")
    worst = LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()
    new = [finding for change in found for finding in change.new if finding.level in worst]
    stopped = [change.file for change in found if change.stops_fitting] if level != "never" else []
    print_message(f"{len(found)} changed, {len(new)} new of level {level} or above, {len(stopped)} no longer fitting")
    if new or stopped:
        raise typer.Exit(EXIT_RUN_FAILED)
