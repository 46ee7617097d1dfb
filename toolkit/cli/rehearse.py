"""`toolkit rehearse`: run one rank of a larger world in one process, and measure its memory."""

from __future__ import annotations

import json

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_failure, print_message
from toolkit.flags import JsonOutput
from toolkit.rehearse.options import RehearseOptions


@expand_options
def rehearse(options: RehearseOptions, as_json: JsonOutput = False) -> None:
    """Run one rank of a larger job here, and measure its memory.

    The training script and the engine are the real ones; the other ranks are simulated.

    After `--`: at least --model_name_or_path (a config.json is enough). Without --dataset, rows of random tokens;
    without --output_dir, no files are kept.
    """
    from toolkit.presets.preset import load_preset
    from toolkit.rehearse.rehearsal import plan_rehearsal, rehearse_once, result_facts, result_lines

    planned = plan_rehearsal(
        load_preset(options.preset),
        world_size=options.world_size,
        rank=options.rank,
        training_argv=options.training_arguments,
        cpu=options.on_cpu,
        fake_tensors=options.fake_tensors,
    )
    if options.on_cpu and options.cpu is None and not options.fake_tensors:
        print_message("no GPU is visible: rehearsing on the CPU in fp32")
    result, run = rehearse_once(planned, on_line=print_message)
    if result.failure is not None:
        print_failure(result.status, result.failure)
        raise typer.Exit(result.exit_code)
    print(json.dumps(result_facts(run), indent=2) if as_json else "\n".join(result_lines(run)))
