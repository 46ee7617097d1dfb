"""Write the report's five files into a folder, each whole or not at all.

>>> write_report(results, "out/comparison").html         # doctest: +SKIP
PosixPath('out/comparison/report.html')
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.compare.report import facts
from toolkit.compare.report.csvfile import csv_text
from toolkit.compare.report.html import html_text
from toolkit.compare.report.markdown import PLOT_FILE, markdown_text
from toolkit.compare.report.plot import plot_png
from toolkit.compare.results import RESULTS_FILE, Results
from toolkit.errors import ToolkitError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """Where the report lies, in the order in which it is written."""

    results_json: Path
    results_csv: Path
    markdown: Path
    html: Path
    plot: Path


def write_report(results: Results, folder: str | Path) -> ReportFiles:
    """The files of a comparison, from its results alone; the data first, so that it outlives a failing plot."""
    results = facts.honest(results)
    folder = Path(folder)
    return ReportFiles(
        results_json=_write(folder / RESULTS_FILE, lambda: _utf8(json_text(results))),
        results_csv=_write(folder / "results.csv", lambda: _utf8(csv_text(results))),
        markdown=_write(folder / "report.md", lambda: _utf8(markdown_text(results))),
        html=_write(folder / "report.html", lambda: _utf8(html_text(results))),
        plot=_write(folder / PLOT_FILE, lambda: plot_png(results)),
    )


def json_text(results: Results) -> str:
    """results.json as it is written: indented, and strict JSON (NaN is null)."""
    return json.dumps(facts.honest(results), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text_file(file: Path, text: str) -> Path:
    """A text, whole or not at all."""
    return _write(file, lambda: _utf8(text))


def _write(file: Path, render: Callable[[], bytes]) -> Path:
    """To a temporary name beside the file, then renamed: a reader sees the old file or the new one."""
    content = render()
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ToolkitError(f"cannot write {file}: {error.strerror}", hint="name another folder") from error
    return file


def _utf8(text: str) -> bytes:
    """A log's undecodable byte becomes a question mark instead of an error."""
    return text.encode("utf-8", errors="replace")
