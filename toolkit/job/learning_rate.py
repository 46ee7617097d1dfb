"""The learning rate scaled with the global batch size, and a sentence with the arithmetic.

    >>> print(scaled_rate(2e-5, rule="linear", global_batch_size=64, reference_batch_size=16).sentence)
    learning rate 2e-05 × 64/16 (linear) = 8e-05

Linear: Goyal et al., https://arxiv.org/abs/1706.02677. Square root: Krizhevsky, https://arxiv.org/abs/1404.5997,
derived for Adam's gradient noise (Malladi et al., https://arxiv.org/abs/2205.10287).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.job.job import Job

# Warm-up to a larger rate (Goyal et al., section 2.2), as a fraction of all steps, unless the user sets it.
WARMUP_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledRate:
    """A learning rate, and the values it was calculated from."""

    rule: str
    """`linear` or `sqrt`."""
    base_learning_rate: float
    reference_batch_size: int
    """Sequences per optimizer step for which the base rate was tuned."""
    global_batch_size: int
    """Sequences per optimizer step of this run."""
    learning_rate: float

    @property
    def sentence(self) -> str:
        """The calculation as text."""
        ratio = f"{self.global_batch_size}/{self.reference_batch_size}"
        factor = f"√({ratio})" if self.rule == "sqrt" else ratio
        return f"learning rate {self.base_learning_rate:g} × {factor} ({self.rule}) = {self.learning_rate:g}"


def scaled_rate(base: float, *, rule: str, global_batch_size: int, reference_batch_size: int) -> ScaledRate:
    """Scale a learning rate to this global batch size."""
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
        raise ToolkitError(
            "--lr_scaling needs the global batch size for which the learning rate was tuned",
            hint="`--lr_reference_batch_size 16` (sequences per optimizer step)",
        )
    if rule is None and reference is not None:
        raise ToolkitError("--lr_reference_batch_size without --lr_scaling", hint="`--lr_scaling linear`, or `sqrt`")
