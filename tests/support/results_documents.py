"""Documents of the form of results.json that tests change, and the reports that are made of them."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar

from toolkit.compare import comparison_report
from toolkit.compare.results import Results, load_results
from toolkit.compare.significance import answer

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROOT = Path(__file__).parents[2]
GIB = 2**30
Document = dict[str, Any]
Rendered = TypeVar("Rendered")


def read(file: Path) -> Document:
    return load_results(file).model_dump(mode="json")


def _of_document(render: Callable[[Results], Rendered]) -> Callable[[Document], Rendered]:
    return lambda document: render(Results.model_validate(document))


answer_text = _of_document(lambda results: "\n".join(answer(results.as_reported()).lines))
notes = _of_document(comparison_report.notes)
html_text = _of_document(lambda results: comparison_report.report_text(results, "html"))
markdown_text = _of_document(lambda results: comparison_report.report_text(results, "md"))
csv_text = _of_document(comparison_report.csv_text)


def write_report(document: Document, folder: Path) -> None:
    comparison_report.write_report(Results.model_validate(document), folder)


def console_lines(results: Document) -> list[str]:
    from rich.console import Console

    console = Console(width=100, no_color=True, file=None, record=True, force_terminal=False, quiet=False)
    with console.capture() as captured:
        console.print(comparison_report.console_table(Results.model_validate(results)))
    return [line.rstrip() for line in captured.get().splitlines()]


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def bars(page: str, label: str) -> list[str]:
    return [line for line in page.splitlines() if 'class="bar"' in line and f">{label}<" in line]


def widths(bar: str) -> list[float]:
    return [float(found) for found in re.findall(r"<i[^>]*width:([\d.]+)%", bar)]
