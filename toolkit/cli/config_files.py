"""`toolkit lint`, `diff` and `convert-config`: what configuration files do, and what a change to them does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import recognising
from toolkit.entry_point import print_message
from toolkit.errors import EXIT_INVALID_INPUT, EXIT_RUN_FAILED, ToolkitError, shown, visible
from toolkit.flags import JsonOutput
from toolkit.screen_text import shown_on
from toolkit.units import counted
from toolkit.versions import installed_version, version_numbers

if TYPE_CHECKING:
    from toolkit.lint.findings import Finding

FORMS = ("text", "json", "sarif", "github")
FORMS_OF_DIFF = ("text", "markdown", "json")
DEFAULT_NAME = "train.yaml"  # of converted arguments, in the command that is printed, if the output goes to stdout


def lint(
    paths: Annotated[list[Path], typer.Argument(help="configuration files, or folders of them", metavar="FILE...")],
    as_json: JsonOutput = False,
    fix: Annotated[bool, typer.Option("--fix", help="write the file with its mechanical fixes to stdout")] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="with --fix: change the files, and keep each old one as FILE.bak")
    ] = False,
    level: Annotated[str, typer.Option("--level", help="error, warning or note: the least that fails")] = "warning",
    skip_others: Annotated[
        bool, typer.Option("--skip-others", help="pass over named files that are no configuration, as in a folder")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help="text, json, sarif (for code hosts), or github (workflow commands)")
    ] = "text",
) -> None:
    """Find settings in configuration files that do not do what they say.

    Reads accelerate YAMLs, DeepSpeed JSONs, Trainer arguments, sbatch files, SkyPilot tasks and shell scripts that
    start a launcher, and says what to write instead.

    A DeepSpeed JSON that a YAML names is checked with it. Exit code 1 if there are findings of --level or above, 2 if
    a file cannot be read.
    """
    from toolkit.lint.check import lint_paths
    from toolkit.lint.findings import LEVELS
    from toolkit.lint.rules.settings import shorten

    if level not in LEVELS:
        raise ToolkitError(f"--level is {shown(level)}, expected {', '.join(LEVELS)}")
    form = "json" if as_json else form
    if form not in FORMS:
        raise ToolkitError(f"--format is {shown(form)}, expected {', '.join(FORMS)}")
    if in_place and not fix:
        raise ToolkitError("--in-place has no effect without --fix", hint="add `--fix`")
    if fix:
        _fix(paths, in_place=in_place, as_json=as_json)
        if not in_place:
            return
    with recognising(*map(str, paths)):
        result = lint_paths(paths, skips_others=skip_others)
    for error in result.unreadable:
        print_message(f"error: {error}")
    if form == "json":
        findings = [dataclasses.asdict(finding) for finding in result.findings]
        print(json.dumps({"findings": findings, "unreadable": [*map(str, result.unreadable)]}, indent=2))
    elif form == "sarif":
        from toolkit.lint.sarif import sarif

        print(json.dumps(sarif(result), indent=2))
    elif form == "github":
        for finding in result.findings:
            print(_workflow_command(finding))
    else:
        for finding in result.findings:
            place = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
            key = f" {shorten(finding.key)}:" if finding.key else ""
            lines = [
                f"{place}: {finding.level}[{finding.rule}]{key} {finding.message}",
                f"  fix: {finding.fix} (checked with {finding.checked_against})",
                f"  see {finding.documentation}",
            ]
            print(shown_on(sys.stdout, "\n".join(map(visible, lines))))
    levels = Counter(finding.level for finding in result.findings)
    counts = ", ".join(counted(levels[each], each) for each in LEVELS if levels[each])
    counts = counts or ("clean" if result.files else "nothing to check")
    if result.files or not result.unreadable:
        print_message(f"{counted(len(result.files), 'file')}: {counts}{'; but:' if result.not_checked else ''}")
    for line in result.not_checked:
        print_message(f"  {visible(line)}")
    for library, checked in sorted({tuple(finding.checked_against.split(" ", 1)) for finding in result.findings}):
        installed = installed_version(library)
        if installed is not None and version_numbers(installed)[:2] != version_numbers(checked)[:2]:
            print_message(f"note: {library} {installed} is installed; its rules were checked with {checked}")
    if result.unreadable:
        raise typer.Exit(EXIT_INVALID_INPUT)
    if any(levels[each] for each in LEVELS[: LEVELS.index(level) + 1]):
        raise typer.Exit(EXIT_RUN_FAILED)


def _workflow_command(finding: Finding) -> str:
    """A line that GitHub Actions turns into an annotation of the changed line; a note is a `notice` there."""
    level = {"note": "notice"}.get(finding.level, finding.level)
    line = "" if finding.line is None else f",line={finding.line}"
    key = f"{finding.key}: " if finding.key else ""
    text = f"{key}{finding.message}. Fix: {finding.fix}"
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    file = re.sub(r"[%\r\n:,]", lambda found: f"%{ord(found[0]):02X}", finding.file)
    return f"::{level} file={file}{line},title=toolkit lint {finding.rule}::{escaped}"


def _fix(paths: Sequence[Path], *, in_place: bool, as_json: bool) -> None:
    from toolkit.files import write_bytes, write_text
    from toolkit.files.documents import read_text
    from toolkit.lint.check import fixed_text, lint_paths

    files = [Path(name) for name in lint_paths(paths).files] if any(path.is_dir() for path in paths) else list(paths)
    if not in_place:
        if len(files) != 1 or as_json:
            raise ToolkitError("--fix writes one file to stdout", hint="add `--in-place`; a `.bak` is kept of each")
        print(fixed_text(files[0]), end="")
        return
    for file in files:
        fixed = fixed_text(file)
        if fixed != read_text(file):
            try:
                write_bytes(file.with_name(f"{file.name}.bak"), file.read_bytes())
                write_text(file, fixed)
            except OSError as error:
                raise ToolkitError(f"{file} cannot be fixed: {error.strerror}", hint="the file is unchanged") from None
            print_message(f"fixed {file}; the old text is in {file.name}.bak")


def convert_config(
    file: Annotated[Path, typer.Argument(help="a YAML file, or a file with a `trl sft` command line", metavar="FILE")],
    tool: Annotated[
        str | None, typer.Option("--from", help="trl, axolotl or llama-factory; by default recognised by its settings")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="write the YAML to this file, not to stdout")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite the output file if it exists")] = False,
    as_json: JsonOutput = False,
) -> None:
    """Convert a TRL, axolotl or LLaMA-Factory configuration to a preset and training arguments.

    Prints a YAML file for `toolkit train`. Comments in it name every setting that has no counterpart, and why.
    """
    from toolkit.convert.conversion import convert_file, cut, launch_command, yaml_text
    from toolkit.files import write_text

    if output is not None and os.path.realpath(output) == os.path.realpath(file):
        raise ToolkitError(f"--output {output} is the input", hint="name another file: the configuration is kept")
    if output is not None and os.path.lexists(output) and not force:
        raise ToolkitError(f"{output} exists already", hint="`--force` overwrites it, or name another `--output`")
    conversion, name = convert_file(file, tool), str(output or DEFAULT_NAME)
    text = yaml_text(conversion, source=str(file), file=name)
    if output is not None:
        try:
            write_text(output, text)
        except OSError as error:
            raise ToolkitError(f"cannot write {output}: {error.strerror}", hint="name another `--output`") from None
    if as_json:
        print(json.dumps(dataclasses.asdict(conversion), indent=2, ensure_ascii=False, default=str))
    elif output is None:
        print(text, end="")
    converted, others = len(conversion.converted), conversion.not_converted
    print_message(f"{conversion.tool}: {converted} settings converted, {len(others)} without a counterpart")
    if others:
        print_message(f"not converted: {', '.join(dict.fromkeys(visible(cut(each.key)) for each in others))}")
    write = "" if output else f"toolkit convert-config {shlex.quote(str(file))} --output {DEFAULT_NAME} && "
    print_message(f"next: {write}{launch_command(conversion, name)}")


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
    if form not in FORMS_OF_DIFF:
        raise ToolkitError(f"--format is {shown(form)}, expected {', '.join(FORMS_OF_DIFF)}")
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
            place = "" if finding.file == change.file else f" {finding.file}"
            place += "" if finding.line is None else f":{finding.line}"
            print(f"  new {finding.level}[{finding.rule}]{place} {finding.key}: {finding.message}; fix: {finding.fix}")
        for finding in change.gone:
            print(f"  gone {finding.level}[{finding.rule}] {finding.key}")
    worst = LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()
    new = [finding for change in found for finding in change.new if finding.level in worst]
    stopped = [change.file for change in found if change.stops_fitting] if level != "never" else []
    print_message(f"{len(found)} changed, {len(new)} new of level {level} or above, {len(stopped)} no longer fitting")
    if new or stopped:
        raise typer.Exit(EXIT_RUN_FAILED)
