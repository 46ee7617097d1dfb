"""Every `--help` renders, and the ecosystem's habits on the command line: underscores, and other tools' words."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import ROOT, cpu_environment, run_warm

from toolkit import __version__
from toolkit.cli.program import program


def command_paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from command_paths(child, (*path, name))


PATHS = list(command_paths(program()))


def test_the_commands_are_found() -> None:
    assert {("presets",), ("preset", "show"), ("checkpoint", "convert"), ("compare",)} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "toolkit")
def test_help_describes_every_option_and_cuts_none_at_100_columns(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    code, text, _ = run_command([*path, "-h"], capsys)
    assert code == 0, text
    command = program()
    for name in path:
        command = command.commands[name]
    assert command.help
    assert [each.name for each in command.params if each.name != "help" and not each.help] == []
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert [option for option in options if not any(option in line.split() for line in lines)] == []
    assert not [line for line in lines if line.endswith("-") and line.split()[-1].startswith("--")], (
        "a flag is broken in half"
    )


@pytest.mark.launch
@pytest.mark.parametrize("module", ["toolkit.train", "toolkit.demo"])
def test_help_of_a_module_that_python_runs_renders(module: str) -> None:
    ended = run_warm([sys.executable, "-m", module, "--help"], cpu_environment())
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-2000:]
    assert "usage: " in ended.stdout.lower()


@pytest.mark.parametrize("words", ["--version", "plan --version", "checkpoint inspect --version"])
def test_version_is_printed_anywhere(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words.split(), capsys) == (0, f"finetune-toolkit {__version__}\n", "")


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("--num_processes 8 --lora_r 16", "--num-processes 8 --lora-r 16"),
        ("--world-size 8", "--num-processes 8"),
        ("--num_processes 8 --no-activation_checkpointing", "--num-processes 8 --no-activation-checkpointing"),
    ],
)
def test_other_spellings_of_an_option_are_the_same_option(
    other: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plan", str(ROOT / "tests" / "fixtures" / "llama-8b"), "--gpu", "h100", "--preset", "zero3"]
    assert json_of([*common, *other.split()], capsys) == json_of([*common, *ours.split()], capsys)


@pytest.mark.parametrize("word", ["--output", "--output-dir", "--output_dir"])
def test_compare_takes_its_folder_under_both_words(word: str) -> None:
    parent = program().make_context("toolkit", ["compare"])
    context = program().commands["compare"].make_context("compare", [word, "folder", "--preset", "ddp"], parent=parent)
    assert context.params["output_dir"] == Path("folder")
