"""The commands' own process: `python -m toolkit.checkpoint inspect|export|verify|convert`.

`toolkit checkpoint` starts it, so that the command line itself never imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_RUN_FAILED, ToolkitError
from toolkit.units import gib


def main(argv: list[str] | None = None) -> int:
    """Run one command; what a user can fix is two lines and an exit code."""
    words = parser().parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is asked for file formats only
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    try:
        return int(words.run(words))
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Arguments as `toolkit checkpoint` passes them on."""
    top = argparse.ArgumentParser(prog="python -m toolkit.checkpoint")
    commands = top.add_subparsers(required=True)
    inspecting = _command(commands, "inspect", run_inspect)
    inspecting.add_argument("--json", action="store_true", dest="as_json")
    exporting = _command(commands, "export", run_export)
    exporting.add_argument("out", type=Path)
    exporting.add_argument("--merge-lora", action="store_true")
    exporting.add_argument("--dtype", default="float32")
    exporting.add_argument("--max-shard-size", default="5GB")
    exporting.add_argument("--base-model")
    verifying = _command(commands, "verify", run_verify)
    verifying.add_argument("--json", action="store_true", dest="as_json")
    verifying.add_argument("--base-model")
    converting = _command(commands, "convert", run_convert)
    converting.add_argument("out", type=Path)
    converting.add_argument("--preset", required=True)
    converting.add_argument("--num-processes", type=int, required=True)
    converting.add_argument("--base-model")
    return top


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: object
) -> argparse.ArgumentParser:
    command = commands.add_parser(name)
    command.add_argument("path", type=Path)
    command.set_defaults(run=run)
    return command


def run_inspect(words: argparse.Namespace) -> int:
    from toolkit.checkpoint.look import lines, look_at_all

    found = look_at_all(words.path)
    if words.as_json:
        print(json.dumps({"checkpoints": found}, indent=2))
    else:
        print("\n".join(line for facts in found for line in lines(facts)))
    return EXIT_RUN_FAILED if any(facts["problem"] for facts in found) else EXIT_DONE


def run_export(words: argparse.Namespace) -> int:
    from toolkit.checkpoint.export import export

    done = export(
        words.path,
        words.out,
        merge_lora=words.merge_lora,
        dtype=words.dtype,
        max_shard_bytes=size_of(words.max_shard_size),
        base_model=words.base_model,
    )
    kind = "adapter" if done.adapter else "model"
    print(f"{done.folder}: {kind} of {done.num_tensors} tensors, {gib(done.bytes)}")
    return EXIT_DONE


def run_verify(words: argparse.Namespace) -> int:
    from toolkit.checkpoint.verify import verify

    found = verify(words.path, base_model=words.base_model)
    if words.as_json:
        print(json.dumps(asdict(found), indent=2))
    elif found.sound:
        compared = "no fingerprint was recorded, so logits were not compared"
        if found.max_difference is not None:
            compared = f"logits within {found.max_difference:.2g} of the live model's (allowed {found.tolerance:g})"
        print(f"{found.path}: sound, {found.num_tensors} tensors; {compared}")
    else:
        print("\n".join([f"{found.path}: not sound", *(f"  {problem}" for problem in found.problems)]))
    return EXIT_DONE if found.sound else EXIT_RUN_FAILED


def run_convert(words: argparse.Namespace) -> int:
    from toolkit.checkpoint.convert import convert
    from toolkit.presets import load_preset

    preset = load_preset(words.preset)
    done = convert(words.path, words.out, preset, num_processes=words.num_processes, base_model=words.base_model)
    if done["converted_from"]["world_size"] != words.num_processes:
        print("the ranks' random states are not carried over: dropout draws other numbers", file=sys.stderr)
    print(f"{words.out}: step {done['step']} for {preset.name} on {words.num_processes} processes")
    return EXIT_DONE


def size_of(text: str) -> int:
    """`5GB`, `500MB` or bytes. Raises ToolkitError for anything else."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}
    digits = text.rstrip("KMGIBkmgib ")
    unit = text[len(digits) :].strip().upper()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError):
        raise ToolkitError(f"--max-shard-size is {text!r}, expected a size", hint="`--max-shard-size 5GB`") from None
    if size < 1:
        raise ToolkitError(f"--max-shard-size is {text!r}, expected more than nothing")
    return size


if __name__ == "__main__":
    sys.exit(main())
