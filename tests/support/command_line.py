"""The command line in this process: what a user types, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from toolkit.cli.program import main


def exit_code(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def run_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = exit_code(*words)
    out, err = capsys.readouterr()
    return code, out, err


def json_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `toolkit WORDS --json` prints; nothing may be on stderr."""
    code, out, err = run_command([*words, "--json"], capsys)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found
