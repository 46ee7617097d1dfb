"""The report of a comparison, from its results alone: JSON, CSV, Markdown, HTML, and the table for the console."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from toolkit.compare.result_charts import losses_chart, memory_chart, profiled_steps, scaling_chart, speed_chart
from toolkit.compare.result_tables import (
    parity_table,
    phases_table,
    probes_table,
    row_table,
    scaling_table,
    trials_table,
)
from toolkit.compare.results import RESULTS_FILE, InstalledGpu, Results
from toolkit.compare.rows import NOT_SUPPORTED, Failure, Row
from toolkit.compare.summary import notes, summary_sentence, title
from toolkit.record.columns import column_of
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Table, one_line, rich_table
from toolkit.units import NOT_AVAILABLE, gib, number, seconds

# https://owasp.org/www-community/attacks/CSV_Injection
FORMULA = ("=", "+", "-", "@")
CSV_COLUMNS = tuple(key for key in Row.model_fields if column_of(Row, key).in_csv)
# What only the ledger has: the parity check reads it.
ONLY_IN_LEDGER = {"step_non_padding_tokens", "step_supervised_tokens", "batch_sha256"}
# Two lines of a terminal: the complete message is in report.md.
MESSAGE_CHARACTERS = 180
NamesAndValues = list[tuple[str, str]]


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the files of a comparison, the data first. Raises ToolkitError for a folder that cannot be written."""
    made = {RESULTS_FILE: json_text, "results.csv": csv_text, "report.md": markdown_text, "report.html": html_text}
    return [write_report_file(folder / name, make(results)) for name, make in made.items()]


