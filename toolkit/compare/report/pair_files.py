"""Write two comparisons side by side: on the screen, as Markdown, and as one self-contained page.

>>> write_pair(paired, Path("out")).html                 # doctest: +SKIP
PosixPath('out/before-and-after.html')
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.compare.report.console import sheet_table
from toolkit.compare.report.files import write_text_file
from toolkit.compare.report.html import page, plain_table
from toolkit.compare.report.markdown import heading_text, sheet_lines
from toolkit.compare.report.pairs import Paired, environment_sheet, pair_sentence, pair_sheet, pair_title

if TYPE_CHECKING:
    from rich.table import Table

NAME = "before-and-after"
NOTES = (
    "A ratio above 1: faster after. Its interval comes from the intervals of both speeds, so it is wider than theirs.",
    "The two were measured at different times: what else changed on the machine is part of the difference.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFiles:
    """Where the report lies."""

    markdown: Path
    html: Path


def write_pair(paired: Paired, folder: Path) -> PairFiles:
    """Both files, each whole or not at all."""
    return PairFiles(
        markdown=write_text_file(folder / f"{NAME}.md", pair_markdown(paired)),
        html=write_text_file(folder / f"{NAME}.html", pair_html(paired)),
    )


def pair_table(paired: Paired) -> Table:
    """For a terminal of 100 columns."""
    return sheet_table(pair_sheet(paired, narrow=True))


def pair_markdown(paired: Paired) -> str:
    """Sentence, rows, and what differs around them."""
    blocks = [
        f"# {heading_text(pair_title(paired))}",
        heading_text(pair_sentence(paired)),
        sheet_lines(pair_sheet(paired)),
        "\n".join(f"- {note}" for note in NOTES),
        "## Environment",
        sheet_lines(environment_sheet(paired)) if paired.environment else "Nothing that is recorded differs.",
    ]
    return "\n\n".join(blocks) + "\n"


def pair_html(paired: Paired) -> str:
    """The same, sortable."""
    import html

    around = (
        plain_table(environment_sheet(paired)) if paired.environment else "<p>Nothing that is recorded differs.</p>"
    )
    body = [
        f"<h1>{html.escape(pair_title(paired))}</h1>",
        f'<p class="summary">{html.escape(pair_sentence(paired))}</p>',
        plain_table(pair_sheet(paired)),
        f'<ul class="notes">{"".join(f"<li>{note}</li>" for note in NOTES)}</ul>',
        f"<h2>Environment</h2>{around}",
    ]
    return page(pair_title(paired), "\n".join(body))
