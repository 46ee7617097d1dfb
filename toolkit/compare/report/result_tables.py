"""The tables of a report. A table lists its columns; their headings and formats are those that `rows.py` declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.compare.columns import GIB_UNIT, ByteUnit, Display, Format, TableName, byte_unit, column_of, percent
from toolkit.compare.report.table_model import (
    UNKNOWN,
    Cell,
    Heading,
    Table,
    number_cell,
    one_line,
    text_cell,
    text_heading,
)
from toolkit.compare.result_values import MemoryByPhase, Probe
from toolkit.compare.results import Results
from toolkit.compare.rows import Row
from toolkit.compare.trial_figures import TrialResult
from toolkit.units import NOT_AVAILABLE

# A longer name would make the heading of the ratio wider than its figures.
LONGEST_SHORT_NAME = 6
PHASES = ("load", "forward", "backward", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """A column that is computed when the table is made."""

    display: Display
    value: Callable[[Results, Row], float | None]


MODEL_STATES = Derived(display=Display(heading="model\nstates\n{unit}"), value=lambda _, row: row.model_state_bytes)
FRACTION_OF_BASELINE = Derived(
    display=Display(heading="of\nbaseline", format=percent),
    value=lambda results, row: _fraction_of_baseline(results, row),
)
PEAK = "peak"
"""Stands for `peak_host_bytes` on a CPU, for `peak_allocated_bytes` on GPUs."""

COLUMNS: dict[TableName, tuple[str | Derived, ...]] = {
    "comparison": (
        "tokens_per_second",
        "layout",
        "per_device_train_batch_size",
        "tokens_per_second_interval",
        "mfu",
        "cost_per_million_tokens",
        "step_seconds_median",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        PEAK,
        "last_loss",
        "ratio_to_reference",
    ),
    "memory": (
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        MODEL_STATES,
        FRACTION_OF_BASELINE,
        "planned_peak_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_driver_bytes",
        "peak_host_bytes",
        "peak_rank",
        "allocator_retries",
    ),
    "speed": (
        "tokens_per_second_per_gpu",
        "non_padding_tokens_per_second",
        "supervised_tokens_per_second",
        "tokens_per_cpu_second",
        "padding_fraction",
        "step_seconds_median",
        "step_seconds_p90",
        "timed_steps",
        "timed_seconds",
    ),
    "efficiency": (
        "ratio_to_reference",
        "ratio_interval",
        "rank",
        "mfu",
        "mfu_full_attention",
        "hfu",
        "cost_per_million_tokens",
        "energy_joules",
        "rank_skew",
    ),
    "overhead": (
        "communication_fraction",
        "exposed_communication_fraction",
        "save_seconds",
        "save_bytes",
        "startup_seconds",
        "wall_seconds",
        "goodput_fraction",
    ),
    "scaling": ("world_size", "num_nodes", "tokens_per_second", "speed_up", "scaling_efficiency"),
    "trials": ("tokens_per_second", "step_seconds_median", "timed_steps", "startup_seconds", "wall_seconds"),
}


def results_unit(results: Results) -> ByteUnit:
    """Return the unit of every table and plot of one report."""
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return byte_unit(
        size for row in results.rows for size in (*(getattr(row, part) for part in parts), results.peak_bytes(row))
    )


def comparison_table(results: Results, *, narrow: bool = False) -> Table:
    """Return the table to read first. A row that did not complete has no figures in it."""
    return _row_table("comparison", results, narrow=narrow)


def memory_table(results: Results) -> Table | None:
    """Return where the bytes of one rank go; None where no row knows any."""
    return _row_table("memory", results).without_unknown_columns()


def speed_table(results: Results) -> Table | None:
    """Return the speed by each way of counting; None where no row completed."""
    return _row_table("speed", results).without_unknown_columns()


def efficiency_table(results: Results) -> Table | None:
    """Return the speed relative to the baseline, the GPU's peak and the price; None where nothing is known."""
    return _row_table("efficiency", results).without_unknown_columns()


