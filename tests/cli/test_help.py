"""Every `--help` renders, in the terminal and for the training script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from launching import cpu_environment, run_warm
from typer.testing import CliRunner

from toolkit import __version__
from toolkit.cli.program import app, main


def command_paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from command_paths(child, (*path, name))


PROGRAM: Any = typer.main.get_command(app)
PATHS = list(command_paths(PROGRAM))


def test_the_commands_are_found() -> None:
    assert {("presets",), ("preset", "show"), ("checkpoint", "convert"), ("compare",)} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "toolkit")
def test_help_describes_every_option_and_cuts_none_at_100_columns(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "-h"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    command = PROGRAM
    for name in path:
        command = command.commands[name]
    assert command.help
    assert [each.name for each in command.params if each.name != "help" and not each.help] == []
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert [option for option in options if not any(option in line.split() for line in lines)] == []
    assert not [line for line in lines if line.endswith("-")], "a flag is broken in half"


@pytest.mark.parametrize("words", [["--version"], ["plan", "--version"], ["checkpoint", "inspect", "--version"]])
def test_version_is_printed_anywhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"finetune-toolkit {__version__}\n")


@pytest.mark.launch
@pytest.mark.parametrize("module", ["toolkit.train", "toolkit.demo"])
def test_help_of_a_module_that_python_runs_renders(module: str) -> None:
    ended = run_warm([sys.executable, "-m", module, "--help"], cpu_environment())
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-2000:]
    assert "usage: " in ended.stdout.lower()
