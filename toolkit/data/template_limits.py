"""Chat templates with limits on time, memory and output: a template is a program, and comes with a downloaded model.

A template cannot reach files or Python's internals, because it runs in jinja2's sandbox. But it can loop without end. A
timer cannot interrupt `2 ** 10 ** 9`, which is one operation, so the first conversations are rendered in a child that
the kernel limits.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.data.formats import Sample
from toolkit.errors import ToolkitError
from toolkit.files.documents import TOKENIZER, read_json_object, read_text
from toolkit.files.paths import user_path
from toolkit.units import GIB, MIB

# Rendering a conversation takes milliseconds; the kernel counts whole seconds.
CPU_SECONDS = 1
MEMORY_BYTES = 2 * GIB
# Of the child, which may have to wait for a core.
WALL_SECONDS = 30
MAX_TEMPLATE_BYTES = MIB
MAX_RENDERED_CHARACTERS = 64 * MIB

_HELLO = Sample(messages=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}])
_HINT = "fix it, or use another one: `--chat_template FILE`"


def read_template(file: str) -> str:
    """Return the chat template in a file that the user names. Raises ToolkitError if it cannot be read."""
    return read_text(user_path(file), max_bytes=MAX_TEMPLATE_BYTES)


def templates_of(model: Path) -> list[str]:
    """Return the chat templates in a model's folder, all that transformers may choose from; none without a tokenizer.

    Raises ToolkitError for a tokenizer_config.json that cannot be read.
    """
    files = [model / "chat_template.jinja", *sorted((model / "additional_chat_templates").glob("*.jinja"))]
    texts = [read_text(path, max_bytes=MAX_TEMPLATE_BYTES) for path in files if path.exists()]
    config = model / "tokenizer_config.json"
    given = read_json_object(config, limits=TOKENIZER).get("chat_template") if config.exists() else None
    named = [each.get("template") for each in given if isinstance(each, dict)] if isinstance(given, list) else [given]
    return texts + [each for each in named if isinstance(each, str)]


def check_templates(templates: Sequence[str], samples: Sequence[Sample] = (), *, name: str) -> None:
    """Render a greeting and the conversations among `samples` with each template; messages call them `name`.

    Raises ToolkitError for a template that is malformed, or takes more time, memory or text than any conversation.
    """
    conversations = [
        {"messages": sample.messages, "tools": sample.tools} for sample in [_HELLO, *samples] if sample.messages
    ]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_problem, args=(sender, templates, conversations), daemon=True)
    child.start()
    sender.close()
    try:
        ended = receiver.poll(WALL_SECONDS)
        problem = receiver.recv() if ended else f"it takes more than {WALL_SECONDS} s to render one conversation"
    except EOFError:
        child.join()
        problem = f"it takes more than {CPU_SECONDS} s to render one conversation"
        if child.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
            problem = f"rendering it ends with code {child.exitcode}"
    finally:
        child.kill()
        child.join()
        receiver.close()
    if problem is not None:
        raise ToolkitError(f"{name}: {problem}", hint=_HINT)


# -- in the child


def _send_problem(sender: Any, templates: Sequence[str], conversations: list[dict[str, Any]]) -> None:
    """Send the first problem of the templates, or None; the kernel ends this process above its limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: CPU_SECONDS}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    try:
        problems = (_problem(each, conversations) for each in templates)
        sender.send(next((problem for problem in problems if problem is not None), None))
    except MemoryError:
        sender.send("it takes more memory than any conversation")


def _problem(template: str, conversations: list[dict[str, Any]]) -> str | None:
    """What is wrong with a template whatever the rows are, or None.

    Other errors depend on the tokenizer and the rows, and are reported with the row by the rank that tokenizes it.
    """
    from jinja2 import TemplateSyntaxError

    try:
        compiled = _sandbox().from_string(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (RecursionError, ValueError, OverflowError, SyntaxError) as error:
        return f"it cannot be compiled: {type(error).__name__}"
    for conversation in conversations:
        characters = 0
        try:
            for part in compiled.generate(add_generation_prompt=False, **conversation):
                characters += len(part)
                if characters > MAX_RENDERED_CHARACTERS:
                    return f"it renders one conversation as more than {MAX_RENDERED_CHARACTERS:,} characters"
        except MemoryError:
            raise
        except Exception:  # a template is a program: it can raise anything
            continue
    return None


def _sandbox() -> Any:
    """The environment that transformers renders with (`transformers.utils.chat_template_utils`)."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}`: marks the text that the model generates, which changes nothing here."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    return environment
