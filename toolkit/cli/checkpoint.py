"""`toolkit checkpoint`: inspect, export, verify and convert checkpoints.

Reading tensors needs torch, so every command runs `python -m toolkit.checkpoint` in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.flags import JsonOutput, PresetName

checkpoint_app = typer.Typer(no_args_is_help=True, help="Inspect, export, verify or convert a checkpoint.")

CheckpointPath = Annotated[Path, typer.Argument(help="folder of a checkpoint", metavar="CHECKPOINT")]
OutputFolder = Annotated[Path, typer.Argument(help="folder to create", metavar="OUT")]
BaseModel = Annotated[
    str | None, typer.Option(help="the adapter's base model, if it is not where the checkpoint recorded it")
]
DEGREE_HELP = "ranks for {}, for a preset that has it"
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="load the checkpoint's pickles whatever they run: only if you wrote them")
]


@checkpoint_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a checkpoint, or a run folder with several", metavar="DIR")],
    as_json: JsonOutput = False,
) -> None:
    """Show engine, preset, step, world size, parameters and bytes, and whether the checkpoint is complete.

    Exit code 1 if it is damaged; the damaged file is named.
    """
    _run("inspect", path, *(["--json"] if as_json else []))


@checkpoint_app.command()
def export(
    path: CheckpointPath,
    out: OutputFolder,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="merge the LoRA adapter into its base")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="largest weights file")] = "5GB",
    base_model: BaseModel = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Export any engine's checkpoint to one Hugging Face folder of safetensors, with one tensor in memory at a time."""
    options = ["--dtype", dtype, "--max-shard-size", max_shard_size, *(["--merge-lora"] if merge_lora else [])]
    _run("export", path, out, *options, base_model=base_model, trust_pickle=trust_pickle)


@checkpoint_app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="a checkpoint, an exported folder, or a run folder", metavar="DIR")],
    as_json: JsonOutput = False,
    base_model: BaseModel = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Load a checkpoint again: no tensor missing, empty or NaN, and logits equal to the live model's.

    Exit code 1 if a check fails.
    """
    _run("verify", path, *(["--json"] if as_json else []), base_model=base_model, trust_pickle=trust_pickle)


@checkpoint_app.command()
def convert(
    path: CheckpointPath,
    out: OutputFolder,
    preset: PresetName,
    num_processes: Annotated[int, typer.Option(help="number of processes to resume on", min=1)],
    tp: Annotated[int | None, typer.Option(help=DEGREE_HELP.format("tensor parallelism"), min=1)] = None,
    cp: Annotated[int | None, typer.Option(help=DEGREE_HELP.format("context parallelism"), min=1)] = None,
    sp: Annotated[int | None, typer.Option(help=DEGREE_HELP.format("sequence parallelism"), min=1)] = None,
    ep: Annotated[int | None, typer.Option(help=DEGREE_HELP.format("expert parallelism"), min=1)] = None,
    dp_replicate: Annotated[int | None, typer.Option(help="replicas of a sharded model", min=1)] = None,
    base_model: BaseModel = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Convert a checkpoint, with its optimizer states, to resume under another preset or number of processes."""
    options = ["--preset", preset, "--num-processes", str(num_processes)]
    degrees = {"tp": tp, "cp": cp, "sp": sp, "ep": ep, "dp-replicate": dp_replicate}
    options += [word for name, degree in degrees.items() if degree is not None for word in (f"--{name}", str(degree))]
    _run("convert", path, out, *options, base_model=base_model, trust_pickle=trust_pickle)


def _run(*words: object, base_model: str | None = None, trust_pickle: bool = False) -> None:
    import subprocess

    options = [
        *words,
        *(["--base-model", base_model] if base_model else []),
        *(["--trust-pickle"] if trust_pickle else []),
    ]
    # -P: a module in the working directory, which may be the checkpoint, is not imported.
    command = [sys.executable, "-P", "-m", "toolkit.checkpoint", *map(str, options)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
