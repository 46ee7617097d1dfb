"""Errors of a program: two lines and an exit code, whatever went wrong and whatever the machine is like."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from launching import ROOT, nightly
from loaded_modules import run_forked_commands

from toolkit.entry_point import exit_code_of
from toolkit.errors import RunFailed, ToolkitError

LLAMA_8B = str(ROOT / "tests" / "fixtures" / "llama-8b")
COMMANDS = {
    "version": ["--version"],
    "help": ["--help"],
    "presets": ["presets"],
    "json": ["presets", "--json"],
    "plan": ["plan", LLAMA_8B, "--gpu", "h100", "--preset", "zero3", "--num-processes", "8"],
    "recommend": ["recommend", LLAMA_8B, "--gpu", "h100", "--num-processes", "8"],
}


def run(redirect: str, *command: str, cwd: Path = ROOT) -> Any:
    line = ["bash", "-c", f'exec "$@" {redirect}', "bash", sys.executable, *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def work_that_raises(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


# -- errors


OWNER = "check who owns it and who may read and write it: `ls -ld`"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ToolkitError("no hf_abcdefghijkl0123", hint="type this"), 2, "error: no ***\n  hint: type this\n"),
        (RunFailed("it failed"), 1, "error: it failed\n"),
        (KeyboardInterrupt(), 1, "stopped\n"),
        (MemoryError(), 3, "error: the host has no memory left\n  hint: give the job more host memory\n"),
        (BrokenPipeError(), 1, ""),
        (PermissionError(13, "Permission denied", "/x"), 2, f"error: /x: Permission denied\n  hint: {OWNER}\n"),
        (OSError(36, "File name too long", "x" * 3), 2, "error: xxx: File name too long\n  hint: use a shorter name\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_two_lines_or_a_document_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(work_that_raises(error)) == code
    assert capsys.readouterr().err == message
    if message:
        assert exit_code_of(work_that_raises(error), as_json=True) == code
        found = json.loads(capsys.readouterr().out)["failure"]
        first, _, hint = message.removeprefix("error: ").rstrip("\n").partition("\n  hint: ")
        assert (found["message"], found["hint"], found["exit_code"]) == (first, hint or None, code)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_unexpected_error_is_two_lines_and_a_file_to_report(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(work_that_raises(ValueError("first\nsecond" + "x" * 500))) == 1
    first, second = capsys.readouterr().err.splitlines()
    [saved] = temporary.iterdir()
    assert first == r"error: unexpected ValueError: first\nsecond" + "x" * 165 + "..."
    assert second.startswith(f"  hint: it is a mistake in the toolkit: report it with {saved} ({ROOT}/docs/how-to/")
    text = saved.read_text(encoding="utf-8")
    assert text.startswith("finetune-toolkit ")
    assert "raise error\nValueError: first\nsecond" in text
    assert saved.stat().st_mode & 0o777 == 0o600


def test_no_secret_is_saved_or_printed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key-without-a-known-shape")
    monkeypatch.setattr(sys, "argv", ["toolkit", "train", "--", "--hub_token", "an-unusual-token"])
    message = "401 for hf_abcdefghijkl0123 and a-key-without-a-known-shape"
    assert exit_code_of(work_that_raises(ValueError(message))) == 1
    [saved] = temporary.iterdir()
    shown = capsys.readouterr().err + saved.read_text(encoding="utf-8")
    assert "401 for *** and ***" in shown
    assert "--hub_token '***'" in shown
    assert not re.search("hf_abc|known-shape|unusual-token", shown)


def test_a_traceback_that_cannot_be_saved_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert exit_code_of(work_that_raises(ValueError("why"))) == 1
    assert "run it again with TOOLKIT_DEBUG=1 and report it" in capsys.readouterr().err
    monkeypatch.setenv("TOOLKIT_DEBUG", "1")
    assert exit_code_of(work_that_raises(ValueError("why"))) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_keeps_its_hint_between_processes() -> None:
    again = pickle.loads(pickle.dumps(ToolkitError("what", hint="next")))
    assert (again.message, again.hint) == ("what", "next")


# -- streams


@pytest.mark.parametrize("command", ["json", *nightly("version", "help", "presets")])
def test_a_full_disk_as_stdout_is_two_lines(command: str) -> None:
    """A short and a long print, click's help, and a table."""
    ended = run(">/dev/full", "-m", "toolkit", *COMMANDS[command])
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: cannot write: No space left on device\n  hint: free disk space")
    assert len(ended.stderr.splitlines()) == 2


@pytest.mark.parametrize("command", ["plan", *nightly("version", "json")])
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(command: str) -> None:
    ended = run("> >(exec <&-)", "-m", "toolkit", *COMMANDS[command])
    assert ended.returncode in (0, 1)  # whether the reader is gone by then is a race
    assert ended.stderr == ""


def test_a_closed_stdout_is_not_the_next_file_that_is_opened(tmp_path: Path) -> None:
    code = "from toolkit.entry_point import exit_code_of; import sys\n"
    code += "def work():\n    with open(sys.argv[1], 'w') as file:\n        print('a'); file.write('b')\n"
    code += "    import subprocess; subprocess.run(['echo', 'c'])\nsys.exit(exit_code_of(work))"
    assert run(">&-", "-c", code, str(tmp_path / "file")).returncode == 0
    assert (tmp_path / "file").read_text() == "b"


# -- the machine


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "TOOLKIT_CACHE": "", "TMPDIR": "/none", "COLUMNS": "1"},
        *nightly({"COLUMNS": "wide", "TERM": "none", "TZ": "Nowhere/Land"}),
    ],
    ids=str,
)
def test_a_light_command_needs_nothing_of_the_machine(environment: dict[str, str], tmp_path: Path) -> None:
    ended = run_forked_commands([COMMANDS["presets"], COMMANDS["plan"]], tmp_path, environment)
    assert [command.code for command in ended] == [0, 0], [command.err for command in ended]


def test_a_working_directory_that_is_gone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = f"import os; os.rmdir({str(tmp_path / 'gone')!r}); from toolkit.__main__ import main; main(['presets'])"
    ended = run("", "-c", code, cwd=tmp_path / "gone")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: the working directory no longer exists\n  hint: ")


@pytest.fixture
def full_disk(tmp_path: Path) -> Any:
    """A disk of one page."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_no_file(full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = full_disk / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}}')
    before = config.read_text()
    for words in (["preset", "export", str(full_disk / "out")], ["lint", "--fix", "--in-place", str(config)]):
        code, _, printed = run_command(words, capsys)
        assert code == 2, printed
        assert "No space left on device\n  hint: " in printed
        assert len(printed.splitlines()) == 2
    assert config.read_text() == before


# -- Ctrl-C

INTERRUPT_AT = """
import os, signal, sys
def interrupt(event, details):
    if event == "import" and details[0] == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(interrupt)
from toolkit.__main__ import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("module", ["typer", *nightly("toolkit.cli.program", "toolkit.plan.recommend")])
def test_ctrl_c_is_one_line_also_during_imports(module: str) -> None:
    ended = run("", "-c", INTERRUPT_AT, module, *COMMANDS["recommend"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "stopped\n")
