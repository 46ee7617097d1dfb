"""Commands of the toolkit, each in a process that is forked from one interpreter: most of their time is imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching import ROOT

# Argument: the commands as JSON. A command's working directory is named after its number, its files with a suffix.
FORK_EACH = """
import atexit, json, os, sys
import toolkit.cli.program
from toolkit.__main__ import main

def write_modules():
    with open(f"../{number}.modules", "w") as file:
        json.dump(sorted(sys.modules), file)

for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{suffix}", os.O_WRONLY | os.O_CREAT), stream)
        os.chdir(str(number))
        atexit.register(write_modules)
        main(words)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    with open(f"{number}.code", "w") as file:
        file.write(str(code))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedCommand:
    """What a command printed, left behind and imported."""

    code: int
    out: bytes
    err: bytes
    modules: frozenset[str]
    files: tuple[str, ...]
    """In its working directory, which was empty."""


def run_forked_commands(
    commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None
) -> list[EndedCommand]:
    """Run each command in an empty folder below `folder`, in a process that has imported the command line only."""
    for number in range(len(commands)):
        (folder / str(number)).mkdir()
    subprocess.run(
        [sys.executable, "-c", FORK_EACH, json.dumps([list(words) for words in commands])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        timeout=300,
        check=True,
    )
    return [
        EndedCommand(
            code=int((folder / f"{number}.code").read_text()),
            out=(folder / f"{number}.out").read_bytes(),
            err=(folder / f"{number}.err").read_bytes(),
            modules=frozenset(json.loads((folder / f"{number}.modules").read_text())),
            files=tuple(path.name for path in (folder / str(number)).iterdir()),
        )
        for number in range(len(commands))
    ]
