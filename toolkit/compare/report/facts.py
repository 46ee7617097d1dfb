"""What a row may be said to show: whether it finished, trained the same problem, and can be compared.

>>> status_text({"status": "completed", "parity": "parity failed"})    # doctest: +SKIP
'parity failed'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import cast

from toolkit.compare.results import Results, Row, withheld

PARITY_FAILED = "parity failed"
PART_KEYS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


def honest(results: Results) -> Results:
    """A copy that claims no more than it may: NaN and infinity are unknown, no speed without parity."""
    copy = cast(Results, _finite(results))
    for row in copy["rows"]:
        if not finished(row):
            row["ratio_to_reference"] = None
    copy["rows"] = [cast(Row, withheld(row)) if differs(row) else row for row in copy["rows"]]
    return copy


def _finite(value: object) -> object:
    """A deep copy in which every float that JSON cannot hold is None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finished(row: Row) -> bool:
    """Whether all its steps ran: only such a row has figures."""
    return row["status"] == "completed"


def differs(row: Row) -> bool:
    """Whether it finished and trained something else than the reference did."""
    return finished(row) and row["parity"] == PARITY_FAILED


def comparable(row: Row) -> bool:
    """Whether its speed may stand beside the reference's: finished, and known to train the same problem."""
    return finished(row) and row["parity"] in ("reference", "agrees")


def status_text(row: Row) -> str:
    """The status as a table shows it."""
    return PARITY_FAILED if differs(row) else row["status"]


def curve_name(label: str, row: Row) -> str:
    """The label of a loss curve, which says so when the row is not an ordinary one."""
    return one_line(label if row["status"] == status_text(row) == "completed" else f"{label} ({status_text(row)})")


def on_cpu(results: Results) -> bool:
    """Whether the comparison ran without a GPU."""
    return results["environment"]["device"] == "cpu"


def part_bytes(row: Row, key: str) -> int | None:
    """One part of the model states on one rank, by its key."""
    return cast(Mapping[str, int | None], row)[key]


def model_state_bytes(row: Row) -> int | None:
    """Parameters, gradients and optimizer states on one rank, or None when a part is unknown."""
    parts = [part_bytes(row, key) for key in PART_KEYS]
    return None if None in parts else sum(part for part in parts if part is not None)


def peak_bytes(results: Results, row: Row) -> int | None:
    """The peak that the machine can tell: allocated on a GPU, resident host memory on a CPU."""
    return row["peak_host_bytes"] if on_cpu(results) else row["peak_allocated_bytes"]


def repeated(row: Row) -> bool:
    """Whether its speed has an interval: only then can it be said to differ from another's."""
    return row["tokens_per_second_interval"] is not None


def separated(one: Row, other: Row) -> bool:
    """Whether the comparison claims that the speeds of two rows with one number of processes differ.

    A row with a rank is separated from every other; a difference is one from the reference.
    """
    if one["rank"] is not None or other["rank"] is not None:
        return True
    claimed = [row["difference"] for row, beside in ((one, other), (other, one)) if beside["difference"] == "reference"]
    return any(difference in ("faster", "slower") for difference in claimed)


def capacity_bytes(results: Results) -> int | None:
    """Memory of one GPU, the smallest where they differ."""
    known = [gpu["memory_bytes"] for gpu in results["environment"]["gpus"] if gpu["memory_bytes"]]
    return min(known, default=None)


def out_of_memory(row: Row) -> bool:
    """Whether it did not fit, on a GPU or on the host."""
    return row["status"] in ("out_of_memory", "host_out_of_memory")


def reference_row(results: Results, world_size: int) -> Row | None:
    """The reference's finished row with the same number of processes."""
    rows = (row for row in results["rows"] if row["preset"] == results["reference"] and row["world_size"] == world_size)
    return next((row for row in rows if finished(row)), None)


def labels(results: Results) -> list[str]:
    """A short name for each row: its preset, with the process count or the trial where that is not enough."""
    rows = results["rows"]
    presets = Counter(row["preset"] for row in rows)
    sizes = Counter((row["preset"], row["world_size"]) for row in rows)
    return [
        row["preset"]
        if presets[row["preset"]] == 1
        else f"{row['preset']} n{row['world_size']}"
        if sizes[row["preset"], row["world_size"]] == 1
        else row["trial"]
        for row in rows
    ]


def one_line(text: str | None, limit: int | None = None) -> str:
    """Text without line breaks or control characters, shortened to `limit` characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text or "").split())
    return line if limit is None or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def many_lines(text: str) -> list[str]:
    """The lines of a text, without control characters or blank ends."""
    lines = ["".join(char if char.isprintable() else " " for char in line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


def reason(row: Row) -> str | None:
    """Why a row is not compared, in its own words (perhaps empty); None for one that needs no excuse."""
    if not finished(row):
        return row["message"] or ""
    return row["parity_message"] or "" if differs(row) else None
