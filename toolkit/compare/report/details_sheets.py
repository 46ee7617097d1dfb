"""The tables further down: efficiency, what stands beside the steps, the memory ladder, scaling, every trial.

>>> [cell.text for cell in trials_sheet(results).rows[0]][:2]          # doctest: +SKIP
['zero2-n2-r0', 'completed']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toolkit.compare.report import facts
from toolkit.compare.report.cells import (
    ByteUnit,
    Cell,
    Column,
    Sheet,
    byte_unit,
    known_columns,
    measured,
    number_cell,
    percent,
    price,
    speed,
    tenths,
    text_cell,
    text_column,
)
from toolkit.compare.report.sheets import interval_cell, row_sheet
from toolkit.compare.results import Probe, Results, Row
from toolkit.units import GIB, NOT_AVAILABLE, number

BATCH: Final = "per_device_train_batch_size"


def efficiency_sheet(results: Results) -> Sheet | None:
    """What the speed is worth: beside the reference, the peak and the price; None where nothing of it is known."""
    sheet = row_sheet(
        (
            f"ratio to\n{results['reference']}",
            "its\ninterval",
            "place\nby speed",
            *("MFU", "MFU, full\nattention", "HFU"),
            "cost per\n10⁶ tokens",
            "energy\nkJ",
            "rank\nskew",
        ),
        results,
        lambda row: (
            number_cell(row["ratio_to_reference"], 3),
            interval_cell(row["ratio_interval"], lambda bound: number(bound, 3 if bound < 100 else 0)),
            number_cell(row["rank"], 0),
            *(measured(share, tenths) for share in (row["mfu"], row["mfu_full_attention"], row["hfu"])),
            measured(row["cost_per_million_tokens"], price),
            measured(row["energy_joules"], lambda joules: number(None if joules is None else joules / 1000, 1)),
            number_cell(row["rank_skew"], 2),
        ),
    )
    return known_columns(sheet)


def beside_sheet(results: Results) -> Sheet | None:
    """What stands beside the steps: communication, saving, starting; None where nothing of it is known."""
    sheet = row_sheet(
        ("communication", "of it exposed", "save s", "checkpoint GiB", "start-up s", "wall s"),
        results,
        lambda row: (
            measured(row["communication_fraction"], percent),
            measured(row["exposed_communication_fraction"], percent),
            number_cell(row["save_seconds"], 1),
            ByteUnit(name="GiB", num_bytes=GIB).cell(row["save_bytes"]),
            number_cell(row["startup_seconds"], 1),
            number_cell(row["wall_seconds"], 1),
        ),
    )
    return known_columns(sheet)


def ladder_sheet(results: Results) -> Sheet | None:
    """Bytes after each stage of the first step, for rows that failed too; None where no row has any."""
    ladders = [row["memory_ladder"] for row in results["rows"]]
    if not any(ladders):
        return None
    unit = byte_unit(ladder[rung] for ladder in ladders if ladder for rung in ("load", "forward", "backward", "step"))
    names = ("after loading", "after forward", "after backward", "after step")
    columns = (text_column("preset"), text_column("status"), *(Column(header=f"{name}\n{unit.name}") for name in names))
    rows = zip(facts.labels(results), results["rows"], strict=True)
    return Sheet(
        columns=(*columns, text_column("bytes of")),
        rows=tuple((text_cell(label), text_cell(facts.status_text(row)), *_rungs(row, unit)) for label, row in rows),
    )


def _rungs(row: Row, unit: ByteUnit) -> tuple[Cell, ...]:
    ladder = row["memory_ladder"]
    if ladder is None:
        return tuple(Cell(text=NOT_AVAILABLE) for _ in range(5))
    sizes = (ladder["load"], ladder["forward"], ladder["backward"], ladder["step"])
    return (*(unit.cell(size) for size in sizes), text_cell(ladder["bytes_of"]))


def scaling_sheet(results: Results) -> Sheet | None:
    """Speed-up of each preset by number of processes; None where there is one number of processes."""
    if not any(row["scaling_efficiency"] is not None and row["speed_up"] != 1 for row in results["rows"]):
        return None
    return row_sheet(
        ("processes", "tokens/s", "speed-up", "of ideal"),
        results,
        lambda row: (
            number_cell(row["world_size"], 0),
            measured(row["tokens_per_second"], speed),
            number_cell(row["speed_up"], 2),
            measured(row["scaling_efficiency"], percent),
        ),
    )


def probes_sheet(results: Results) -> Sheet | None:
    """What the search for each row's largest micro-batch tried, and where it ended; None where there was no search."""
    rows = zip(facts.labels(results), results["rows"], strict=True)
    searched = [(label, row["probes"]) for label, row in rows if row["probes"]]
    if not searched:
        return None
    return Sheet(
        columns=(
            text_column("preset"),
            Column(header="largest\nthat runs"),
            Column(header="tried"),
            Column(header="smallest\nthat does not"),
            text_column("status"),
            text_column("in phase"),
            Column(header="predicted\npeak GiB"),
            Column(header="last measured\npeak GiB"),
        ),
        rows=tuple((text_cell(label), *_probe_cells(probes)) for label, probes in searched),
    )


def _probe_cells(probes: Sequence[Probe]) -> tuple[Cell, ...]:
    """Sizes, and the failure of the smallest size that does not run."""
    ran = [probe[BATCH] for probe in probes if probe["status"] == "completed"]
    tried = sorted(probe[BATCH] for probe in probes)
    failed = min((probe for probe in probes if probe["failure"]), key=lambda probe: probe[BATCH], default=None)
    sizes = (number_cell(max(ran, default=None), 0), text_cell(", ".join(map(str, tried))))
    if failed is None or failed["failure"] is None:
        none = Cell(text="none")
        return (*sizes, none, *(text_cell("") for _ in range(4)))
    failure, unit = failed["failure"], ByteUnit(name="GiB", num_bytes=GIB)
    return (
        *sizes,
        number_cell(failed[BATCH], 0),
        text_cell(failed["status"]),
        text_cell(failure["phase"] or NOT_AVAILABLE),
        unit.cell(failure["predicted_bytes"]),
        unit.cell(failure["measured_bytes"]),
    )


def trials_sheet(results: Results) -> Sheet:
    """Every run that a row stands on, in the order in which they ran."""
    headers = ("tokens/s", "step median s", "timed steps", "start-up s", "wall s")
    return Sheet(
        columns=(text_column("trial"), text_column("status"), *(Column(header=header) for header in headers)),
        rows=tuple(
            (
                text_cell(trial["trial"]),
                text_cell(trial["status"]),
                measured(trial["tokens_per_second"], speed),
                number_cell(trial["step_seconds_median"], 3),
                number_cell(trial["timed_steps"], 0),
                number_cell(trial["startup_seconds"], 1),
                number_cell(trial["wall_seconds"], 1),
            )
            for trial in results["trials"]
        ),
    )
