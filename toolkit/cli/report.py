"""`toolkit report`: the report of a comparison from its files, or of two comparisons what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import ToolkitError
from toolkit.flags import PricePerGpuHour


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="folder of a comparison; or two: before and after", metavar="DIR [DIR]")
    ],
    price_per_gpu_hour: PricePerGpuHour = None,
) -> None:
    """Write the report of a comparison again, or compare two.

    Reads the comparison's files alone. Two comparisons must train the same job; otherwise the differences are listed
    and the exit code is 2.
    """
    from toolkit.compare import commands

    if len(folders) > 2:
        raise ToolkitError(f"got {len(folders)} folders, expected one, or two to compare")
    if len(folders) == 2:
        if price_per_gpu_hour is not None:
            raise ToolkitError(
                "--price-per-gpu-hour applies to the report of a single comparison", hint="name one folder"
            )
        commands.report_both(*folders)
        return
    commands.write_report_again(folders[0], price_per_gpu_hour=price_per_gpu_hour)
