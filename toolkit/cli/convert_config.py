"""`toolkit convert-config`: a configuration of TRL, axolotl or LLaMA-Factory in our words."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.entry_point import print_message
from toolkit.errors import ToolkitError, visible
from toolkit.flags import JsonOutput

if TYPE_CHECKING:
    from toolkit.convert import Conversion

DEFAULT_NAME = "train.yaml"  # in the command that is printed, if the output goes to stdout


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
    from toolkit.convert import convert_file, yaml_text

    if output is not None and os.path.realpath(output) == os.path.realpath(file):
        raise ToolkitError(f"--output {output} is the input", hint="name another file: the configuration is kept")
    if output is not None and os.path.lexists(output) and not force:
        raise ToolkitError(f"{output} exists already", hint="`--force` overwrites it, or name another `--output`")
    conversion = convert_file(file, tool)
    text = yaml_text(conversion, source=str(file), file=str(output or DEFAULT_NAME))
    if output is not None:
        _write(output, text)
    if as_json:
        print(json.dumps(dataclasses.asdict(conversion), indent=2, ensure_ascii=False, default=str))
    elif output is None:
        print(text, end="")
    _print_summary(conversion, str(output or DEFAULT_NAME))


def _write(path: Path, text: str) -> None:
    from toolkit.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise ToolkitError(f"cannot write {path}: {error.strerror}", hint="name another `--output`") from None


def _print_summary(conversion: Conversion, file: str) -> None:
    from toolkit.convert import launch_command
    from toolkit.convert.conversion import cut

    count = len(conversion.not_converted)
    without = f"{count} without a counterpart" if count != 1 else "1 without a counterpart"
    print_message(f"{conversion.tool}: {len(conversion.converted)} settings converted, {without}")
    if conversion.not_converted:
        keys = dict.fromkeys(visible(cut(each.key)) for each in conversion.not_converted)
        print_message(f"not converted: {', '.join(keys)}")
    print_message(f"next: {launch_command(conversion, file)}")
