"""`toolkit rehearse`: run one rank of a larger world in one process, and measure its memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit.cli.options import expand_options
from toolkit.entry_point import print_failure, print_message
from toolkit.flags import CpuFlag, JsonOutput, PresetName, TrainingArguments
from toolkit.hardware.gpus import trains_on_cpu, visible_world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearseOptions:
    """One rank to rehearse, and its training arguments."""

    preset: PresetName
    num_processes: Annotated[
        int | None,
        typer.Option(help="ranks to rehearse, whose GPUs are not needed; by default as many as GPUs are visible"),
    ] = None
    training_arguments: TrainingArguments = ()
    rank: Annotated[int, typer.Option(help="the rank to run")] = 0
    cpu: CpuFlag = None
    fake_tensors: Annotated[
        bool,
        typer.Option("--fake-tensors", help="memory by part for a model that does not fit here (FSDP2 and DDP only)"),
    ] = False

    @property
    def world_size(self) -> int:
        """Number of ranks: as given, or one per visible GPU. Raises ToolkitError without a GPU."""
        return visible_world_size() if self.num_processes is None else self.num_processes


@expand_options
def rehearse(options: RehearseOptions, as_json: JsonOutput = False) -> None:
    """Run one rank of a larger job here, and measure its memory.

    The training script and the engine are the real ones; the other ranks are simulated.

    After `--`: at least --model_name_or_path (a config.json is enough). Without --dataset, rows of random tokens;
    without --output_dir, no files are kept.
    """
    from toolkit.presets.preset import load_preset
    from toolkit.rehearse.rehearsal import plan_rehearsal, rehearse_once, result_facts, result_lines

    on_cpu = trains_on_cpu(options.cpu)
    planned = plan_rehearsal(
        load_preset(options.preset),
        world_size=options.world_size,
        rank=options.rank,
        training_argv=options.training_arguments,
        cpu=on_cpu,
        fake_tensors=options.fake_tensors,
    )
    if on_cpu and options.cpu is None and not options.fake_tensors:
        print_message("no GPU is visible: rehearsing on the CPU in fp32")
    result, run = rehearse_once(planned, on_line=print_message)
    if result.failure is not None:
        print_failure(result.status, result.failure)
        raise typer.Exit(result.exit_code)
    print(json.dumps(result_facts(run), indent=2) if as_json else "\n".join(result_lines(run)))
