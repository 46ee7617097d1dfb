"""The memory ladder of a run, reduced from its ranks' first rows.

>>> highest([{"bytes_of": "rss", "load": 1, "forward": 5}, {"bytes_of": "rss", "load": 3, "forward": 4}])["load"]
3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

RUNGS = ("load", "forward", "backward", "step")


def highest(ladders: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Each rung's maximum over ranks, and what was counted; None where no rank has one."""
    known = [ladder for ladder in ladders if ladder]
    if not known:
        return None
    rungs = {rung: [size for ladder in known if (size := ladder.get(rung)) is not None] for rung in RUNGS}
    return {"bytes_of": known[0]["bytes_of"], **{rung: max(sizes, default=None) for rung, sizes in rungs.items()}}
