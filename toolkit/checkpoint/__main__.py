"""The process of `toolkit checkpoint`: `python -m toolkit.checkpoint inspect|export|verify|convert`.

It is a process of its own so that the command line never imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict

from toolkit.entry_point import exit_code_of
from toolkit.errors import EXIT_DONE, EXIT_RUN_FAILED, ToolkitError
from toolkit.files.reading import user_path
from toolkit.parallel.layout import DEGREES
from toolkit.units import gib


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; an error is printed in two lines."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed only reads its files here
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    for name in ("path", "out"):
        if hasattr(options, name):
            setattr(options, name, user_path(getattr(options, name)))
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toolkit.checkpoint")
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.add_argument("path")
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect)
    inspect.add_argument("--json", action="store_true", dest="as_json")
    export = command("export", _export)
    export.add_argument("out")
    export.add_argument("--merge-lora", action="store_true")
    export.add_argument("--dtype", default="float32")
    export.add_argument("--max-shard-size", default="5GB")
    export.add_argument("--base-model")
    verify = command("verify", _verify)
    verify.add_argument("--json", action="store_true", dest="as_json")
    verify.add_argument("--base-model")
    convert = command("convert", _convert)
    convert.add_argument("out")
    convert.add_argument("--preset", required=True)
    convert.add_argument("--num-processes", type=int, required=True)
    for name in DEGREES:
        convert.add_argument(f"--{name.replace('_', '-')}", type=int)
    convert.add_argument("--base-model")
    for reads_tensors in (export, verify, convert):
        reads_tensors.add_argument("--trust-pickle", action="store_true")
    return parser


# Each command imports its own module: inspect needs no torch.


def _inspect(options: argparse.Namespace) -> int:
    from toolkit.checkpoint.inspect import inspect_all

    found = inspect_all(options.path)
    if options.as_json:
        print(json.dumps({"checkpoints": [asdict(summary) for summary in found]}, indent=2))
    else:
        print("\n".join(line for summary in found for line in summary.lines()))
    return EXIT_RUN_FAILED if any(summary.problem for summary in found) else EXIT_DONE


def _export(options: argparse.Namespace) -> int:
    from toolkit.checkpoint.hf_export import export

    result = export(
        options.path,
        options.out,
        merge_lora=options.merge_lora,
        dtype=options.dtype,
        max_shard_bytes=parse_size(options.max_shard_size),
        base_model=options.base_model,
        trust_pickle=options.trust_pickle,
    )
    kind = "adapter" if result.adapter else "model"
    print(f"{result.folder}: {kind} of {result.num_tensors} tensors, {gib(result.bytes)}")
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    from toolkit.checkpoint.verify import verify

    result = verify(options.path, base_model=options.base_model, trust_pickle=options.trust_pickle)
    if options.as_json:
        print(json.dumps(asdict(result), indent=2))
    elif result.sound:
        compared = "no fingerprint was recorded, so logits were not compared"
        if result.max_difference is not None:
            compared = f"logits within {result.max_difference:.2g} of the live model's (allowed {result.tolerance:g})"
            if result.four_bit_matmul is not None:
                compared += f", 4-bit layers computed {result.four_bit_matmul} in both"
        print(f"{result.path}: sound, {result.num_tensors} tensors; {compared}")
    else:
        print("\n".join([f"{result.path}: not sound", *(f"  {problem}" for problem in result.problems)]))
    return EXIT_DONE if result.sound else EXIT_RUN_FAILED


def _convert(options: argparse.Namespace) -> int:
    from toolkit.checkpoint.convert import convert
    from toolkit.presets import load_preset

    preset = load_preset(options.preset)
    manifest = convert(
        options.path,
        options.out,
        preset,
        num_processes=options.num_processes,
        degrees={name: degree for name in DEGREES if (degree := getattr(options, name)) is not None},
        base_model=options.base_model,
        trust_pickle=options.trust_pickle,
    )
    if manifest["converted_from"]["world_size"] != options.num_processes:
        print("the ranks' random states are not carried over, so dropout draws differ", file=sys.stderr)
    print(f"{options.out}: step {manifest['step']} for {preset.name} on {options.num_processes} processes")
    return EXIT_DONE


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `500MB`, `2GiB` or a plain number. Raises ToolkitError for anything else.

    >>> parse_size("5GB"), parse_size("2 MiB")
    (5000000000, 2097152)
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if found is None or found[2].upper() not in units:
        raise ToolkitError(f"--max-shard-size is {text[:80]!r}, expected a size", hint="`--max-shard-size 5GB`")
    size = int(float(found[1]) * units[found[2].upper()])
    if size < 1:
        raise ToolkitError(f"--max-shard-size is {text[:80]!r}, expected at least one byte")
    return size


if __name__ == "__main__":
    sys.exit(main())
