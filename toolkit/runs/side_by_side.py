"""A plan and a rehearsal of the same rank, part by part: what was planned, what was found, and the difference.

    >>> row = side_by_side({"parameter_bytes": 8}, {"parameter_bytes": 10})[0]
    >>> (row.part, row.planned_bytes, row.rehearsed_bytes, row.difference)
    ('parameter', 8, 10, -0.2)

`plan` is a row of `toolkit plan --json`, `rehearsal` the facts of `toolkit rehearse --json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

STATES = ("parameter", "gradient", "optimizer")
# What a rehearsal on fake tensors tells apart, in the plan's words.
PART_OF = {
    **{part: part for part in (*STATES, "logits")},
    **{"forward": "activation", "backward": "activation", "load": "activation"},
    **{"gathered": "buffer", "reduction": "buffer", "buckets": "buffer", "step": "buffer"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One part of one rank's memory."""

    part: str
    planned_bytes: int
    rehearsed_bytes: int

    @property
    def difference(self) -> float | None:
        """Planned over rehearsed, minus one; None where nothing was found and something planned."""
        if self.rehearsed_bytes == 0:
            return 0.0 if self.planned_bytes == 0 else None
        return self.planned_bytes / self.rehearsed_bytes - 1

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        sizes = {"planned_bytes": self.planned_bytes, "rehearsed_bytes": self.rehearsed_bytes}
        return {"part": self.part, **sizes, "difference": self.difference}


def side_by_side(plan: Mapping[str, Any], rehearsal: Mapping[str, Any]) -> list[Difference]:
    """Model states; then, as far as the rehearsal told them, the peak of each phase and its parts."""
    return [*_states(plan, rehearsal), *_phases(plan, rehearsal)]


def _states(plan: Mapping[str, Any], rehearsal: Mapping[str, Any]) -> Iterator[Difference]:
    for part in STATES:
        name = f"{part}_bytes"
        if name in plan and name in rehearsal:
            yield Difference(part=part, planned_bytes=plan[name], rehearsed_bytes=rehearsal[name])


def _phases(plan: Mapping[str, Any], rehearsal: Mapping[str, Any]) -> Iterator[Difference]:
    planned = plan.get("phases") or {}
    for phase, found in (rehearsal.get("peaks") or {}).items():  # on fake tensors
        if phase in planned:
            yield from _parts(phase, planned[phase], found)
    for phase, found in (rehearsal.get("phase_peaks") or {}).items():  # on a GPU
        if phase in planned:
            yield Difference(
                part=f"{phase}: allocated",
                planned_bytes=planned[phase]["allocated_bytes"],
                rehearsed_bytes=found["peak_allocated_bytes"],
            )


def _parts(phase: str, planned: Mapping[str, int], found: Mapping[str, Any]) -> Iterator[Difference]:
    held: dict[str, int] = {}
    for tag, size in found["parts"].items():
        held[PART_OF[tag]] = held.get(PART_OF[tag], 0) + size
    for part in dict.fromkeys(PART_OF.values()):
        yield Difference(
            part=f"{phase}: {part}", planned_bytes=planned[f"{part}_bytes"], rehearsed_bytes=held.get(part, 0)
        )
    yield Difference(
        part=f"{phase}: allocated", planned_bytes=planned["allocated_bytes"], rehearsed_bytes=found["total_bytes"]
    )