def json_text(results: Results) -> str:
    """Return `results.json` as it is written: indented, and strict JSON (an unknown is null, never NaN)."""
    content = results.model_dump(mode="json", exclude={"trials": {"__all__": ONLY_IN_LEDGER}})
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(results: Results) -> str:
    """Return `results.csv`; text that a spreadsheet would execute as a formula has an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in results.rows:
        values = [getattr(row, key) for key in CSV_COLUMNS]
        lines = [one_line(value) if isinstance(value, str) else value for value in values]
        writer.writerow([f"'{line}" if isinstance(line, str) and line.startswith(FORMULA) else line for line in lines])
    return text.getvalue()


def html_text(results: Results) -> str:
    """Return the complete page of a comparison."""
    return render(
        "report.html.j2",
        **_content(results),
        comparable=[row.comparable for row in results.rows],
        memory_chart=memory_chart(results),
        speed_chart=speed_chart(results),
        losses_chart=losses_chart(results),
        scaling_chart=scaling_chart(results),
        profiled_steps=profiled_steps(results),
        trials=trials_table(results),
    )


def markdown_text(results: Results) -> str:
    """Return a comparison as Markdown."""
    commands = "\n".join(f"# {one_line(label)}\n{row.command}" for label, row in results.labelled_rows)
    return render("report.md.j2", **_content(results), shell_commands=commands)


def console_table(results: Results) -> RichTable:
    """Return one line per row, in the order given; below them, why a row has no ratio."""
    table = rich_table(row_table("comparison", results, narrow=True))
    reasons = [
        one_line(
            f"{label}: {row.status_text}: {(row.parity_message if row.failed_parity else row.message) or 'no message'}",
            MESSAGE_CHARACTERS,
        )
        for label, row in results.labelled_rows
        if row.failed_parity or not row.completed
    ]
    table.caption, table.caption_justify = Text("\n".join(reasons), style=""), "left"
    return table


def _content(results: Results) -> dict[str, Any]:
    """What both kinds of report show."""
    rows = results.labelled_rows
    sections: dict[str, Table | None] = {
        "Memory of one rank": row_table("memory", results).without_unknown_columns(),
        "Memory by phase: the first step of the largest rank": phases_table(results),
        "Speed": row_table("speed", results).without_unknown_columns(),
        "Efficiency and cost": row_table("efficiency", results).without_unknown_columns(),
        "Communication, saving, start-up": row_table("overhead", results).without_unknown_columns(),
    }
    return {
        "results": results,
        "title": title(results),
        "summary": summary_sentence(results),
        "notes": notes(results),
        "comparison": row_table("comparison", results),
        "failures": [(label, row, failure_details(results, row)) for label, row in rows if not row.completed],
        "parity": parity_table(results),
        "parity_messages": [(label, row.parity_message) for label, row in rows if row.parity_message],
        "probes": probes_table(results),
        "sections": {name: table for name, table in sections.items() if table},
        "scaling": scaling_table(results),
        "method": _method(results),
        "job": _job(results),
        "environment": _environment(results),
    }


def failure_details(results: Results, row: Row) -> str:
    """Return what a failed row measured before it ended; nothing for one that cannot run on this node."""
    if row.status == NOT_SUPPORTED:
        return ""
    failure = row.failure or Failure(kind=row.status, measured_bytes=results.peak_bytes(row))
    parts = {
        f"world_size {row.world_size}": True,
        f"steps with a loss: {len(row.losses)}": True,
        f"in phase {failure.phase}": failure.phase,
        f"predicted peak {gib(failure.predicted_bytes)}": failure.predicted_bytes is not None,
        f"last measured peak {gib(failure.measured_bytes)}": failure.measured_bytes is not None,
        f"on rank {row.peak_rank}": row.peak_rank is not None,
        f"after {seconds(row.wall_seconds)}": row.wall_seconds is not None,
        f"folder {one_line(row.run_folder)}": True,
    }
    return ", ".join(part for part, is_known in parts.items() if is_known)


def _job(results: Results) -> NamesAndValues:
    job = results.job
    counts = {(row.num_params, row.num_trainable_params) for row in results.rows if row.completed}
    parameters = [f"{number(total, 0)} ({number(trainable, 0)})" for total, trainable in sorted(counts, key=str)]
    numbers = ("per_device_train_batch_size", "gradient_accumulation_steps", "compute_dtype", "seed", "untimed_steps")
    return [
        ("model", job.model),
        ("dataset", job.dataset),
        ("training arguments", shlex.join(job.training_arguments)),
        *((name, str(getattr(job, name))) for name in numbers),
        ("parameters (trainable)", ", ".join(parameters) or NOT_AVAILABLE),
    ]


def _environment(results: Results) -> NamesAndValues:
    """The node and its versions."""
    environment, disk = results.environment, results.environment.disk
    limits = [] if environment.memory_limit_bytes is None else [f"memory {gib(environment.memory_limit_bytes)}"]
    limits += [] if environment.cpu_limit is None else [f"{environment.cpu_limit:g} CPU cores"]
    gpus = Counter(_gpu(gpu) for gpu in environment.gpus)
    free = disk and f"{disk.filesystem or NOT_AVAILABLE}, {gib(disk.free_bytes)} free of {gib(disk.total_bytes)}"
    return [
        ("device", environment.device),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("CPU", f"{environment.cpu or NOT_AVAILABLE}, {environment.cpu_count or NOT_AVAILABLE} cores"),
        ("host memory", gib(environment.host_memory_bytes)),
        ("container limits", ", ".join(limits) or "none found"),
        ("disk", free or NOT_AVAILABLE),
        ("Python", environment.python),
        *sorted(environment.versions.items()),
        ("git commit", environment.git_commit or NOT_AVAILABLE),
        ("created", results.created),
    ]


def _method(results: Results) -> NamesAndValues:
    method, target = results.method, results.method.target_interval
    early = "all steps ran" if target is None else f"within {100 * target:g} % of the median (95 %), or all steps"
    return [
        ("repeats", f"{method.repeats}, in an order drawn with seed {method.order_seed}"),
        ("timed steps", early),
        ("intervals", method.interval),
        ("confidence of a ratio", f"{100 * method.ratio_confidence:.4g} %"),
        ("scaling", method.scaling or NOT_AVAILABLE),
    ]


def _gpu(gpu: InstalledGpu) -> str:
    """`NVIDIA H100 (79.65 GiB; driver 570.86.15; power limit 700 W; clocks up to 1980 and 2619 MHz)`."""
    parts = [gib(gpu.memory_bytes)] + ([f"driver {gpu.driver}"] if gpu.driver else [])
    if gpu.power_limit_watts is not None:
        parts.append(f"power limit {gpu.power_limit_watts:g} W")
    if gpu.max_sm_clock_mhz is not None and gpu.max_memory_clock_mhz is not None:
        parts.append(f"clocks up to {gpu.max_sm_clock_mhz} (SM) and {gpu.max_memory_clock_mhz} MHz (memory)")
    return f"{gpu.name} ({'; '.join(parts)})"
