"""Habits of the ecosystem on the command line: underscores, other tools' words, hints, defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import run_command

from toolkit.cli.program import app

ROOT = Path(__file__).parents[2]
LLAMA_8B = str(ROOT / "tests" / "fixtures" / "llama-8b")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    """Return exit code, stdout and stderr."""
    return run_command(words, capsys)


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        (["--num_processes", "8", "--lora_r", "16"], ["--num-processes", "8", "--lora-r", "16"]),
        (["--world-size", "8"], ["--num-processes", "8"]),
        (
            ["--num_processes", "8", "--no-activation_checkpointing"],
            ["--num-processes", "8", "--no-activation-checkpointing"],
        ),
    ],
)
def test_other_spellings_of_an_option_are_the_same_option(
    other: list[str], ours: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plan", LLAMA_8B, "--gpu", "h100", "--preset", "zero3", "--json"]
    plans = [json.loads(run(capsys, *common, *words)[1]) for words in (other, ours)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("word", ["--output", "--output-dir", "--output_dir"])
def test_compare_takes_its_folder_under_both_words(word: str) -> None:
    program: Any = typer.main.get_command(app)
    parent = program.make_context("toolkit", ["compare"])
    context = program.commands["compare"].make_context("compare", [word, "folder", "--preset", "ddp"], parent=parent)
    assert context.params["output_dir"] == Path("folder")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["train", "--preset", "ddp", "--max_steps", "3"], "no such option: --max", "training arguments go after `--`"),
        (["train", "--preset", "ddp", "--nonsense", "x"], "no such option: --nonsense", "see `toolkit train --help`"),
        (["plan", LLAMA_8B, "--num-processes"], "requires an argument", "--help"),
        (["plam"], "no such command 'plam'", "toolkit --help"),
    ],
)
def test_a_usage_error_is_two_lines_that_say_what_to_type(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    first, second = err.strip().splitlines()
    assert message in first
    assert hint in second
