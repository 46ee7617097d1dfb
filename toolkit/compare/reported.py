"""Complete rows with what they say beside speed and parity: readings, efficiency, cost, and the runs beside them.

rows = with_readings(rows, trials, finished, shape=shape, environment=environment, price_per_gpu_hour=2.5)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.compare.efficiency import cost_of, efficiency
from toolkit.compare.extra_facts import extras_of
from toolkit.compare.planned import planned_bytes
from toolkit.compare.probes import batch_facts
from toolkit.compare.readings import row_readings
from toolkit.compare.results import Results
from toolkit.compare.trials import Comparison
from toolkit.models.shape import ModelShape

Row = dict[str, Any]


def with_readings(
    rows: Sequence[Row],
    trials: Sequence[Row],
    finished: Mapping[str, Row],
    *,
    comparison: Comparison,
    shape: ModelShape | None,
    environment: Mapping[str, Any],
    price_per_gpu_hour: float | None,
) -> list[Row]:
    """Each row from its own trials, from what the ledger has beside them, and from the planner."""
    completed = []
    for row in rows:
        own = [trial for trial in trials if trial["trial"].rpartition("-r")[0] == row["trial"]]
        row = row | row_readings(row, own) | extras_of(finished, row["trial"])
        planned = planned_bytes(comparison, row["preset"], row["world_size"], shape=shape)
        if row["failure"] is not None:
            row["failure"] = row["failure"] | {"predicted_bytes": planned["planned_peak_bytes"]}
        row |= planned | batch_facts(comparison, row["preset"], row["world_size"], finished, shape=shape)
        completed.append(
            row | efficiency(row, own, shape=shape, environment=environment, price_per_gpu_hour=price_per_gpu_hour)
        )
    return completed


def at_price(results: Results, price_per_gpu_hour: float) -> Results:
    """The same results, each row's cost at another price."""
    for row in results["rows"]:
        row["cost_per_million_tokens"] = cost_of(row, results["environment"], price_per_gpu_hour)
    results["price_per_gpu_hour"] = price_per_gpu_hour
    return results
