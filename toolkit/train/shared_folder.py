"""One attempt owns the run folder, and every node sees it: found out before a model is loaded.

Rank 0 writes the attempt's id to `ranks/attempt.id`, and the other ranks look for it. The id also separates this
attempt's heartbeats and keys in the process group's store from those of an attempt that a restart has replaced.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import ToolkitError
from toolkit.record.heartbeat import read_attempt_id, write_attempt_id

# A network file system may answer from its cache for some seconds.
VISIBLE_SECONDS = 15.0


class Claim(NamedTuple):
    """What all ranks know of their attempt."""

    attempt_id: str
    nodes: tuple[str, ...]
    """Host names, each once, in the order of their ranks."""


def claim_folder(output_dir: Path, *, writes: bool, gather: Callable[[Any], list[Any]]) -> Claim:
    """Make this attempt the owner of the run folder, and return its id and nodes, the same on all ranks. Collective.

    `gather` returns every rank's value. Raises ToolkitError on every rank where the node of one does not see what
    rank 0 has written.
    """
    ranks = output_dir / "ranks"
    attempt_id = str(gather(uuid.uuid4().hex if writes else None)[0])
    if writes:
        ranks.mkdir(parents=True, exist_ok=True)
        write_attempt_id(ranks, attempt_id)
    nodes = _check_seen(output_dir, lambda: read_attempt_id(ranks) == attempt_id, gather)
    return Claim(attempt_id, nodes)


def check_visible(folder: Path, *, gather: Callable[[Any], list[Any]]) -> None:
    """Raise ToolkitError on every rank where the node of one does not see the folder. Collective."""
    _check_seen(folder, folder.is_dir, gather)


def _check_seen(folder: Path, is_seen: Callable[[], bool], gather: Callable[[Any], list[Any]]) -> tuple[str, ...]:
    """Return the names of the nodes, each once, in the order of their ranks."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (seen := is_seen()) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = gather((os.uname().nodename, [] if seen else [str(folder.absolute())]))
    check_shared(found)
    return tuple(dict.fromkeys(node for node, _ in found))


def check_shared(found: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise ToolkitError where a node does not see a folder; `found` is each rank's node and what it does not see.

    >>> check_shared([("node1", []), ("node2", ["/tmp/out"])])
    Traceback (most recent call last):
    toolkit.errors.ToolkitError: /tmp/out is not shared: node2 does not see what node1 has written there
      hint: name a folder on a file system that all nodes mount: `--output_dir DIR`
    """
    blind = {
        folder: sorted({node for node, unseen in found if folder in unseen}) for _, seen in found for folder in seen
    }
    if not blind:
        return
    folder, nodes = next(iter(blind.items()))
    see = "does" if len(nodes) == 1 else "do"
    raise ToolkitError(
        f"{folder} is not shared: {', '.join(nodes)} {see} not see what {found[0][0]} has written there",
        hint="name a folder on a file system that all nodes mount: `--output_dir DIR`",
    )
