"""`toolkit doctor` and `toolkit env`: what this node can do, what is wrong with it, and how nodes differ."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import expand_options
from toolkit.doctor.options import DoctorOptions
from toolkit.entry_point import print_message
from toolkit.errors import EXIT_RUN_FAILED, ToolkitError, visible
from toolkit.flags import JsonOutput
from toolkit.screen_text import print_lines
from toolkit.units import counted


@expand_options
def doctor(
    options: DoctorOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="the model that --preset trains; with --compare: reports of nodes", metavar="MODEL or FILE..."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="compare the reports of several nodes, each written with --json")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="also show checks that found nothing or were skipped")
    ] = False,
    as_json: JsonOutput = False,
) -> None:
    """Find what is wrong with this node, and the line that fixes it.

    Checks GPUs, host, disks, network and software, and imports no torch: seconds. Exit code 1: a finding is an error.
    """
    if compare:
        _compare([Path(name) for name in names or ()], as_json=as_json)
        return
    from toolkit.doctor.examination import examine_node

    if names and len(names) > 1:
        hint = "reports are compared with --compare"
        raise ToolkitError(f"one MODEL at most, {len(names)} given: {', '.join(names)}", hint=hint)
    examination = examine_node(options, names[0] if names else None)
    if as_json:
        print(json.dumps(examination.as_json(), indent=2))
    else:
        print_lines(map(visible, examination.lines(verbose=verbose)))
    if examination.failed:
        raise typer.Exit(EXIT_RUN_FAILED)


def _compare(paths: list[Path], *, as_json: bool) -> None:
    from toolkit.doctor.checks import ERROR
    from toolkit.doctor.examination import compare_facts, read_reports

    nodes = read_reports(paths)
    differences = compare_facts(nodes)
    if as_json:
        rows = [dataclasses.asdict(difference) for difference in differences]
        print(json.dumps({"nodes": list(nodes), "differences": rows}, indent=2))
    else:
        print_lines(visible(line) for difference in differences for line in difference.lines())
    print_message(f"{counted(len(nodes), 'node')}: {counted(len(differences), 'difference')}")
    if any(difference.level == ERROR for difference in differences):
        raise typer.Exit(EXIT_RUN_FAILED)


def env(as_json: JsonOutput = False) -> None:
    """Print versions, GPUs, compilers, memory, disks and variables of this node, for an issue.

    The text is Markdown. Secrets are left out: of a token, it only says that it is set.
    """
    from toolkit.doctor.environment_report import as_markdown, environment_report

    report = environment_report()
    print(json.dumps(report, indent=2) if as_json else as_markdown(report))