def overhead_table(results: Results) -> Table | None:
    """Return communication, saving and start-up; None where nothing is known."""
    return _row_table("overhead", results).without_unknown_columns()


def scaling_table(results: Results) -> Table | None:
    """Return the speed-up of each preset by number of processes; None with a single number of processes."""
    if not any(row.scaling_efficiency is not None and row.speed_up != 1 for row in results.rows):
        return None
    return _row_table("scaling", results)


def trials_table(results: Results) -> Table | None:
    """Return every trial in the order in which they ran; None where there is none."""
    displays = [(key, column_of(TrialResult, str(key)).display_for("trials")) for key in COLUMNS["trials"]]
    headings = [Heading(text=display.heading) for _, display in displays]
    if not results.trials:
        return None
    return Table(
        headings=(text_heading("trial"), text_heading("status"), *headings),
        rows=tuple(
            (
                text_cell(trial.trial),
                text_cell(trial.status),
                *(format_cell(getattr(trial, str(key)), display, GIB_UNIT) for key, display in displays),
            )
            for trial in results.trials
        ),
    )


def parity_table(results: Results) -> Table:
    """Return first and last loss beside the baseline's; a row that failed earlier has no last difference."""
    columns = ("parity", "first loss", "difference", "last loss", "difference")
    return Table(
        headings=(text_heading("preset"), *(Heading(text=name, numeric=name != "parity") for name in columns)),
        rows=tuple((text_cell(label), *_parity_cells(results, row)) for label, row in results.labelled_rows),
    )


def phases_table(results: Results) -> Table | None:
    """Return memory by phase of the first step, of failed rows too; None where no row has any."""
    known = [row.memory_by_phase for row in results.rows if row.memory_by_phase]
    if not known:
        return None
    unit = byte_unit(getattr(memory, phase) for memory in known for phase in PHASES)
    names = ("after loading", "after forward", "after backward", "after step")
    headings = (text_heading("preset"), text_heading("status"), *(Heading(text=f"{n}\n{unit.name}") for n in names))
    return Table(
        headings=(*headings, text_heading("bytes of")),
        rows=tuple(
            (text_cell(label), text_cell(row.status_text), *_phase_cells(row.memory_by_phase, unit))
            for label, row in results.labelled_rows
        ),
    )


def probes_table(results: Results) -> Table | None:
    """Return what the search for each row's largest micro-batch tried; None where there was no search."""
    searched = [(label, row.probes) for label, row in results.labelled_rows if row.probes]
    if not searched:
        return None
    return Table(
        headings=(
            text_heading("preset"),
            Heading(text="largest\nthat runs"),
            Heading(text="tried"),
            Heading(text="smallest\nthat does not"),
            text_heading("status"),
            text_heading("in phase"),
            Heading(text="predicted\npeak GiB"),
            Heading(text="last measured\npeak GiB"),
        ),
        rows=tuple((text_cell(label), *_probe_cells(probes)) for label, probes in searched),
    )


def format_cell(value: object, display: Display, unit: ByteUnit) -> Cell:
    """Return a value as its column shows it; an interval is sorted by its low end."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return text_cell(value)
    by = value[0] if isinstance(value, tuple) else value
    assert isinstance(by, (int, float))
    show: Format = display.format or unit.text
    return Cell(text=show(value), value=by)


def bytes_cell(size: int | None, unit: ByteUnit) -> Cell:
    """Return a size in a table's unit."""
    return Cell(text=unit.text(size), value=size)


def _row_table(name: TableName, results: Results, *, narrow: bool = False) -> Table:
    """Preset and status, then the figures of each row that completed."""
    unit, columns = results_unit(results), _columns(name, results, narrow=narrow)
    headings = [Heading(text=_heading(display, results, unit)) for display, _ in columns]
    blank = tuple(UNKNOWN for _ in columns)
    return Table(
        headings=(text_heading("preset"), text_heading("status"), *headings),
        rows=tuple(
            (
                text_cell(label),
                text_cell(row.status_text),
                *(
                    (format_cell(value(results, row), display, unit) for display, value in columns)
                    if row.completed
                    else blank
                ),
            )
            for label, row in results.labelled_rows
        ),
    )


