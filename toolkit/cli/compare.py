"""`toolkit compare` and `toolkit report`: train a job under several presets, and report the differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import expand_options
from toolkit.compare.options import CompareOptions
from toolkit.errors import ToolkitError
from toolkit.flags import PricePerGpuHour


@expand_options
def compare(options: CompareOptions) -> None:
    """Train the same job under several presets, and report the differences.

    After `--`: the job, at least --model_name_or_path, --dataset and --max_steps, as for `toolkit train`.
    """
    from toolkit.compare.commands import run_comparison

    run_comparison(options)


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
    from toolkit.compare.commands import report_both, write_report_again

    if len(folders) > 2:
        raise ToolkitError(f"got {len(folders)} folders, expected one, or two to compare")
    if len(folders) == 1:
        write_report_again(folders[0], price_per_gpu_hour=price_per_gpu_hour)
    elif price_per_gpu_hour is None:
        report_both(*folders)
    else:
        raise ToolkitError("--price-per-gpu-hour applies to the report of a single comparison", hint="name one folder")
