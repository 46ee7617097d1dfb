"""The report of a comparison, from its results alone: JSON, CSV, Markdown, HTML, and the table for the console."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.compare.job_details import (
    environment_details,
    failure_details,
    job_details,
    method_details,
    probes_note,
    replay_command,
)
from toolkit.compare.result_charts import losses_chart, memory_chart, scaling_chart, speed_chart, timeline_charts
from toolkit.compare.result_tables import (
    parity_table,
    phases_table,
    probes_table,
    row_table,
    scaling_table,
    trials_table,
)
from toolkit.compare.results import RESULTS_FILE, Results
from toolkit.compare.rows import Row
from toolkit.compare.summary import notes, summary_sentence, title
from toolkit.record.columns import column_of
from toolkit.report.rendering import render, write_report_file
from toolkit.report.tables import Table, one_line, rich_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# https://owasp.org/www-community/attacks/CSV_Injection
FORMULA = ("=", "+", "-", "@")
CSV_COLUMNS = tuple(key for key in Row.model_fields if column_of(Row, key).in_csv)
# What only the ledger has: the parity check reads it.
ONLY_IN_LEDGER = {"step_non_padding_tokens", "step_supervised_tokens", "batch_sha256"}
# Two lines of a terminal: the complete message is in report.md.
MESSAGE_CHARACTERS = 180


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the files of a comparison and return their paths, the data first.

    Raises ToolkitError for a folder that cannot be written.
    """
    made = {RESULTS_FILE: json_text, "results.csv": csv_text, "report.md": markdown_text, "report.html": html_text}
    return [write_report_file(folder / name, make(results)) for name, make in made.items()]


def json_text(results: Results) -> str:
    """Return `results.json` as it is written: indented, and strict JSON (an unknown is null, never NaN)."""
    content = results.model_dump(mode="json", exclude={"trials": {"__all__": ONLY_IN_LEDGER}})
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(results: Results) -> str:
    """Return `results.csv`: a header, then one line per row; unknowns are empty, messages are one line.

    A spreadsheet would execute text that begins like a formula: it has an apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in results.rows:
        values = (getattr(row, key) for key in CSV_COLUMNS)
        writer.writerow([_csv_text(value) if isinstance(value, str) else value for value in values])
    return text.getvalue()


def _csv_text(value: str) -> str:
    line = one_line(value)
    return f"'{line}" if line.startswith(FORMULA) else line


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
        timeline_charts=timeline_charts(results),
        trials=trials_table(results),
        probes_note=probes_note(results),
        commands=[(label, row, replay_command(row)) for label, row in results.labelled_rows],
    )


def markdown_text(results: Results) -> str:
    """Return a comparison as Markdown."""
    commands = (f"# {one_line(label)}\n{replay_command(row)}\n{row.command}" for label, row in results.labelled_rows)
    return render("report.md.j2", **_content(results), shell_commands="\n".join(commands))


def console_table(results: Results) -> RichTable:
    """Return one line per row, in the order given; below them, why a row has no ratio."""
    from rich.text import Text

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
        "method": method_details(results),
        "job": job_details(results),
        "environment": environment_details(results),
    }
