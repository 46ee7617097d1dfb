"""Write a report's files into a folder, each completely or not at all."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

from toolkit.compare.columns import columns_of
from toolkit.compare.report.png_plot import plot_png
from toolkit.compare.report.rendering import PLOT_FILE, html_text, markdown_text
from toolkit.compare.report.table_model import one_line
from toolkit.compare.results import RESULTS_FILE, Results
from toolkit.compare.rows import Row
from toolkit.errors import ToolkitError
from toolkit.files.atomic_write import write_bytes

# https://owasp.org/www-community/attacks/CSV_Injection
FORMULA = ("=", "+", "-", "@")
CSV_COLUMNS = tuple(key for key, column in columns_of(Row).items() if column.in_csv)
"""In the order of the declarations; readers rely on it, so new keys go to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """Paths of a report's files, in the order in which they are written."""

    results_json: Path
    results_csv: Path
    markdown: Path
    html: Path
    plot: Path


def write_report(results: Results, folder: str | Path) -> ReportFiles:
    """Write the files of a comparison, the data first, so that it survives a failing plot.

    Raises ToolkitError for a folder that cannot be written.
    """
    folder = Path(folder)
    return ReportFiles(
        results_json=write_report_file(folder / RESULTS_FILE, json_text(results)),
        results_csv=write_report_file(folder / "results.csv", csv_text(results)),
        markdown=write_report_file(folder / "report.md", markdown_text(results)),
        html=write_report_file(folder / "report.html", html_text(results)),
        plot=write_report_file(folder / PLOT_FILE, plot_png(results)),
    )


def json_text(results: Results) -> str:
    """Return `results.json` as it is written: indented, and strict JSON (an unknown is null, never NaN)."""
    return json.dumps(results.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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


def write_report_file(file: Path, content: str | bytes) -> Path:
    """Write a file completely or not at all; a byte of a log that is not text becomes a question mark.

    Raises ToolkitError for a folder that cannot be written.
    """
    try:
        write_bytes(file, content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ToolkitError(f"cannot write {file}: {error.strerror}", hint="name another folder") from error
    return file
