"""Volumes and buckets that nodes mount, and the rule that the run folder lies in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from toolkit.errors import ToolkitError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMount:
    """A source, as the engine names it, and the folder where the nodes see it."""

    source: str
    path: PurePosixPath

    @classmethod
    def read(cls, text: str, *, expected: str) -> NodeMount:
        """Read SOURCE=/PATH. Raises ToolkitError for anything else."""
        source, _, path = text.rpartition("=")
        if not source or not path.startswith("/") or path == "/" or not text.isprintable():
            raise ToolkitError(f"--mount is {text[:80]!r}, expected SOURCE=/PATH", hint=f"`--mount {expected}`")
        return cls(source=source, path=PurePosixPath(path))


def check_mounted(output_dir: Path, mounts: Sequence[NodeMount], *, example: str) -> None:
    """Raise ToolkitError where the run folder is in no mount: each node would write into a folder of its own."""
    if not output_dir.is_absolute() or not any(output_dir.is_relative_to(mount.path) for mount in mounts):
        shown = ", ".join(str(mount.path) for mount in mounts) or "none"
        raise ToolkitError(
            f"--output_dir {output_dir} is in no folder that all nodes mount ({shown}): each would write its own",
            hint=f"`{example}`, and `--output_dir /runs/NAME`",
        )
