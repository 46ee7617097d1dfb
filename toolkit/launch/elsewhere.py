"""Resume under another preset or world size: the checkpoint is converted first, in a process of its own.

>>> with resumable(preset, num_processes=4, arguments=arguments, argv=argv, say=print) as argv: ...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.presets import Preset
from toolkit.runs.checkpoints import LATEST_WORDS, Manifest, latest_complete, read_checkpoint

RESUME_FOLDER = ".resume"


@contextmanager
def resumable(
    preset: Preset,
    *,
    num_processes: int,
    arguments: dict[str, Any],
    argv: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[list[str]]:
    """The training arguments, with a converted checkpoint in the place of one that cannot be loaded as it is.

    The converted copy is removed at the end, however the run ended: the next resume starts from a checkpoint again.
    """
    checkpoint = named_checkpoint(arguments)
    manifest = None if checkpoint is None else read_checkpoint(checkpoint).manifest
    if checkpoint is None or manifest is None or not differs(manifest, preset, num_processes):
        yield list(argv)
        return
    folder = Path(str(arguments["output_dir"])) / RESUME_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / f"checkpoint-{manifest['step']}"
    try:
        say(
            f"{checkpoint} is of {manifest.get('preset')} on {manifest.get('world_size')} processes:"
            f" converting it for {preset.name} on {num_processes}"
        )
        convert(checkpoint, out, preset, num_processes)
        yield [*argv, "--resume_from_checkpoint", str(out)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def named_checkpoint(arguments: dict[str, Any]) -> Path | None:
    """What `--resume_from_checkpoint` means: a folder, or the newest complete one of the output folder."""
    named = arguments.get("resume_from_checkpoint")
    if named in (None, "", False) or str(named).lower() in ("false", "no", "none"):
        return None
    if str(named).lower() not in LATEST_WORDS:
        return Path(str(named))
    found = latest_complete(Path(str(arguments["output_dir"])), deep=False, say=lambda _: None)
    return None if found is None else found.path


def differs(manifest: Manifest, preset: Preset, num_processes: int) -> bool:
    """Whether the run that is asked for cannot load the checkpoint as it lies."""
    engine = "none" if preset.engine == "ddp" and num_processes == 1 else preset.engine
    asked = (engine, preset.sharding, num_processes)
    return asked != (manifest.get("engine"), manifest.get("sharding"), manifest.get("world_size"))


def convert(checkpoint: Path, out: Path, preset: Preset, num_processes: int) -> None:
    """`toolkit checkpoint convert` as a child: the command line imports no torch."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--preset", str(preset.accelerate_config_path), "--num-processes", str(num_processes)]
    command = [sys.executable, "-m", "toolkit.checkpoint", "convert", str(checkpoint), str(out), *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        first, _, hint = ended.stderr[ended.stderr.rfind("error: ") :].partition("\n  hint: ")
        message = first.removeprefix("error: ").strip() or f"the conversion ended with code {ended.returncode}"
        raise ToolkitError(f"{checkpoint} cannot be resumed here: {message}", hint=hint.strip() or None)
