"""`toolkit plan`: memory, communication and time of a job before it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_message
from toolkit.errors import EXIT_RUN_FAILED
from toolkit.flags import JsonOutput, ModelName
from toolkit.hardware.gpus import trains_on_cpu
from toolkit.plan.options import PlanOptions


@expand_options
def plan(
    model: ModelName,
    options: PlanOptions,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help="device that --verify rehearses on")] = None,
    as_json: JsonOutput = False,
) -> None:
    """Plan memory, communication and speed of a job, before it runs.

    Shows for each preset what fits, and with how much headroom. Runs nothing.
    """
    from toolkit.plan.plan_table import print_json, print_plans
    from toolkit.plan.planner import make_plans, plan_request

    request = plan_request(model, options)
    plans = make_plans(request)
    if not as_json:
        print_plans(plans, request)
    verified = []
    if options.verify:
        from toolkit.plan.plan_vs_rehearsal import verify_plans

        for verification in verify_plans(model, plans, request.job, cpu=trains_on_cpu(cpu), say=print_message):
            verified.append(verification)
            if not as_json:  # each when its rehearsal of rank 0 ends
                print("\n" + "\n".join(verification.lines()))
    if as_json:
        more = {"verified": [verification.as_row() for verification in verified]} if options.verify else {}
        print_json(model, plans, request, **more)
    if any(verification.failed for verification in verified):
        raise typer.Exit(EXIT_RUN_FAILED)
