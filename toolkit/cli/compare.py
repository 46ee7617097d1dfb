"""`toolkit compare`: train the same job under several presets, and report the differences."""

from __future__ import annotations

from toolkit.cli.options import expand_options
from toolkit.compare.options import CompareOptions


@expand_options
def compare(options: CompareOptions) -> None:
    """Train the same job under several presets, and report the differences.

    Needs --preset and --output-dir. After `--`: the job, at least --model_name_or_path, --dataset and
    --max_steps, as for `toolkit train`.
    """
    from toolkit.compare.commands import run_comparison

    run_comparison(options)
