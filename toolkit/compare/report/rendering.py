"""Render reports from templates: self-contained HTML that makes no request, and Markdown for a pull request.

Nothing in the results is trusted. Every value is reduced to one printable line and escaped when a template writes it;
the filters `lines`, `breakable` and `code` do the same for what is not one line.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from toolkit.compare.report.bar_charts import memory_chart, speed_chart
from toolkit.compare.report.chart_colors import CSS_VARIABLES, LANES
from toolkit.compare.report.job_details import (
    environment_details,
    failure_details,
    job_details,
    method_details,
    probes_note,
    replay_command,
)
from toolkit.compare.report.line_charts import losses_chart, scaling_chart, timeline_charts
from toolkit.compare.report.result_tables import (
    comparison_table,
    efficiency_table,
    memory_table,
    overhead_table,
    parity_table,
    phases_table,
    probes_table,
    scaling_table,
    speed_table,
    trials_table,
)
from toolkit.compare.report.summary import notes, summary_sentence, title
from toolkit.compare.report.table_model import many_lines, one_line
from toolkit.compare.result_values import NOT_SUPPORTED
from toolkit.compare.results import Results
from toolkit.units import NOT_AVAILABLE

TEMPLATES = Path(__file__).parent / "templates"
PLOT_FILE = "comparison.png"
# Values of a status or parity cell that are not shown in red.
NO_ALARM = ("completed", "reference", "agrees", NOT_SUPPORTED, NOT_AVAILABLE)


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
    """Return a comparison as Markdown; it refers to the plot by its file name."""
    commands = (f"# {one_line(label)}\n{replay_command(row)}\n{row.command}" for label, row in results.labelled_rows)
    return render("report.md.j2", **_content(results), plot_file=Markup(PLOT_FILE), shell_commands="\n".join(commands))


def render(template: str, **values: Any) -> str:
    """Return a template with its values; `title` and `summary` are required by every template."""
    environment = _markdown_environment() if template.endswith(".md.j2") else _html_environment()
    return environment.get_template(template).render(**values)


def _content(results: Results) -> dict[str, Any]:
    """What both kinds of report show."""
    rows = results.labelled_rows
    return {
        "results": results,
        "title": title(results),
        "summary": summary_sentence(results),
        "notes": notes(results),
        "comparison": comparison_table(results),
        "failures": [(label, row, failure_details(results, row)) for label, row in rows if not row.completed],
        "parity": parity_table(results),
        "parity_messages": [(label, row.parity_message) for label, row in rows if row.parity_message],
        "probes": probes_table(results),
        "memory": memory_table(results),
        "phases": phases_table(results),
        "speed": speed_table(results),
        "efficiency": efficiency_table(results),
        "overhead": overhead_table(results),
        "scaling": scaling_table(results),
        "method": method_details(results),
        "job": job_details(results),
        "environment": environment_details(results),
    }


@functools.cache
def _html_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_html_value
    )
    environment.filters["lines"] = lambda text: Markup("\n").join(many_lines(text))
    environment.filters["breakable"] = _breakable
    environment.globals.update(
        style=Markup((TEMPLATES / "page.css").read_text("utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text("utf-8")),
        css_variables=CSS_VARIABLES,
        lanes=[(lane.key, lane.name) for lane in LANES],
        no_alarm=NO_ALARM,
    )
    return environment


@functools.cache
def _markdown_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_markdown_value,
        keep_trailing_newline=True,
    )
    environment.filters["code"] = _code
    return environment


def _html_value(value: object) -> object:
    """One line; the environment escapes it."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(text: str) -> Markup:
    """A name that a narrow page may break after an underscore."""
    return Markup(escape(one_line(text)).replace("_", Markup("_<wbr>")))


def _markdown_value(value: object) -> object:
    """One line from which no Markdown, table or HTML can break out."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(re.sub(r"([\\|`*\[\]])", r"\\\1", text))


def _code(text: str, language: str) -> Markup:
    """A block with a fence longer than any run of backticks inside it."""
    lines = many_lines(text)
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup("\n".join([f"{fence}{language}", *lines, fence]))
