"""Printing, writing or submitting a job file."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError
from toolkit.files.atomic_write import write_text

SUBMIT_SECONDS = 600.0


def deliver(text: str, *, output: Path | None, submit: Sequence[str] | None, suffix: str) -> None:
    """Print a job file, or write it to `output`; with `submit`, give it to that command as its last word.

    Raises ToolkitError where the file cannot be written or the command is not installed, RunFailed where it fails.
    """
    if output is not None:
        try:
            write_text(output, text)
        except OSError as error:
            raise ToolkitError(f"{output} cannot be written: {error.strerror}", hint="`--output FILE`") from None
        print_message(f"wrote {output}")
    elif submit is None:
        print(text, end="")
    if submit is not None:
        _submit(text, output=output, command=submit, suffix=suffix)


def _submit(text: str, *, output: Path | None, command: Sequence[str], suffix: str) -> None:
    if shutil.which(command[0]) is None:
        raise ToolkitError(
            f"`{command[0]}` is not on the PATH: the job was not submitted",
            hint="run this on a login node, or write the file with `--output FILE` and submit it there",
        )
    with tempfile.TemporaryDirectory(prefix="toolkit-job-") as folder:
        path = output or Path(folder, f"job{suffix}")
        if output is None:
            path.write_text(text)
        words = [*command, str(path)]
        print_message(shlex.join(words))
        try:
            done = subprocess.run(words, timeout=SUBMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"`{command[0]}` did not answer in {SUBMIT_SECONDS / 60:g} minutes") from None
    if done.returncode != 0:
        raise RunFailed(f"`{shlex.join(command)}` failed with exit code {done.returncode}; its message is above")
