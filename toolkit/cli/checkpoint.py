"""`toolkit checkpoint`: inspect, export, verify and convert checkpoints.

All but `inspect` read tensors: these import torch when they run.
"""

import json
import logging
import os
import re
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import EXIT_RUN_FAILED, ToolkitError
from toolkit.files.paths import user_path
from toolkit.flags import JsonOutput, PresetName
from toolkit.units import gib

checkpoint_app = typer.Typer(no_args_is_help=True, help="Inspect, export, verify or convert a checkpoint.")

CheckpointPath = Annotated[Path, typer.Argument(help="folder of a checkpoint", metavar="CHECKPOINT")]
OutputFolder = Annotated[Path, typer.Argument(help="folder to create", metavar="OUT")]
BaseModel = Annotated[
    str | None, typer.Option(help="base model or a folder with config.json, if not where it was recorded")
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="keep the checkpoint's names: for a model class that transformers lacks")
]
TrustPickle = Annotated[bool, typer.Option("--trust-pickle", help="load pickles whatever they run: only your own")]


@checkpoint_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a checkpoint, or a run folder with several", metavar="DIR")],
    as_json: JsonOutput = False,
) -> None:
    """Show engine, preset, step, world size, parameters and bytes, and whether the checkpoint is complete.

    Exit code 1 if it is damaged, with the name of the damaged file.
    """
    from toolkit.checkpoint.inspect import inspect_all

    summaries = inspect_all(user_path(path))
    if as_json:
        print(json.dumps({"checkpoints": [asdict(summary) for summary in summaries]}, indent=2))
    else:
        print("\n".join(line for summary in summaries for line in summary.lines()))
    if any(summary.problem for summary in summaries):
        raise typer.Exit(EXIT_RUN_FAILED)


@checkpoint_app.command()
def export(
    path: CheckpointPath,
    out: OutputFolder,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="merge the LoRA adapter into its base")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="largest weights file")] = "5GB",
    base_model: BaseModel = None,
    weights_only: WeightsOnly = False,
    trust_pickle: TrustPickle = False,
    as_json: JsonOutput = False,
) -> None:
    """Export any engine's checkpoint to one Hugging Face folder of safetensors, with one tensor in memory at a time."""
    _use_the_cpu_alone()
    from toolkit.checkpoint.hf_export import export as export_checkpoint

    result = export_checkpoint(
        user_path(path),
        user_path(out),
        merge_lora=merge_lora,
        dtype=dtype,
        max_shard_bytes=parse_size(max_shard_size),
        base_model=base_model,
        trust_pickle=trust_pickle,
        weights_only=weights_only,
    )
    if as_json:
        return print(json.dumps(asdict(result), indent=2, default=str))
    kind = "adapter" if result.adapter else "model"
    print(f"{result.folder}: {kind} of {result.num_tensors} tensors, {gib(result.bytes)}")


@checkpoint_app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="a checkpoint, an exported folder, or a run folder", metavar="DIR")],
    as_json: JsonOutput = False,
    base_model: BaseModel = None,
    weights_only: WeightsOnly = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Load a checkpoint again: no tensor missing, empty or NaN, and logits equal to the live model's.

    Exit code 1 if a check fails.
    """
    _use_the_cpu_alone()
    from toolkit.checkpoint.hf_export import verify as verify_checkpoint

    how = {"trust_pickle": trust_pickle, "weights_only": weights_only}
    result = verify_checkpoint(user_path(path), base_model=base_model, **how)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    elif result.sound:
        compared = "no fingerprint was recorded, so logits were not compared"
        if result.max_difference is not None:
            compared = f"logits within {result.max_difference:.2g} of the live model's (allowed {result.tolerance:g})"
        print(f"{result.path}: sound, {result.num_tensors} tensors; {compared}")
    else:
        print("\n".join([f"{result.path}: not sound", *(f"  {problem}" for problem in result.problems)]))
    if not result.sound:
        raise typer.Exit(EXIT_RUN_FAILED)


@checkpoint_app.command()
def convert(
    path: CheckpointPath,
    out: OutputFolder,
    preset: PresetName,
    num_processes: Annotated[int, typer.Option(help="number of processes to resume on", min=1)],
    tp: Annotated[int | None, typer.Option(help="ranks for tensor parallelism", min=1)] = None,
    cp: Annotated[int | None, typer.Option(help="ranks for context parallelism", min=1)] = None,
    sp: Annotated[int | None, typer.Option(help="ranks for sequence parallelism", min=1)] = None,
    ep: Annotated[int | None, typer.Option(help="ranks for expert parallelism", min=1)] = None,
    dp_replicate: Annotated[int | None, typer.Option(help="replicas of a sharded model", min=1)] = None,
    base_model: BaseModel = None,
    trust_pickle: TrustPickle = False,
    as_json: JsonOutput = False,
) -> None:
    """Convert a checkpoint, with its optimizer states, to resume under another preset or number of processes."""
    _use_the_cpu_alone()
    from toolkit.checkpoint.convert import convert as convert_checkpoint
    from toolkit.presets.preset import load_preset

    chosen = load_preset(preset)
    degrees = {"tp": tp, "cp": cp, "sp": sp, "ep": ep, "dp_replicate": dp_replicate}
    manifest = convert_checkpoint(
        user_path(path),
        user_path(out),
        chosen,
        num_processes=num_processes,
        degrees={name: degree for name, degree in degrees.items() if degree is not None},
        base_model=base_model,
        trust_pickle=trust_pickle,
    )
    if manifest["converted_from"]["world_size"] != num_processes:
        print("the ranks' random states are not carried over, so dropout draws differ", file=sys.stderr)
    if as_json:
        return print(json.dumps(manifest, indent=2, default=str))
    print(f"{out}: step {manifest['step']} for {chosen.name} on {num_processes} processes")


def _use_the_cpu_alone() -> None:
    """For torch, DeepSpeed and peft, which read this when they are imported; DeepSpeed only reads its files here."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it reports an optional kernel


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `500MB`, `2GiB` or a plain number. Raises ToolkitError for anything else.

    >>> parse_size("5GB"), parse_size("2 MiB")
    (5000000000, 2097152)
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    size = int(float(found[1]) * units.get(found[2].upper(), 0)) if found else 0
    if size < 1:
        raise ToolkitError(f"--max-shard-size is {text[:80]!r}, expected a size", hint="`--max-shard-size 5GB`")
    return size
