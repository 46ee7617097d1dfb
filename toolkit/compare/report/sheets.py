"""The report's tables as plain text cells, one function a table.

>>> [cell.text for cell in comparison_sheet(results).rows[0]][:3]      # doctest: +SKIP
['ddp', 'completed', '410']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

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
from toolkit.compare.results import Results, Row
from toolkit.units import NOT_AVAILABLE

SHORT_NAME = 6


def comparison_sheet(results: Results, *, narrow: bool = False) -> Sheet:
    """The table that everyone reads first; a row that did not finish has no figures in it.

    Intervals, MFU and cost have columns where a row has them and there is room.
    """
    unit = results_unit(results)
    peak = "RSS" if facts.on_cpu(results) else "alloc."
    more = [] if narrow else [column for column in _OPTIONAL if column.known(results)]
    return row_sheet(
        (
            "tokens\n/s",
            *(column.header for column in more),
            "step\ns",
            *_part_headers(unit),
            f"peak\n{peak}\n{unit.name}",
            "last\nloss",
            f"ratio\nto {_short(results['reference'])}",
        ),
        results,
        lambda row: (
            measured(row["tokens_per_second"], speed),
            *(column.cell(row) for column in more),
            number_cell(row["step_seconds_median"], 3),
            *_part_cells(row, unit),
            unit.cell(facts.peak_bytes(results, row)),
            number_cell(row["last_loss"], 4),
            number_cell(row["ratio_to_reference"], 2),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Optional:
    """A column that is there only where a row has the figure."""

    header: str
    key: str
    cell: Callable[[Row], Cell]

    def known(self, results: Results) -> bool:
        return any(cast(Mapping[str, object], row)[self.key] is not None for row in results["rows"])


def interval_cell(bounds: Sequence[float] | None, show: Callable[[float], str]) -> Cell:
    """`low to high`, sorted by the low end."""
    return (
        Cell(text=NOT_AVAILABLE)
        if bounds is None
        else Cell(text=f"{show(bounds[0])}–{show(bounds[1])}", value=bounds[0])
    )


_OPTIONAL = (
    _Optional(
        header="micro-\nbatch",
        key="probes",
        cell=lambda row: number_cell(row["per_device_train_batch_size"], 0),
    ),
    _Optional(
        header="95 %\ninterval",
        key="tokens_per_second_interval",
        cell=lambda row: interval_cell(row["tokens_per_second_interval"], speed),
    ),
    _Optional(header="MFU", key="mfu", cell=lambda row: measured(row["mfu"], tenths)),
    _Optional(
        header="cost per\n10⁶ tokens",
        key="cost_per_million_tokens",
        cell=lambda row: measured(row["cost_per_million_tokens"], price),
    ),
)


def memory_sheet(results: Results) -> Sheet | None:
    """Where the bytes of one rank go, beside the reference's; None where no row knows any."""
    unit = results_unit(results)
    names = ("peak\nplanned", "peak\nallocated", "peak\nreserved", "peak\ndriver", "peak\nRSS")
    peaks = [f"{name}\n{unit.name}" for name in names]
    sheet = row_sheet(
        (*_part_headers(unit), f"model\nstates\n{unit.name}", "of\nref.", *peaks, "on\nrank", "re-\ntries"),
        results,
        lambda row: (
            *_part_cells(row, unit),
            unit.cell(facts.model_state_bytes(row)),
            measured(_share_of_reference(results, row), percent),
            unit.cell(row["planned_peak_bytes"]),
            unit.cell(row["peak_allocated_bytes"]),
            unit.cell(row["peak_reserved_bytes"]),
            unit.cell(row["peak_driver_bytes"]),
            unit.cell(row["peak_host_bytes"]),
            number_cell(row["peak_rank"], 0),
            number_cell(row["allocator_retries"], 0),
        ),
    )
    return known_columns(sheet)


