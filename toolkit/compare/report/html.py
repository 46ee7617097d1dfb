"""Write a comparison as one self-contained page: no request leaves it, and nothing in it is trusted.

>>> html_text(results)[:15]                              # doctest: +SKIP
'<!doctype html>'
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.compare.report import facts
from toolkit.compare.report.bars import memory_bars, speed_bars
from toolkit.compare.report.cells import Cell, Column, Sheet
from toolkit.compare.report.charts import losses_chart, scaling_chart, timelines
from toolkit.compare.report.details import (
    environment_facts,
    failure_facts,
    job_facts,
    method_facts,
    probes_note,
    replay_line,
)
from toolkit.compare.report.details_sheets import (
    beside_sheet,
    efficiency_sheet,
    ladder_sheet,
    probes_sheet,
    scaling_sheet,
    trials_sheet,
)
from toolkit.compare.report.palette import CURVES, LANES, MUTED, PARTS, REST, SPEED
from toolkit.compare.report.sheets import comparison_sheet, memory_sheet, parity_sheet, speed_sheet
from toolkit.compare.report.summary import notes, summary_sentence, title
from toolkit.compare.results import NOT_SUPPORTED, Results
from toolkit.units import NOT_AVAILABLE

NO_ALARM = ("completed", "reference", "agrees", NOT_SUPPORTED, NOT_AVAILABLE)
"""What a status or a parity may say in a row that is not compared, without being red."""
PAGE = {
    "light": ("#ffffff", "#1f2328", "#d8dee4", "#f3f5f7", "#b42318"),
    "dark": ("#14171a", "#e6e8ea", "#363c43", "#20252a", "#ff8a7a"),
}
"""Page, ink, line, band and alarm."""


def html_text(results: Results) -> str:
    """The whole page of a comparison."""
    results = facts.honest(results)
    return page(title(results), _body(results))


def page(name: str, body: str) -> str:
    """A page around a body, its style and its few lines of script inlined."""
    here = Path(__file__).parent
    style, script = (here / "page.css").read_text("utf-8"), (here / "page.js").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(name)}</title>\n<style>\n{_colours()}{style}</style>\n</head>\n<body>\n"
        f"{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def plain_table(sheet: Sheet) -> str:
    """A sortable table, all of whose rows are alike."""
    return _table(sheet, [True] * len(sheet.rows))


def _body(results: Results) -> str:
    sections = [
        f"<h1>{_text(title(results))}</h1>",
        f'<p class="summary">{_text(summary_sentence(results))}</p>',
        _sheet(results, comparison_sheet(results)),
        f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in notes(results))}</ul>',
        _section(_memory_title(results), memory_bars(results)),
        _section("Tokens per second, all ranks", speed_bars(results)),
        _section("Loss by step", losses_chart(results)),
        _section("Scaling", scaling_chart(results) + _maybe_sheet(results, scaling_sheet(results))),
        _section("One step of every rank", timelines(results)),
        _section("Largest micro-batch", _probes(results)),
        _section("Failures", _failures(results)),
        _section("Parity", _parity(results)),
        _section("Memory of one rank", _maybe_sheet(results, memory_sheet(results))),
        _section("Memory ladder: the first step of the largest rank", _maybe_sheet(results, ladder_sheet(results))),
        _section("Speed", _maybe_sheet(results, speed_sheet(results))),
        _section("Efficiency and cost", _maybe_sheet(results, efficiency_sheet(results))),
        _section("Communication, saving, starting", _maybe_sheet(results, beside_sheet(results))),
        _section("Trials", plain_table(trials_sheet(results)) if results["trials"] else ""),
        _section("Method", _pairs(method_facts(results))),
        _section("Job", _pairs(job_facts(results))),
        _section("Environment", _pairs(environment_facts(results)) + _links(results)),
        _section("Commands", _commands(results)),
    ]
    return "\n".join(section for section in sections if section)


def _section(name: str, content: str) -> str:
    """A heading and what is under it; nothing without content."""
    return f"<h2>{name}</h2>{content}" if content else ""


def _memory_title(results: Results) -> str:
    return "Model states of one rank" if facts.on_cpu(results) else "Memory of one rank, by part"


def _links(results: Results) -> str:
    links = results["environment"]["links"]
    return f'<h3>GPU links</h3><pre class="wide">{_lines(facts.many_lines(links))}</pre>' if links else ""


def _probes(results: Results) -> str:
    sheet = probes_sheet(results)
    return "" if sheet is None else f'<p class="quiet">{_text(probes_note(results))}</p>{plain_table(sheet)}'


def _failures(results: Results) -> str:
    blocks = [
        f"<h3>{_text(label)}: {row['status']}</h3>{_quiet(failure_facts(results, row))}"
        f"<pre>{_lines(facts.many_lines(row['message'] or 'no message'))}</pre>"
        for label, row in zip(facts.labels(results), results["rows"], strict=True)
        if not facts.finished(row)
    ]
    return "".join(blocks) or "<p>Every row finished.</p>"


def _quiet(text: str) -> str:
    return f'<p class="quiet">{_text(text)}</p>' if text else ""


def _parity(results: Results) -> str:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    said = [f"<li>{_text(label)}: {_text(row['parity_message'])}</li>" for label, row in rows if row["parity_message"]]
    compared = f"Differences are relative to {_text(results['reference'])} with the same number of processes."
    listed = f"<ul>{''.join(said)}</ul>" if said else ""
    return f'<p class="quiet">{compared}</p>{_sheet(results, parity_sheet(results))}{listed}'


def _commands(results: Results) -> str:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    said = '<p class="quiet">DIR is this comparison\'s folder: a row is run again and held against its interval.</p>'
    return said + "".join(
        f"<h3>{_text(label)}</h3><pre>{_lines([replay_line(row), *facts.many_lines(row['command'])])}</pre>"
        for label, row in rows
    )


def _maybe_sheet(results: Results, sheet: Sheet | None) -> str:
    return "" if sheet is None else _sheet(results, sheet)


def _sheet(results: Results, sheet: Sheet) -> str:
    """A table of the results' rows; those that cannot be compared stand back."""
    return _table(sheet, [facts.comparable(row) for row in results["rows"]])


def _table(sheet: Sheet, ordinary: Sequence[bool]) -> str:
    """A sortable table in a box of its own that scrolls sideways."""
    heads = "".join(_heading(column) for column in sheet.columns)
    body = "\n".join(
        f"<tr{_class('' if plain else 'out')}>{_cells(sheet, cells)}</tr>"
        for cells, plain in zip(sheet.rows, ordinary, strict=True)
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
        says = column.header in ("status", "parity") and cell.text not in NO_ALARM
        kind = "num" if column.numeric else "status" if says else ""
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
    named |= {"speed": SPEED, "muted": MUTED, "rest": REST} | {lane.key: lane for lane in LANES}
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
