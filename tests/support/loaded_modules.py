"""Commands of the toolkit and pieces of code in processes of their own: how they end, and which modules they import."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching import ROOT

# Libraries that take seconds to import; no light command may load them.
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"}

# Most of a command's time is imports, so each is forked from one interpreter. Argument: the commands as JSON. A
# command's working directory is named after its number, its files with a suffix.
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
        os.mkdir(str(number))
        os.chdir(str(number))
        atexit.register(write_modules)
        main(words)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    with open(f"{number}.code", "w") as file:
        file.write(str(code))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedCommand:
    """What a command printed, left behind in its working directory and imported."""

    code: int
    err: bytes
    modules: frozenset[str]
    files: tuple[str, ...]


def run_forked_commands(
    commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None
) -> list[EndedCommand]:
    """Run each command in an empty folder below `folder`, in a process that has imported the command line only."""
    _run(FORK_EACH, json.dumps([list(words) for words in commands]), cwd=folder, variables=environment or {})
    return [
        EndedCommand(
            code=int((folder / f"{number}.code").read_text()),
            err=(folder / f"{number}.err").read_bytes(),
            modules=frozenset(json.loads((folder / f"{number}.modules").read_text())),
            files=tuple(path.name for path in (folder / str(number)).iterdir()),
        )
        for number in range(len(commands))
    ]


def loaded_after(code: str, cwd: Path = ROOT) -> set[str]:
    """Return the names in sys.modules of a fresh interpreter after `code`, whatever its exit code."""
    tail = "finally:\n    print('\\nLOADED', *sorted(sys.modules), flush=True)"
    done = _run(f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n{tail}", cwd=cwd)
    assert "Traceback" not in done.stderr
    return set(done.stdout.rpartition("\nLOADED ")[2].split())


def _run(
    program: str, *words: str, cwd: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(variables or {})}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=True)