def speed_sheet(results: Results) -> Sheet | None:
    """How fast, counted in every way that the trials measured; None where no row finished."""
    sheet = row_sheet(
        (
            "tokens/s\na process" if facts.on_cpu(results) else "tokens/s\na GPU",
            "non-padding\ntokens/s",
            "supervised\ntokens/s",
            "tokens per\nCPU-second",
            "padding",
            "step\nmedian s",
            "step\np90 s",
            "timed\nsteps",
            "timed\ns",
        ),
        results,
        lambda row: (
            measured(row["tokens_per_second_per_gpu"], speed),
            measured(row["non_padding_tokens_per_second"], speed),
            measured(row["supervised_tokens_per_second"], speed),
            measured(row["tokens_per_cpu_second"], speed),
            measured(row["padding_fraction"], percent),
            number_cell(row["step_seconds_median"], 3),
            number_cell(row["step_seconds_p90"], 3),
            number_cell(row["timed_steps"], 0),
            number_cell(row["timed_seconds"], 1),
        ),
    )
    return known_columns(sheet)


def parity_sheet(results: Results) -> Sheet:
    """First and last loss beside the reference's; a row that failed earlier has no last difference."""
    columns = ("parity", "first loss", "difference", "last loss", "difference")
    rows = zip(facts.labels(results), results["rows"], strict=True)
    return Sheet(
        columns=(text_column("preset"), *(Column(header=name, numeric=name != "parity") for name in columns)),
        rows=tuple((text_cell(label), *_parity_cells(results, row)) for label, row in rows),
    )


def results_unit(results: Results) -> ByteUnit:
    """The unit of every table and plot of one report."""
    rows = results["rows"]
    parts = [facts.part_bytes(row, part) for row in rows for part in facts.PART_KEYS]
    return byte_unit([*parts, *(facts.peak_bytes(results, row) for row in rows)])


def row_sheet(headers: tuple[str, ...], results: Results, figures: Callable[[Row], tuple[Cell, ...]]) -> Sheet:
    """Preset and status, then the figures of each row that finished."""
    blank = tuple(Cell(text=NOT_AVAILABLE) for _ in headers)
    rows = zip(facts.labels(results), results["rows"], strict=True)
    return Sheet(
        columns=(text_column("preset"), text_column("status"), *(Column(header=header) for header in headers)),
        rows=tuple(
            (text_cell(label), text_cell(facts.status_text(row)), *(figures(row) if facts.finished(row) else blank))
            for label, row in rows
        ),
    )


def _short(reference: str) -> str:
    """A heading must not be wider than its figures by much."""
    return reference if len(reference) <= SHORT_NAME else "ref."


def _part_headers(unit: ByteUnit) -> list[str]:
    return [f"{part}\n{unit.name}" for part in ("param.", "grad.", "optim.")]


def _part_cells(row: Row, unit: ByteUnit) -> list[Cell]:
    return [unit.cell(size) for size in (row["parameter_bytes"], row["gradient_bytes"], row["optimizer_bytes"])]


def _parity_cells(results: Results, row: Row) -> tuple[Cell, ...]:
    reference = facts.reference_row(results, row["world_size"])
    first, last = (reference["first_loss"], reference["last_loss"]) if reference else (None, None)
    return (
        text_cell(row["parity"] or NOT_AVAILABLE),
        number_cell(row["first_loss"], 6),
        _difference(row["first_loss"], first),
        number_cell(row["last_loss"], 6),
        _difference(row["last_loss"], last if facts.finished(row) else None),
    )


def _difference(loss: float | None, reference: float | None) -> Cell:
    """Relative to the reference, signed; an exact 0 is said as such."""
    if loss is None or not reference:
        return Cell(text=NOT_AVAILABLE)
    relative = (loss - reference) / abs(reference)
    return Cell(text=f"{relative:+.1e}" if relative else "0", value=relative)


def _share_of_reference(results: Results, row: Row) -> float | None:
    reference = facts.reference_row(results, row["world_size"])
    whole = facts.model_state_bytes(reference) if reference else None
    held = facts.model_state_bytes(row)
    return None if held is None or not whole else held / whole
