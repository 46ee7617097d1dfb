"""The command line in this process: what a user types, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from toolkit.cli.program import main


def run_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `toolkit WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def json_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `toolkit WORDS --json` prints; nothing may be on stderr."""
    code, out, err = run_command([*words, "--json"], capsys)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found
