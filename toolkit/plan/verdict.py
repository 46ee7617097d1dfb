"""Fits, does not fit, or too close to call; the largest micro-batch and the smallest world size that fit.

    >>> verdict(planned_peak_bytes=60, exact_bytes=40, memory_bytes=80)
    'fits'

Model states are exact, so only the rest of a plan may be off. `UNCERTAINTY` is the share of that rest by which a plan
may be wrong before its verdict is: assumed, since no GPU has checked it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.plan.memory import MemoryPlan
from toolkit.presets.preset import Preset
from toolkit.presets.world import why_not

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does_not_fit", "too_close"
UNCERTAINTY = 0.15
# Where Llama's activations stand for those of an architecture that nobody has counted.
UNCERTAINTY_UNKNOWN = 0.5
LARGEST_MICRO_BATCH = 4096
LARGEST_WORLD_SIZE = 1024


def verdict(*, planned_peak_bytes: int, exact_bytes: int, memory_bytes: int, uncertainty: float = UNCERTAINTY) -> str:
    """One word; `exact_bytes` of the peak are certain."""
    margin = int(uncertainty * (planned_peak_bytes - exact_bytes))
    if planned_peak_bytes + margin <= memory_bytes:
        return FITS
    return DOES_NOT_FIT if planned_peak_bytes - margin > memory_bytes else TOO_CLOSE


def memory_verdict(plan: MemoryPlan, *, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Of a plan on a GPU, and on its machine where the host's memory is given."""
    peak = plan.peak
    exact = peak.parameter_bytes + peak.gradient_bytes + peak.optimizer_bytes
    word = verdict(
        planned_peak_bytes=plan.planned_peak_bytes,
        exact_bytes=exact,
        memory_bytes=memory_bytes,
        uncertainty=UNCERTAINTY if plan.knows_activations else UNCERTAINTY_UNKNOWN,
    )
    if host_bytes is not None and plan.host.peak_bytes > host_bytes:
        return DOES_NOT_FIT
    return word


def largest_micro_batch(fits: Callable[[int], bool]) -> int | None:
    """The largest micro-batch that fits, up to 4,096; None where not even 1 does. Memory grows with the micro-batch."""
    if not fits(1):
        return None
    good, bad = 1, 2
    while bad <= LARGEST_MICRO_BATCH and fits(bad):
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def smallest_world_size(preset: Preset, fits: Callable[[int], bool], sizes: Iterable[int] | None = None) -> int | None:
    """The smallest number of processes that fits: 1, 2, 4, ... up to 1,024; None where none does."""
    tried = sizes if sizes is not None else (2**power for power in range(LARGEST_WORLD_SIZE.bit_length()))
    return next((size for size in tried if why_not(preset, size) is None and fits(size)), None)
