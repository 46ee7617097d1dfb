"""Render reports from templates: self-contained HTML that makes no request, and Markdown for a pull request.

Nothing in the values is trusted. Each is reduced to one printable line and escaped when a template writes it; the
filters `lines`, `breakable` and `code` do the same for what is not one line.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from toolkit.errors import ToolkitError
from toolkit.files import write_bytes
from toolkit.report.charts import CSS_VARIABLES
from toolkit.report.tables import many_lines, one_line
from toolkit.units import NOT_AVAILABLE

TEMPLATES = Path(__file__).parent / "templates"
# Values of a status or parity cell that are not shown in red.
NO_ALARM = ("completed", "reference", "agrees", "not_supported", NOT_AVAILABLE)


def render(template: str, **values: Any) -> str:
    """Return a template with its values; `title` and `summary` are required by every template."""
    return _environment(markdown=template.endswith(".md.j2")).get_template(template).render(**values)


def write_report_file(file: Path, content: str) -> Path:
    """Write a file completely, unencodable text as `?`. Raises ToolkitError for a folder that cannot be written."""
    try:
        write_bytes(file, content.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ToolkitError(f"cannot write {file}: {error.strerror}", hint="name another folder") from error
    return file


@functools.cache
def _environment(*, markdown: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_markdown_value if markdown else _html_value,
        keep_trailing_newline=markdown,
    )
    environment.filters.update(code=_code, lines=lambda text: Markup("\n").join(many_lines(text)), breakable=_breakable)
    environment.globals.update(
        style=Markup((TEMPLATES / "page.css").read_text("utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text("utf-8")),
        css_variables=CSS_VARIABLES,
        no_alarm=NO_ALARM,
    )
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
