"""Write a comparison as Markdown for a pull request; the plot stands beside it by relative name.

>>> markdown_text(results).splitlines()[0]               # doctest: +SKIP
'# Comparison: 6 presets on 2 CPU processes'
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from toolkit.compare.report import facts
from toolkit.compare.report.cells import Sheet
from toolkit.compare.report.details import environment_facts, failure_facts, job_facts, method_facts, replay_line
from toolkit.compare.report.details_sheets import (
    beside_sheet,
    efficiency_sheet,
    ladder_sheet,
    probes_sheet,
    scaling_sheet,
)
from toolkit.compare.report.sheets import comparison_sheet, memory_sheet, parity_sheet, speed_sheet
from toolkit.compare.report.summary import notes, summary_sentence, title
from toolkit.compare.results import Results

PLOT_FILE = "comparison.png"


def markdown_text(results: Results) -> str:
    """Summary, table and plot first; then what failed, the details, and how to run it again."""
    results = facts.honest(results)
    blocks = [
        f"# {heading_text(title(results))}",
        heading_text(summary_sentence(results)),
        sheet_lines(comparison_sheet(results)),
        f"![Model-state bytes, tokens/s and loss of each preset]({PLOT_FILE})",
        "\n".join(f"- {note}" for note in notes(results)),
        *_maybe("Largest micro-batch", probes_sheet(results)),
        *_failures(results),
        *_parity(results),
        *_maybe("Memory of one rank", memory_sheet(results)),
        *_maybe("Memory ladder: the first step of the largest rank", ladder_sheet(results)),
        *_maybe("Speed", speed_sheet(results)),
        *_maybe("Efficiency and cost", efficiency_sheet(results)),
        *_maybe("Communication, saving, starting", beside_sheet(results)),
        *_maybe("Scaling", scaling_sheet(results)),
        "## Method",
        _pairs(method_facts(results)),
        "## Job",
        _pairs(job_facts(results)),
        "## Environment",
        _pairs(environment_facts(results)),
        *_links(results),
        *_commands(results),
    ]
    return "\n\n".join(blocks) + "\n"


def _maybe(name: str, sheet: Sheet | None) -> list[str]:
    return [] if sheet is None else [f"## {name}", sheet_lines(sheet)]


def _failures(results: Results) -> list[str]:
    rows = [(label, row) for label, row in zip(facts.labels(results), results["rows"], strict=True)]
    failed = [(label, row) for label, row in rows if not facts.finished(row)]
    blocks = ["## Failures"]
    for label, row in failed:
        said = failure_facts(results, row)
        blocks.append(f"**{heading_text(label)}: {row['status']}**" + (f" ({heading_text(said)})" if said else ""))
        blocks.append(_code(facts.many_lines(row["message"] or "no message"), "text"))
    return [*blocks, *([] if failed else ["Every row finished."])]


def _parity(results: Results) -> list[str]:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    said = [
        f"- {heading_text(label)}: {heading_text(row['parity_message'])}"
        for label, row in rows
        if row["parity_message"]
    ]
    compared = f"Differences are relative to {heading_text(results['reference'])} with the same number of processes."
    return ["## Parity", compared, sheet_lines(parity_sheet(results)), *(["\n".join(said)] if said else [])]


def _links(results: Results) -> list[str]:
    links = results["environment"]["links"]
    return [_code(facts.many_lines(links), "text")] if links else []


def _commands(results: Results) -> list[str]:
    lines = [
        line
        for label, row in zip(facts.labels(results), results["rows"], strict=True)
        for line in (f"# {facts.one_line(label)}", replay_line(row), *facts.many_lines(row["command"]))
    ]
    return ["## Commands", _code(lines, "bash")]


def sheet_lines(sheet: Sheet) -> str:
    """A table."""
    header = [heading_text(column.header) for column in sheet.columns]
    rule = ["---:" if column.numeric else ":---" for column in sheet.columns]
    body = [[heading_text(cell.text) for cell in cells] for cells in sheet.rows]
    return "\n".join(_line(cells) for cells in [header, rule, *body])


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(
        [
            _line(["", ""]),
            _line([":---", ":---"]),
            *(_line([heading_text(name), heading_text(value)]) for name, value in pairs),
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def heading_text(text: str | None) -> str:
    """One line that no Markdown, table or HTML can break out of."""
    return re.sub(r"([\\|`*\[\]])", r"\\\1", html.escape(facts.one_line(text), quote=False))


def _code(lines: Sequence[str], language: str) -> str:
    """A fence longer than any run of backticks inside it."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])
