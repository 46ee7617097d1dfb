"""Render chat templates in this process, which may be killed for it: the child of `toolkit.data.template_limits`.

Reads JSON from stdin: `templates`, `conversations` and the `limits`. Prints the first problem as JSON, or null.

The environment is the one that transformers 5.14 renders with (`transformers.utils.chat_template_utils`), which takes a
second to import. Nothing of the toolkit is imported either: this file runs alone.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: marks the text that the model generates, which changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def sandbox() -> jinja2.Environment:
    """Return an environment in which a template reaches nothing but its values."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def limit_resources(*, cpu_seconds: float, memory_bytes: int) -> None:
    """Let the kernel end this process after some more CPU seconds, rounded up: it only knows whole ones."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    seconds = math.ceil(time.process_time() + cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def problem_of(template: str, conversations: list[dict[str, Any]], *, max_characters: int) -> str | None:
    """Return what is wrong with a template whatever the rows are, or None.

    Other errors depend on the tokenizer and the rows, and are reported with the row by the rank that tokenizes it.
    """
    try:
        compiled = sandbox().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (RecursionError, ValueError, OverflowError, SyntaxError) as error:
        return f"it cannot be compiled: {type(error).__name__}"
    for conversation in conversations:
        characters = 0
        try:
            for part in compiled.generate(add_generation_prompt=False, **conversation):
                characters += len(part)
                if characters > max_characters:
                    return f"it renders one conversation as more than {max_characters:,} characters"
        except MemoryError:
            raise
        except Exception:  # a template is a program: it can raise anything
            continue
    return None


def main() -> None:
    """Print the first problem of the templates."""
    job = json.load(sys.stdin)
    limit_resources(**job["limits"])
    try:
        found = (problem_of(each, job["conversations"], **job["sizes"]) for each in job["templates"])
        print(json.dumps(next((problem for problem in found if problem is not None), None)))
    except MemoryError:
        print(json.dumps("it takes more memory than any conversation"))


if __name__ == "__main__":
    main()
