"""The preset to use, with reasons that are numbers: the plans of all presets, compared.

    >>> found = recommend(ask, list_presets())
    >>> found.choice.preset.name, [other.preset.name for other in found.others]

No tree of rules decides. Of the presets that fit, each at its best micro-batch, the fastest sets the mark; those that
no plan can tell from it count as equal, and of them the one that shards and offloads least is chosen. Two presets share
what the plan does not know (how fast this GPU and these links really are), so they are compared at the same end of
their intervals, never across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import ToolkitError
from toolkit.plan.candidates import Ask, Candidate, candidates, largest, refusal
from toolkit.plan.verdict import TOO_CLOSE
from toolkit.presets.preset import Preset
from toolkit.units import gib

# Repeats of one offload run differ by up to 15 % in public comparisons; a plan tells no more than a run does.
NO_DIFFERENCE = 1.15
WISHES = ("fastest", "least-memory")
LARGEST_TRIED = 1024


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to use, and what was not chosen."""

    choice: Candidate
    others: tuple[Candidate, ...]
    """The two next best that fit."""
    reasons: tuple[str, ...]
    why_not: dict[str, str]
    """Of every other preset, by name."""
    rule_of_thumb: str
    """The preset that the least sharding which fits would take, whatever its speed."""


def recommend(ask: Ask, presets: Sequence[Preset], *, wish: str = "fastest") -> Recommendation:
    """Raises ToolkitError where nothing fits, with the smallest number of GPUs on which something does."""
    found = candidates(ask, presets)
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        raise _nothing_fits(ask, presets, found)
    ordered = _ordered(fitting, wish)
    choice, others = ordered[0], tuple(ordered[1:3])
    thumb = min(fitting, key=_sharding)
    return Recommendation(
        choice=choice,
        others=others,
        reasons=tuple(_reasons(ask, choice, fitting, thumb)),
        why_not=_why_not(ask, presets, found, choice),
        rule_of_thumb=thumb.preset.name,
    )


def _ordered(fitting: list[Candidate], wish: str) -> list[Candidate]:
    """Best first. The equal of the best come before the rest, the least sharded of them first."""
    if wish == "least-memory":
        return sorted(fitting, key=lambda one: (one.memory.planned_peak_bytes, one.seconds))
    best = min(fitting, key=lambda one: one.seconds)
    equal = [one for one in fitting if _equal(one, best)]
    rest = [one for one in fitting if not _equal(one, best)]
    return sorted(equal, key=_sharding) + sorted(rest, key=lambda one: one.seconds)


def _equal(one: Candidate, best: Candidate) -> bool:
    return max(one.times(best)) <= NO_DIFFERENCE


def _sharding(candidate: Candidate) -> tuple[int, int, bool, float, str]:
    """Offloads, parts that are sharded, whether replicas are kept; then seconds."""
    preset = candidate.preset
    places = {None: 0, "cpu": 1, "nvme": 2}
    offloads = places[preset.offload_optimizer] + places[preset.offload_param]
    hybrid = preset.sharding == "hybrid_shard"
    return offloads, len(preset.sharded_parts), hybrid, candidate.seconds, preset.name


def _reasons(ask: Ask, choice: Candidate, fitting: list[Candidate], thumb: Candidate) -> list[str]:
    memory = gib(choice.memory.planned_peak_bytes)
    reasons = [f"planned peak {memory} of {gib(ask.gpu.memory_bytes)} a GPU, in the {choice.memory.peak.phase}"]
    best = min(fitting, key=lambda one: one.seconds)
    if best is not choice and choice.speed is not None:
        reasons.append(f"{choice.preset.name} takes {ratios(choice, best)} the seconds of {best.preset.name}")
    if ask.host_memory_bytes is None and (choice.preset.offload_optimizer or choice.preset.offload_param):
        host = gib(choice.memory.host.peak_bytes)
        reasons.append(
            f"every machine is taken to have {host} of host memory (`--host-memory-gib` says what yours has)"
        )
    if choice.job.activation_checkpointing:
        reasons.append(_why_checkpointing(ask, choice))
    if thumb.preset.name != choice.preset.name:
        reasons.append(
            f"the rule of thumb, the least sharding that fits, is {thumb.preset.name}: {_against(thumb, choice)}"
        )
    return reasons


