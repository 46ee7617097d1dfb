"""Write a comparison as CSV: one line a row, the scalar keys of results.json, unknowns empty.

>>> csv_text(results).splitlines()[0][:19]               # doctest: +SKIP
'trial,preset,world_'
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import cast

from toolkit.compare.report import facts
from toolkit.compare.results import Results, Row

NOT_SCALAR = (
    *("losses", "step_seconds", "grad_norms", "failure", "memory_ladder", "throttle_reasons", "flops_per_token"),
    *("timeline", "probes"),
)
COLUMNS = tuple(key for key in Row.__annotations__ if key not in NOT_SCALAR and not key.endswith("_interval"))
"""Stable: a new key of `Row` goes to the end of what was there, or this order changes for a reader."""


def csv_text(results: Results) -> str:
    """A header, then a line for each row in the order given."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in facts.honest(results)["rows"]:
        values = cast(Mapping[str, object], row)
        writer.writerow([_scalar(values[key]) for key in COLUMNS])
    return text.getvalue()


def _scalar(value: object) -> object:
    """A message with line breaks would not be one line a row."""
    return facts.one_line(value) if isinstance(value, str) else value
