"""Write a comparison as one self-contained page: no request leaves it, and nothing in it is trusted.

>>> html_text(results)[:15]                              # doctest: +SKIP
'<!doctype html>'
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.compare.report import facts
from toolkit.compare.report.cells import Cell, Column, Sheet
from toolkit.compare.report.charts import losses_chart, memory_bars, speed_bars
from toolkit.compare.report.details import environment_facts, failure_facts, job_facts
from toolkit.compare.report.palette import CURVES, MUTED, PARTS, SPEED
from toolkit.compare.report.sheets import comparison_sheet, memory_sheet, parity_sheet, speed_sheet
from toolkit.compare.report.summary import notes, summary_sentence, title
from toolkit.compare.results import Results

PAGE = {
    "light": ("#ffffff", "#1f2328", "#d8dee4", "#f3f5f7", "#b42318"),
    "dark": ("#14171a", "#e6e8ea", "#363c43", "#20252a", "#ff8a7a"),
}
"""Page, ink, line, band and alarm."""


def html_text(results: Results) -> str:
    """The whole page, its style and its few lines of script inlined."""
    results = facts.honest(results)
    here = Path(__file__).parent
    style, script = (here / "page.css").read_text("utf-8"), (here / "page.js").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title(results))}</title>\n<style>\n{_colours()}{style}</style>\n</head>\n<body>\n"
        f"{_body(results)}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _body(results: Results) -> str:
    sections = [
        f"<h1>{_text(title(results))}</h1>",
        f'<p class="summary">{_text(summary_sentence(results))}</p>',
        _sheet(results, comparison_sheet(results)),
        f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in notes(results))}</ul>',
        f"<h2>Model states of one rank</h2>{memory_bars(results)}",
        f"<h2>Tokens per second, all ranks</h2>{speed_bars(results)}",
        f"<h2>Loss by step</h2>{losses_chart(results)}",
        f"<h2>Failures</h2>{_failures(results)}",
        f"<h2>Parity</h2>{_parity(results)}",
        f"<h2>Memory of one rank</h2>{_sheet(results, memory_sheet(results))}",
        f"<h2>Speed</h2>{_sheet(results, speed_sheet(results))}",
        f"<h2>Job</h2>{_pairs(job_facts(results))}",
        f"<h2>Environment</h2>{_pairs(environment_facts(results))}",
        f"<h2>Commands</h2>{_commands(results)}",
    ]
    return "\n".join(sections)


def _failures(results: Results) -> str:
    blocks = [
        f'<h3>{_text(label)}: {row["status"]}</h3><p class="quiet">{_text(failure_facts(results, row))}</p>'
        f"<pre>{_lines(facts.many_lines(row['message'] or 'no message'))}</pre>"
        for label, row in zip(facts.labels(results), results["rows"], strict=True)
        if not facts.finished(row)
    ]
    return "".join(blocks) or "<p>Every row finished.</p>"


def _parity(results: Results) -> str:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    said = [f"<li>{_text(label)}: {_text(row['parity_message'])}</li>" for label, row in rows if row["parity_message"]]
    compared = f"Differences are relative to {_text(results['reference'])} with the same number of processes."
    listed = f"<ul>{''.join(said)}</ul>" if said else ""
    return f'<p class="quiet">{compared}</p>{_sheet(results, parity_sheet(results))}{listed}'


def _commands(results: Results) -> str:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    return "".join(
        f"<h3>{_text(label)}</h3><pre>{_lines(facts.many_lines(row['command']))}</pre>" for label, row in rows
    )


def _sheet(results: Results, sheet: Sheet) -> str:
    """A sortable table in a box of its own that scrolls sideways."""
    heads = "".join(_heading(column) for column in sheet.columns)
    rows = zip(sheet.rows, results["rows"], strict=True)
    body = "\n".join(
        f"<tr{_class('' if facts.comparable(row) else 'out')}>{_cells(sheet, cells)}</tr>" for cells, row in rows
    )
    table = f'<table class="sheet"><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _heading(column: Column) -> str:
    """A button, so that the keyboard sorts too."""
    button = f'<button type="button">{_lines(column.header.splitlines())}</button>'
    return f'<th scope="col"{_class("num" if column.numeric else "")}>{button}</th>'


def _cells(sheet: Sheet, cells: Sequence[Cell]) -> str:
    """The row's name is its heading; a cell carries the number that it is sorted by."""
    name, *others = cells
    written = [f'<th scope="row">{_breakable(name.text)}</th>']
    for column, cell in zip(sheet.columns[1:], others, strict=True):
        value = "" if cell.value is None else f' data-value="{cell.value!r}"'
        kind = "num" if column.numeric else "status"
        written.append(f"<td{_class(kind)}{value}>{_breakable(cell.text)}</td>")
    return "".join(written)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in pairs)
    return f'<div class="scroll"><table class="pairs"><tbody>{rows}</tbody></table></div>'


def _colours() -> str:
    """The palette as CSS variables, once for a light page and once for a dark one."""
    named = {f"p{index}": part for index, part in enumerate(PARTS)} | {
        f"c{index}": colour for index, colour in enumerate(CURVES)
    }
    named |= {"speed": SPEED, "muted": MUTED}
    light = [f"--{name}: {colour.light};" for name, colour in named.items()] + _page_colours("light")
    dark = [f"--{name}: {colour.dark};" for name, colour in named.items()] + _page_colours("dark")
    on_screen = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {' '.join(dark)} }} }}"
    return f":root {{ {' '.join(light)} }}\n{on_screen}\n"


def _page_colours(mode: str) -> list[str]:
    names = ("page", "ink", "line", "band", "alarm")
    return [f"--{name}: {value};" for name, value in zip(names, PAGE[mode], strict=True)]


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _text(text: str | None) -> str:
    return html.escape(facts.one_line(text))


def _breakable(name: str) -> str:
    """A name that a narrow page may break after an underscore."""
    return _text(name).replace("_", "_<wbr>")


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(html.escape(line) for line in lines)
