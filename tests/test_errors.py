"""Errors of the toolkit."""

from __future__ import annotations

import pickle

from toolkit.errors import ToolkitError


def test_an_error_keeps_its_hint_between_processes() -> None:
    again = pickle.loads(pickle.dumps(ToolkitError("what", hint="next")))
    assert (again.message, again.hint) == ("what", "next")
