"""What a search for the largest micro-batch has tried, from the ledger, and where such a search starts and ends.

>>> probes_among({"zero2-n2-b4": {"status": "completed"}, "zero2-n2-r0": {}}, "zero2-n2")
{4: {'status': 'completed'}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.compare.ledger import Ledger
from toolkit.compare.planned import planned_bytes
from toolkit.compare.trials import Comparison, row_name
from toolkit.launch.preflight import check_dataset
from toolkit.models.shape import ModelShape
from toolkit.runs import status
from toolkit.runs.argv import DEFAULT_BATCH, flag, integer

Row = dict[str, Any]
Probes = Mapping[int, Row]
"""Micro-batch to the row of its probe."""
BATCH = "per_device_train_batch_size"
# Optimizer states are there after the first step; the second holds everything.
PROBE_STEPS = 2


def probes_among(finished: Mapping[str, Row], name: str) -> dict[int, Row]:
    """Micro-batch to the probe of it among the ledger's rows, by size; `name` is the row's."""
    prefix = f"{name}-b"
    found = {int(key.removeprefix(prefix)): row for key, row in finished.items() if key.startswith(prefix)}
    return dict(sorted(found.items()))


def completed(found: Probes) -> list[int]:
    """The sizes that ran."""
    return [size for size, row in found.items() if row["status"] == status.COMPLETED]


def with_largest_batches(comparison: Comparison, ledger: Ledger) -> Comparison:
    """Each row at the largest micro-batch that a probe in the ledger ran, or at the smallest that none did."""
    if comparison.find_max_batch is None:
        return comparison
    batches, finished = dict(comparison.batches), ledger.read()
    for name in (row_name(*row) for row in comparison.rows()):
        if found := probes_among(finished, name):
            batches[name] = {BATCH: max(completed(found), default=min(found))}
    return replace(comparison, batches=batches)


def bounds(comparison: Comparison, preset: str, num_processes: int) -> tuple[int, int]:
    """Where a row's search starts and ends: the job's own micro-batch, and what is asked for or the data can fill."""
    arguments = comparison.arguments(preset, num_processes)
    cap = comparison.find_max_batch or 1
    rows = check_dataset(str(arguments["dataset"]))
    if rows is not None:
        a_step = num_processes * integer(arguments, "gradient_accumulation_steps", 1)
        cap = max(1, min(cap, rows // a_step))
    return min(integer(arguments, BATCH, DEFAULT_BATCH), cap), cap


def most_probes(*, start: int, cap: int) -> int:
    """Sizes that the longest search tries: each doubling may be the one that fails, and is then halved."""
    low, size, tried, most = 0, min(start, cap), 0, 0
    while True:
        tried += 1
        most = max(most, tried + (size - low - 1).bit_length())
        if size == cap:
            return most
        low, size = size, min(2 * size, cap)


def probe_words(arguments: Mapping[str, Any], size: int) -> list[str]:
    """Training arguments of a probe. It begins with the longest rows: a trial meets none that pads a batch further."""
    words = [f"--{BATCH}", str(size), "--max_steps", str(PROBE_STEPS)]
    as_they_come = any(flag(arguments.get(name, False)) for name in ("streaming", "packing"))
    return words if as_they_come else [*words, "--train_sampling_strategy", "group_by_length"]


def batch_facts(
    comparison: Comparison, preset: str, num_processes: int, finished: Mapping[str, Row], *, shape: ModelShape | None
) -> Row:
    """A row's micro-batch, and the sizes that a search tried, each failure with what was predicted for it."""
    size = integer(comparison.arguments(preset, num_processes), BATCH, DEFAULT_BATCH)
    if comparison.find_max_batch is None:
        return {BATCH: size, "probes": None}
    name, tried = row_name(preset, num_processes), []
    for probed, probe in probes_among(finished, name).items():
        failure = probe["failure"]
        if failure is not None:
            at = replace(comparison, batches={name: {BATCH: probed}})
            planned = planned_bytes(at, preset, num_processes, shape=shape)
            failure = failure | {"predicted_bytes": planned["planned_peak_bytes"]}
        tried.append({BATCH: probed, "status": probe["status"], "message": probe["message"], "failure": failure})
    return {BATCH: size, "probes": tried}
