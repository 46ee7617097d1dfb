"""Text on a terminal of 80 columns, wrapped and in colour, and in a pipe, as it is. Each command runs on a real pty."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LLAMA_8B_CONFIG
from terminals import on_a_terminal

from toolkit.screen_text import wrapped

COLUMNS = 80
H100 = ["--gpu", "h100", "--num-processes", "8"]
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FAULTY = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: no\nfsdp_config:\n  fsdp_version: 2\n"


def screen(*words: str, **variables: str) -> str:
    """Return what a command writes to a terminal of 80 columns."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"} | variables
    written = on_a_terminal([sys.executable, "-m", "toolkit", *words], environment, columns=COLUMNS)
    return written.replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "coloured"),
    [
        (["plan", str(LLAMA_8B_CONFIG), *H100, "--method", "dpo", "--parts"], "\x1b[32mfits\x1b[0m"),
        pytest.param(
            ["recommend", str(LLAMA_8B_CONFIG), *H100, "--lora-r", "16", "--all"],
            "\x1b[1muse       ddp",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ["plan", "Qwen/Qwen0-8b", "--gpu", "h1000"],
            "\x1b[1;31merror\x1b[0m: 'Qwen/Qwen0-8b' is not a folder",
            marks=pytest.mark.nightly,
        ),
        (["lint", "faulty.yaml"], ": \x1b[1;31merror\x1b[0m[starts-one-process]"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_no_line_is_wider_than_the_terminal_and_verdicts_are_in_colour(
    words: list[str], coloured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    Path("faulty.yaml").write_text(FAULTY)
    shown = screen(*words)
    assert coloured in shown
    too_wide = [line for line in COLOUR.sub("", shown).splitlines() if len(line) > COLUMNS and " " in line.strip()]
    assert too_wide == []
    piped = subprocess.run([sys.executable, "-m", "toolkit", *words], capture_output=True, text=True, check=False)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert sorted((piped.stdout + piped.stderr).split()) == sorted(COLOUR.sub("", shown).split())


def test_the_doctors_levels_are_in_colour_and_a_fix_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readings vary from run to run, so that a terminal's cannot be compared with a pipe's."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    shown = screen("doctor", "--gpus-per-node", "64", "--nvme-path", "/no/such/folder").splitlines()
    assert any(line.startswith("\x1b[1;31merror\x1b[0m: GPUs are missing: ") for line in shown)
    plain = [COLOUR.sub("", line) for line in shown]
    at = plain.index("  fix: SLURM: --gpus-per-node; docker run --gpus all; without a driver: install")
    assert plain[at + 1] == "    NVIDIA's"
    assert max(map(len, plain)) <= COLUMNS


@pytest.mark.nightly
def test_no_color_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    assert "\x1b" not in screen("plan", str(LLAMA_8B_CONFIG), *H100, "--preset", "zero3", NO_COLOR="1")
    assert "\x1b" not in screen("lint", "missing.yaml", TERM="dumb")


def test_a_command_that_is_to_be_copied_is_not_broken() -> None:
    command = f"next: toolkit train --preset zero2 --num-processes 8 -- {80 * 'x'} train.yaml"
    assert wrapped(command, 80) == [command]
    assert wrapped("", 80) == [""]
