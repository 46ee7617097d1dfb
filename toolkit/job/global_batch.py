"""The sequences of an optimizer step, `--global_batch_size`, which keeps them on any number of GPUs, and their rate.

>>> global_batch_size(Job(per_device_train_batch_size=2, gradient_accumulation_steps=4), 8)
64
>>> with_accumulation(Job(per_device_train_batch_size=2, global_batch_size=64), data_parallel_size=8).to_argv()[-2:]
['--gradient_accumulation_steps', '4']
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.job.job import Job

BATCH_ARGUMENT = "per_device_train_batch_size"
SHOWN_NUMBERS = 12
# Warm-up to a larger rate (Goyal et al., section 2.2), as a fraction of all steps, unless the user sets it.
WARMUP_SHARE = 0.05


def global_batch_size(job: Job, data_parallel_size: int) -> int:
    """Return the sequences per optimizer step: micro-batch x accumulation steps x groups with different rows."""
    return job.per_device_train_batch_size * job.gradient_accumulation_steps * data_parallel_size


def strong_scaling_batches(job: Job, world_sizes: Sequence[int]) -> dict[int, dict[str, int]]:
    """Return the batch arguments for each world size that keep the global batch of the smallest one.

    `--global_batch_size` takes its place. Fewer accumulation steps come first, then smaller micro-batches.

    >>> strong_scaling_batches(Job(per_device_train_batch_size=4), [1, 2])[2]
    {'per_device_train_batch_size': 2, 'gradient_accumulation_steps': 1}
    """
    micro_batch = job.per_device_train_batch_size
    global_batch = job.global_batch_size or micro_batch * job.gradient_accumulation_steps * min(world_sizes)
    found: dict[int, dict[str, int]] = {}
    for size in world_sizes:
        if global_batch % size:
            raise ToolkitError(
                f"--scaling strong: a global batch of {global_batch} sequences cannot be shared by {size} processes",
                hint=f"`--gradient_accumulation_steps` so that it is a multiple of {size}, or `--scaling weak`",
            )
        per_rank = global_batch // size
        own = max(batch for batch in range(1, min(micro_batch, per_rank) + 1) if per_rank % batch == 0)
        found[size] = {BATCH_ARGUMENT: own, "gradient_accumulation_steps": per_rank // own}
    return found


def with_accumulation(job: Job, *, data_parallel_size: int, ranks_per_batch: int = 1) -> Job:
    """Return the job with the accumulation steps that make the steps of `--global_batch_size`, if it is given.

    `data_parallel_size` groups train on different rows, each of `ranks_per_batch` ranks.

    Raises ToolkitError, with the numbers of processes that keep the batch, where no number of steps makes it.
    """
    total, micro_batch = job.global_batch_size, job.per_device_train_batch_size
    if total is None:
        return job
    steps, rest = divmod(total, micro_batch * data_parallel_size)
    if rest or not steps:
        raise _indivisible(total, micro_batch, data_parallel_size, ranks_per_batch)
    if "gradient_accumulation_steps" in job.given and job.gradient_accumulation_steps != steps:
        raise ToolkitError(
            f"--global_batch_size {total} is {_product(micro_batch, data_parallel_size)} × {steps} accumulation steps,"
            f" and --gradient_accumulation_steps is {job.gradient_accumulation_steps}",
            hint="leave `--gradient_accumulation_steps` out: it follows from the number of processes",
        )
    return job.with_values(gradient_accumulation_steps=steps)


def _indivisible(total: int, micro_batch: int, groups: int, ranks_per_batch: int) -> ToolkitError:
    message = f"--global_batch_size {total} is no multiple of {_product(micro_batch, groups)}"
    smaller = max((size for size in range(1, micro_batch + 1) if total % (size * groups) == 0), default=None)
    keeping = [] if total % micro_batch else processes_that_keep(total // micro_batch, ranks_per_batch=ranks_per_batch)
    if keeping:
        message += f"; numbers of processes that keep it: {', '.join(map(str, keeping[:SHOWN_NUMBERS]))}"
    if len(keeping) > SHOWN_NUMBERS:
        message += f" and {len(keeping) - SHOWN_NUMBERS} more"
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


def check_global_batch(job: Job) -> None:
    """Raise ToolkitError for `--global_batch_size` with an argument that would not keep the rows of a step."""
    moving = job.order_of_ranks
    if job.global_batch_size is not None and moving is not None:
        raise ToolkitError(
            f"--global_batch_size does not go with {moving}: the rows of a step would depend on the number of ranks",
            hint=f"leave `{moving}` out",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledRate:
    """A learning rate, and the values it was calculated from."""

    rule: str  # `linear` or `sqrt`
    base_learning_rate: float
    reference_batch_size: int  # sequences per optimizer step for which the base rate was tuned
    global_batch_size: int  # sequences per optimizer step of this run
    learning_rate: float

    @property
    def sentence(self) -> str:
        """The calculation as text."""
        ratio = f"{self.global_batch_size}/{self.reference_batch_size}"
        factor = f"√({ratio})" if self.rule == "sqrt" else ratio
        return f"learning rate {self.base_learning_rate:g} × {factor} ({self.rule}) = {self.learning_rate:g}"


def scaled_rate(base: float, *, rule: str, global_batch_size: int, reference_batch_size: int) -> ScaledRate:
    """Scale a learning rate to this global batch size.

    Linear: Goyal et al., https://arxiv.org/abs/1706.02677. Square root: Krizhevsky, https://arxiv.org/abs/1404.5997,
    derived for Adam's gradient noise (Malladi et al., https://arxiv.org/abs/2205.10287).

    >>> print(scaled_rate(2e-5, rule="linear", global_batch_size=64, reference_batch_size=16).sentence)
    learning rate 2e-05 × 64/16 (linear) = 8e-05
    """
    ratio = global_batch_size / reference_batch_size
    return ScaledRate(
        rule=rule,
        base_learning_rate=base,
        reference_batch_size=reference_batch_size,
        global_batch_size=global_batch_size,
        learning_rate=base * (math.sqrt(ratio) if rule == "sqrt" else ratio),
    )


def check_scaling(job: Job) -> None:
    """Raise ToolkitError for a rule without a reference batch size, and the other way round."""
    rule, reference = job.lr_scaling, job.lr_reference_batch_size
    if rule is not None and reference is None:
        hint = "`--lr_reference_batch_size 16` (sequences per optimizer step)"
        raise ToolkitError("--lr_scaling needs the global batch size for which the learning rate was tuned", hint=hint)
    if rule is None and reference is not None:
        raise ToolkitError("--lr_reference_batch_size without --lr_scaling", hint="`--lr_scaling linear`, or `sqrt`")