def _why_checkpointing(ask: Ask, choice: Candidate) -> str:
    without = largest(ask, choice.preset, checkpointing=False)
    if without.fits:
        return f"without activation checkpointing ({without.settings}) it takes {ratios(without, choice)} the seconds"
    return f"without activation checkpointing {_too_large(ask, without)}"


def _too_large(ask: Ask, candidate: Candidate) -> str:
    if candidate.refused is not None:
        return f"it {candidate.refused}"
    needs, has = gib(candidate.memory.planned_peak_bytes), gib(ask.gpu.memory_bytes)
    said = "it is too close to call" if candidate.verdict == TOO_CLOSE else "it does not fit"
    return f"{said}: {needs} of {has} ({candidate.settings})"


def _why_not(ask: Ask, presets: Sequence[Preset], found: list[Candidate], choice: Candidate) -> dict[str, str]:
    reasons = {preset.name: reason for preset in presets if (reason := refusal(ask, preset)) is not None}
    for candidate in found:
        if candidate is not choice:
            reasons[candidate.preset.name] = _reason_against(ask, candidate, choice)
    return reasons


def _reason_against(ask: Ask, candidate: Candidate, choice: Candidate) -> str:
    if candidate.fits:
        return _against(candidate, choice)
    return _too_large(ask, candidate).removeprefix("it ").removeprefix("is ")


def _against(candidate: Candidate, choice: Candidate) -> str:
    """Time at both ends and memory, beside the choice."""
    planned = f"{gib(candidate.memory.planned_peak_bytes)} a GPU ({candidate.settings})"
    if candidate.speed is None:
        return f"fits too, and shards or offloads more: {planned}"
    low, high = sorted(candidate.times(choice))
    said = f"{ratios(candidate, choice)} the seconds"
    if high <= NO_DIFFERENCE and low >= 1 / NO_DIFFERENCE:
        said = f"no difference that a plan can tell ({said})"
    elif low < 1 < high:
        said += ", so faster or slower by the links"
    return f"{said}; {planned}"


def ratios(one: Candidate, other: Candidate) -> str:
    """`1.02 to 1.31 times`: at the best rates and at the worst, in ascending order."""
    low, high = sorted(one.times(other))
    return f"{low:.2f} times" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f} times"


def _nothing_fits(ask: Ask, presets: Sequence[Preset], found: list[Candidate]) -> ToolkitError:
    where = f"{ask.world_size} × {ask.gpu.name}"
    nearest = min(found, key=lambda one: (one.refused is not None, one.memory.planned_peak_bytes), default=None)
    if nearest is None:
        reasons = "; ".join(f"{preset.name} {refusal(ask, preset)}" for preset in presets)
        return ToolkitError(f"no preset is for {where}: {reasons}", hint="see `toolkit presets`")
    reason = _too_large(ask, nearest).removeprefix("it ")
    return ToolkitError(
        f"nothing fits on {where}: {nearest.preset.name}, the smallest, {reason}", hint=_way_out(ask, presets)
    )


def _way_out(ask: Ask, presets: Sequence[Preset]) -> str:
    """The next doubling on which something fits; else other ways out."""
    size = 2 * ask.world_size
    while size <= LARGEST_TRIED:
        batch = -(-ask.global_batch_size // size) * size
        if any(one.fits for one in candidates(replace(ask, world_size=size, global_batch_size=batch), presets)):
            return f"`--world-size {size}` fits"
        size *= 2
    adapters = "" if ask.job.lora_r else "`--lora-r 16`, "
    return f"{adapters}a shorter `--max-seq-length`, or a larger GPU"
