"""Energy and throttling of a run, from the NVML readings in its ranks' rows.

>>> reading = lambda at, joules: {"gpu_reading": {"monotonic_seconds": at, "energy_joules": joules}}
>>> energy_joules([[reading(1.0, 100.0), {}, reading(3.0, 700.0)]], seconds=4.0)
1200.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def energy_joules(ranks: Sequence[Sequence[Row]], *, seconds: float) -> float | None:
    """Mean power between each rank's first and last reading, times `seconds`, summed over ranks.

    None where a rank has fewer than two readings: a GPU that shows no counter, or too short a run.
    """
    watts = [_watts(rows) for rows in ranks]
    return None if not watts or None in watts else seconds * sum(power for power in watts if power is not None)


def throttle_reasons(ranks: Sequence[Sequence[Row]]) -> list[str] | None:
    """Every reason that any reading gave; empty where none did, None where nobody could be asked."""
    said = [reading["throttle_reasons"] for rows in ranks for reading in _readings(rows, "throttle_reasons")]
    return sorted({reason for reasons in said for reason in reasons}) if said else None


def _watts(rows: Sequence[Row]) -> float | None:
    readings = _readings(rows, "energy_joules")
    if len(readings) < 2:
        return None
    first, last = readings[0], readings[-1]
    elapsed: float = last["monotonic_seconds"] - first["monotonic_seconds"]
    return float(last["energy_joules"] - first["energy_joules"]) / elapsed if elapsed > 0 else None


def _readings(rows: Sequence[Row], key: str) -> list[Row]:
    readings = [row.get("gpu_reading") for row in rows]
    return [reading for reading in readings if reading and reading.get(key) is not None]
