"""`toolkit convert-config`: a configuration of TRL, axolotl or LLaMA-Factory in our words."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit.entry_point import print_message
from toolkit.errors import ToolkitError, visible
from toolkit.flags import JsonOutput

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
    print_message(f"next: {launch_command(conversion, name)}")
