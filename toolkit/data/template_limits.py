"""Chat templates with limits on time, memory and output: a template is a program, and comes with a downloaded model.

    check_templates(templates, conversations, name="the chat template of MODEL")

A template cannot reach files or Python's internals, because it runs in jinja2's sandbox. But it can loop without end. A
timer cannot interrupt `2 ** 10 ** 9`, which is one operation, so the first conversations are rendered in a process that
the kernel limits. That takes 0.1 s. `time_limit` is for the other conversations, in the rank that tokenizes them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from toolkit.data.formats import Sample
from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.reading import read_text, user_path
from toolkit.files.value_limits import TOKENIZER
from toolkit.units import GIB, MIB

# Rendering a conversation takes milliseconds.
CPU_SECONDS = 0.5
MEMORY_BYTES = 2 * GIB
# Of the process, which may have to wait for a core.
WALL_SECONDS = 30
MAX_TEMPLATE_BYTES = MIB
MAX_RENDERED_CHARACTERS = 64 * MIB

_RENDER = Path(__file__).with_name("render_templates.py")
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
    found = read_json_object(config, limits=TOKENIZER).get("chat_template") if config.exists() else None
    named = [each.get("template") for each in found if isinstance(each, dict)] if isinstance(found, list) else [found]
    return texts + [each for each in named if isinstance(each, str)]


def check_templates(templates: Sequence[str], samples: Sequence[Sample] = (), *, name: str) -> None:
    """Render a greeting and the conversations among `samples` with each template; messages call them `name`.

    Raises ToolkitError for a template that is malformed, or takes more time, memory or text than any conversation.
    """
    conversations = [
        {"messages": sample.messages, "tools": sample.tools} for sample in [_HELLO, *samples] if sample.messages
    ]
    job = {
        "templates": list(templates),
        "conversations": conversations,
        "limits": {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY_BYTES},
        "sizes": {"max_characters": MAX_RENDERED_CHARACTERS},
    }
    if not templates:
        return
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-X", "utf8", str(_RENDER)],
            input=json.dumps(job).encode(),
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_slow(name) from None
    if -ended.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise _too_slow(name)
    if ended.returncode < 0:
        raise ToolkitError(f"{name}: rendering it ends in {signal.Signals(-ended.returncode).name}", hint=_HINT)
    assert ended.returncode == 0, ended.stderr.decode(errors="replace")
    problem = json.loads(ended.stdout)
    if problem is not None:
        raise ToolkitError(f"{name}: {problem}", hint=_HINT)


def _too_slow(name: str) -> ToolkitError:
    return ToolkitError(f"{name}: it takes more than {CPU_SECONDS:g} s to render one conversation", hint=_HINT)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after some seconds, where this is the main thread of its process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
