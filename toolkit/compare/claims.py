"""What may be said of a row beside others: ratio, difference, rank, scaling.

    claims(row, rows, speeds, comparison)["difference"]     # 'no difference seen'

`speeds` is each row's tokens/s by repeat, over the same steps in all trials with one number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.compare.intervals import centre, difference, ratio_confidence, ratio_interval
from toolkit.compare.trials import Comparison, row_name
from toolkit.runs import status

Row = dict[str, Any]
Speeds = Mapping[str, Sequence[float]]


def common_steps(trials: Sequence[Row]) -> int:
    """Timed steps that every completed trial has."""
    return min((len(t["timed_step_numbers"]) for t in trials if t["status"] == status.COMPLETED), default=0)


def speeds_of(trials: Sequence[Row], steps: int) -> list[float]:
    """Tokens/s of each repeat over its first timed steps."""
    found = []
    for trial in trials:
        numbers = trial["timed_step_numbers"][:steps]
        seconds = sum(trial["step_seconds"][number - 1] for number in numbers)
        found.append(sum(trial["step_tokens"][number - 1] for number in numbers) / seconds)
    return found


def has_speed(row: Row) -> bool:
    return row["status"] == status.COMPLETED and row["tokens_per_second"] is not None


def beside(row: Row, rows: Sequence[Row], speeds: Speeds, comparison: Comparison) -> Row:
    """Ratio to the reference with what it allows to be said, and scaling against the fewest processes."""
    if row["trial"] not in speeds:
        return {"ratio_to_reference": None}
    own = speeds[row["trial"]]
    found = _scaling(row, rows)
    name = row_name(comparison.reference, row["world_size"])
    if name not in speeds:
        return found | {"ratio_to_reference": None}
    if row["trial"] == name:
        return found | {"ratio_to_reference": 1.0, "difference": "reference"}
    ratio = ratio_interval(own, speeds[name], confidence_of(rows))
    return found | {
        "ratio_to_reference": centre(own) / centre(speeds[name]),
        "ratio_interval": ratio,
        "difference": difference(ratio),
    }


def confidence_of(rows: Sequence[Row]) -> float:
    """Of each ratio to a reference, of which there is one for each number of processes."""
    return ratio_confidence(len(rows) - len({row["world_size"] for row in rows}))


def _scaling(row: Row, rows: Sequence[Row]) -> Row:
    """Speed over that of the same preset with the fewest processes; nothing where it ran with one number alone."""
    same = [other for other in rows if other["preset"] == row["preset"] and has_speed(other)]
    fewest = min(same, key=lambda other: other["world_size"])
    if len({other["world_size"] for other in same}) == 1:
        return {}
    speed_up = row["tokens_per_second"] / fewest["tokens_per_second"]
    return {"speed_up": speed_up, "scaling_efficiency": speed_up / (row["world_size"] / fewest["world_size"])}


def rank_of(row: Row, rows: Sequence[Row], speeds: Speeds) -> int | None:
    """Place among the rows of its number of processes and group; None unless it is separated from every other."""
    peers = [
        other
        for other in rows
        if other["trial"] in speeds and (other["world_size"], other["group"]) == (row["world_size"], row["group"])
    ]
    if row not in peers or len(peers) < 2:
        return None
    confidence = ratio_confidence(len(list(itertools.combinations(peers, 2))))
    said = [
        difference(ratio_interval(speeds[other["trial"]], speeds[row["trial"]], confidence))
        for other in peers
        if other is not row
    ]
    if any(claim not in ("faster", "slower") for claim in said):
        return None
    return 1 + said.count("faster")