Values = Callable[[Results, Row], object]


def _columns(name: TableName, results: Results, *, narrow: bool) -> list[tuple[Display, Values]]:
    """Display and value of each column that the table has for these results."""
    found: list[tuple[Display, Values]] = []
    for column in COLUMNS[name]:
        if isinstance(column, Derived):
            found.append((column.display, column.value))
            continue
        key = ("peak_host_bytes" if results.on_cpu else "peak_allocated_bytes") if column == PEAK else column
        display = column_of(Row, key).display_for(name)
        known = display.only_if_known
        if name != "comparison" or known is None or (not narrow and _any_known(results, known)):
            found.append((display, _value_of(key)))
    return found


def _any_known(results: Results, key: str) -> bool:
    return any(getattr(row, key) is not None for row in results.rows)


def _value_of(key: str) -> Values:
    return lambda _, row: getattr(row, key)


def _heading(display: Display, results: Results, unit: ByteUnit) -> str:
    baseline = one_line(results.reference)
    return (
        display.heading.replace("{unit}", unit.name)
        .replace("{baseline}", baseline)
        .replace("{short_baseline}", baseline if len(baseline) <= LONGEST_SHORT_NAME else "base.")
        .replace("{process}", "process" if results.on_cpu else "GPU")
    )


def _fraction_of_baseline(results: Results, row: Row) -> float | None:
    baseline = results.baseline(row.world_size)
    of_baseline = baseline.model_state_bytes if baseline else None
    return None if row.model_state_bytes is None or not of_baseline else row.model_state_bytes / of_baseline


def _parity_cells(results: Results, row: Row) -> tuple[Cell, ...]:
    baseline = results.baseline(row.world_size)
    first, last = (baseline.first_loss, baseline.last_loss) if baseline else (None, None)
    return (
        text_cell(row.parity or NOT_AVAILABLE),
        number_cell(row.first_loss, 6),
        _difference(row.first_loss, first),
        number_cell(row.last_loss, 6),
        _difference(row.last_loss, last if row.completed else None),
    )


def _difference(loss: float | None, baseline: float | None) -> Cell:
    """Relative to the baseline, signed; an exact 0 is written as such."""
    if loss is None or not baseline:
        return UNKNOWN
    relative = (loss - baseline) / abs(baseline)
    return Cell(text=f"{relative:+.1e}" if relative else "0", value=relative)


def _phase_cells(memory: MemoryByPhase | None, unit: ByteUnit) -> tuple[Cell, ...]:
    if memory is None:
        return (UNKNOWN,) * (len(PHASES) + 1)
    return (*(bytes_cell(getattr(memory, phase), unit) for phase in PHASES), text_cell(memory.bytes_of))


def _probe_cells(probes: Sequence[Probe]) -> tuple[Cell, ...]:
    """Sizes, and the failure of the smallest size that does not run."""
    sizes = sorted(probe.per_device_train_batch_size for probe in probes)
    ran = [probe.per_device_train_batch_size for probe in probes if probe.status == "completed"]
    cells = (number_cell(max(ran, default=None), 0), text_cell(", ".join(map(str, sizes))))
    failed = min((p for p in probes if p.failure), key=lambda p: p.per_device_train_batch_size, default=None)
    if failed is None or failed.failure is None:
        return (*cells, Cell(text="none"), *(Cell(text="") for _ in range(4)))
    return (
        *cells,
        number_cell(failed.per_device_train_batch_size, 0),
        text_cell(failed.status),
        text_cell(failed.failure.phase or NOT_AVAILABLE),
        bytes_cell(failed.failure.predicted_bytes, GIB_UNIT),
        bytes_cell(failed.failure.measured_bytes, GIB_UNIT),
    )
