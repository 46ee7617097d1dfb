"""The DeepSpeed JSON that a YAML names, and where it may lie.

>>> from toolkit.lint.document import read_text
>>> naming_key(read_text("deepspeed: ds.json", "mine.yaml"))
'deepspeed'
"""

from __future__ import annotations

from pathlib import Path

from toolkit.lint.document import Document

IN_ACCELERATE = "deepspeed_config.deepspeed_config_file"
IN_TRAINER = "deepspeed"
LONGEST_PATH = 1024


def naming_key(doc: Document) -> str:
    """The key that names it, in an accelerate YAML or in Trainer arguments."""
    return IN_ACCELERATE if doc.has("deepspeed_config") else IN_TRAINER


def candidates(doc: Document) -> list[Path]:
    """From the working directory, as the libraries look; then beside the YAML and beside its folder, where it may
    have been meant. Empty where the value names no file."""
    named = doc.get(naming_key(doc))
    if not isinstance(named, str) or named in ("", "none") or named.startswith("{"):
        return []
    if len(named) > LONGEST_PATH or "\0" in named:
        return []
    folder = Path(doc.path).absolute().parent
    return [Path(named), folder / named, folder.parent / named, folder / Path(named).name]
