"""What the ledger knows of a row from the runs beside its trials: a profile's shares, a checkpoint's size and time.

>>> extras_of({}, "zero2-n2")["save_bytes"] is None
True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.runs import status

Row = dict[str, Any]
# Kind of such a run, and the keys of a row that it gives.
KINDS = {
    "profile": ("communication_fraction", "exposed_communication_fraction", "timeline"),
    "save": ("save_seconds", "save_bytes"),
}


def extras_of(finished: Mapping[str, Row], name: str) -> Row:
    """What the ledger knows of a row from such runs; None for what nobody asked for."""
    found: Row = {}
    for kind, keys in KINDS.items():
        rows = [row for row in of_kind(finished, name, kind) if row["status"] == status.COMPLETED]
        found |= {key: rows[-1][key] if rows else None for key in keys}
    return found


def of_kind(finished: Mapping[str, Row], name: str, kind: str) -> list[Row]:
    """A row's runs of one kind, in the order in which they ended."""
    return [row for row in finished.values() if kind in row.get("kinds", ()) and row["trial"].startswith(f"{name}-")]
