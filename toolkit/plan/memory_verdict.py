"""Verdict on a memory plan: fits, does not fit, or too close; largest micro-batch and smallest world size that fit.

>>> fit_verdict(planned_peak_bytes=60, exact_bytes=40, memory_bytes=80)
'fits'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.plan.memory import MemoryPlan
from toolkit.presets.preset import Preset
from toolkit.presets.support import supports_world_size

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does_not_fit", "too_close"
# Share of a plan, apart from the model states, by which the plan may be wrong. Assumed: no GPU has checked it yet.
UNCERTAINTY = 0.15
# The same if Llama's activations stand in for those of an architecture that could not be counted.
UNCERTAINTY_UNKNOWN = 0.5
LARGEST_MICRO_BATCH = 4096
LARGEST_WORLD_SIZE = 1024


def fit_verdict(
    *, planned_peak_bytes: int, exact_bytes: int, memory_bytes: int, uncertainty: float = UNCERTAINTY
) -> str:
    """Return the verdict for a peak of which `exact_bytes`, the model states, are certain."""
    margin = int(uncertainty * (planned_peak_bytes - exact_bytes))
    if planned_peak_bytes + margin <= memory_bytes:
        return FITS
    return DOES_NOT_FIT if planned_peak_bytes - margin > memory_bytes else TOO_CLOSE


def memory_verdict(plan: MemoryPlan, *, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Return the verdict for a GPU of `memory_bytes`, and for a node of `host_bytes` if given."""
    if host_bytes is not None and plan.host.peak_bytes > host_bytes:
        return DOES_NOT_FIT
    return fit_verdict(
        planned_peak_bytes=plan.planned_peak_bytes,
        exact_bytes=plan.peak.state_bytes,
        memory_bytes=memory_bytes,
        uncertainty=UNCERTAINTY if plan.activations_known else UNCERTAINTY_UNKNOWN,
    )


def largest_micro_batch(fits: Callable[[int], bool]) -> int | None:
    """Return the largest micro-batch, up to 4,096, for which `fits` is true; None if 1 does not fit.

    Memory grows with the micro-batch, so this doubles, then bisects.

    >>> largest_micro_batch(lambda size: size <= 7)
    7
    """
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
    """Return the smallest world size for which `fits` is true: 1, 2, 4, ... up to 1,024; None if there is none."""
    tried = sizes if sizes is not None else (2**power for power in range(LARGEST_WORLD_SIZE.bit_length()))
    return next((size for size in tried if supports_world_size(preset, size) and fits(size)), None)
