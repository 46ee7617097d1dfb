"""The sequences of an optimizer step, and `--global_batch_size`, which keeps them the same on any number of GPUs.

>>> global_batch_size({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 8)
64
>>> with_accumulation({"per_device_train_batch_size": 2, "global_batch_size": 64}, data_parallel_size=8)
{'per_device_train_batch_size': 2, 'global_batch_size': 64, 'gradient_accumulation_steps': 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.job.script_arguments import accumulation_steps, flag, is_given, micro_batch_size
from toolkit.job.trainer_arguments import json_object

Arguments = dict[str, Any]

SHOWN_NUMBERS = 12


def global_batch_size(arguments: Arguments, data_parallel_size: int) -> int:
    """Return the sequences per optimizer step: micro-batch x accumulation steps x groups with different rows."""
    return micro_batch_size(arguments) * accumulation_steps(arguments) * data_parallel_size


def with_accumulation(arguments: Arguments, *, data_parallel_size: int, ranks_per_batch: int = 1) -> Arguments:
    """Return the arguments with the accumulation steps that make the steps of `--global_batch_size`, if it is given.

    `data_parallel_size` groups train on different rows, each of `ranks_per_batch` ranks.

    Raises ToolkitError, with the numbers of processes that keep the batch, where no number of steps makes it.
    """
    if not is_given(arguments, "global_batch_size"):
        return arguments
    total, micro_batch = int(arguments["global_batch_size"]), micro_batch_size(arguments)
    steps, rest = divmod(total, micro_batch * data_parallel_size)
    if rest or not steps:
        raise _indivisible(total, micro_batch, data_parallel_size, ranks_per_batch)
    if is_given(arguments, "gradient_accumulation_steps") and accumulation_steps(arguments) != steps:
        raise ToolkitError(
            f"--global_batch_size {total} is {_product(micro_batch, data_parallel_size)} × {steps} accumulation steps,"
            f" and --gradient_accumulation_steps is {accumulation_steps(arguments)}",
            hint="leave `--gradient_accumulation_steps` out: it follows from the number of processes",
        )
    return arguments | {"gradient_accumulation_steps": steps}


def _indivisible(total: int, micro_batch: int, groups: int, ranks_per_batch: int) -> ToolkitError:
    message = f"--global_batch_size {total} is no multiple of {_product(micro_batch, groups)}"
    smaller = max((size for size in range(1, micro_batch + 1) if total % (size * groups) == 0), default=None)
    keeping = [] if total % micro_batch else processes_that_keep(total // micro_batch, ranks_per_batch=ranks_per_batch)
    if keeping:
        message += f"; numbers of processes that keep it: {_listed(keeping)}"
    if smaller:
        return ToolkitError(message, hint=f"`--per_device_train_batch_size {smaller}`")
    if keeping:
        most = max(number for number in keeping if number <= max(groups * ranks_per_batch, keeping[0]))
        return ToolkitError(message, hint=f"train on {most}")
    nearest = max(1, total // (micro_batch * groups)) * micro_batch * groups
    return ToolkitError(message, hint=f"`--global_batch_size {nearest}`")


def processes_that_keep(micro_batches: int, *, ranks_per_batch: int = 1) -> list[int]:
    """Return the numbers of processes that share so many micro-batches evenly.

    >>> processes_that_keep(8), processes_that_keep(4, ranks_per_batch=2)
    ([1, 2, 4, 8], [2, 4, 8])
    """
    small = [number for number in range(1, int(micro_batches**0.5) + 1) if micro_batches % number == 0]
    return [number * ranks_per_batch for number in sorted({*small, *(micro_batches // number for number in small)})]


def _product(micro_batch: int, groups: int) -> str:
    return f"{groups} data-parallel ranks × {micro_batch} sequences (--per_device_train_batch_size)"


def _listed(numbers: list[int]) -> str:
    more = len(numbers) - SHOWN_NUMBERS
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + (f" and {more} more" if more > 0 else "")


def order_of_ranks(arguments: Mapping[str, Any]) -> str | None:
    """Return the argument by which the rows of a step depend on the number of ranks; None where they do not."""
    configured = json_object(arguments, "accelerator_config")
    named = {
        "--train_sampling_strategy batch_rebalance": arguments.get("train_sampling_strategy") == "batch_rebalance",
        "--auto_find_batch_size": flag(arguments.get("auto_find_batch_size", False)),
        "--ignore_data_skip": flag(arguments.get("ignore_data_skip", False)),
        "--accelerator_config split_batches": flag(configured.get("split_batches", False)),
        "--accelerator_config use_seedable_sampler false": not flag(configured.get("use_seedable_sampler", True)),
    }
    return next((name for name, is_set in named.items() if is_set), None)


def check_global_batch(arguments: Mapping[str, Any]) -> None:
    """Raise ToolkitError for `--global_batch_size` with an argument that would not keep the rows of a step."""
    moving = order_of_ranks(arguments)
    if arguments.get("global_batch_size") is not None and moving is not None:
        raise ToolkitError(
            f"--global_batch_size does not go with {moving}: the rows of a step would depend on the number of ranks",
            hint=f"leave `{moving}` out",
        )
