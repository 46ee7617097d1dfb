"""The client of the fork server: what it asks for, and what it does where there is no server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.launch import warm_start
from toolkit.launch.warm_start import (
    SOCKET_VARIABLE,
    ForkRequest,
    PythonCommand,
    RefusedError,
    WarmStart,
    fork_process,
    python_command,
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m", "toolkit.train", "--a"], PythonCommand(target="toolkit.train", is_module=True, arguments=["--a"])),
        (["-u", "-m", "toolkit.train"], PythonCommand(target="toolkit.train", is_module=True, arguments=[])),
        (["-P", "-m", "x"], PythonCommand(target="x", is_module=True, arguments=[], safe_path=True)),
        (["mine.py", "-m", "x"], PythonCommand(target="mine.py", is_module=False, arguments=["-m", "x"])),
        (["-c", "pass"], None),
        (["-X", "dev", "mine.py"], None),
        ([], None),
    ],
)
def test_only_a_module_or_a_script_can_be_forked(words: list[str], expected: PythonCommand | None) -> None:
    assert python_command([sys.executable, *words]) == expected


def test_another_program_cannot_be_forked() -> None:
    assert python_command(["/usr/bin/env", "mine.py"]) is None
    with pytest.raises(RefusedError, match="not this environment's Python"):
        fork_process("nowhere", ["tee", "log"], environment={})


def test_a_request_survives_its_json() -> None:
    request = ForkRequest(
        command=PythonCommand(target="mine.py", is_module=False, arguments=["--name", "é\n"]),
        environment={"A": "b"},
        working_directory="/tmp",
        cgroups="0::/\n",
        limits={"RLIMIT_NOFILE": (1024, -1)},
        cpus=[0, 1],
        niceness=0,
        umask=0o22,
        ignored_signals=[2],
    )
    assert ForkRequest.from_json(request.to_json()) == request


def test_a_server_that_fails_to_start_is_reported_once_and_means_cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RefusedError("the fork server did not start (exit code 1)")

    monkeypatch.setattr(warm_start, "start_fork_server", fail)
    lines: list[str] = []
    with WarmStart() as warm:
        assert [warm.socket_path(os.environ, on_line=lines.append) for _ in range(2)] == [None, None]
    assert lines == ["cold start: the fork server did not start (exit code 1)"]


def test_a_server_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "socket"))
    with WarmStart() as warm:
        assert warm.socket_path({}, on_line=print) == str(tmp_path / "socket")
