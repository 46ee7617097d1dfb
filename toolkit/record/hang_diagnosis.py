"""Diagnosis of a hung run from its ranks' heartbeats: which rank is the cause, and where every rank is.

Ranks wait for each other in collectives, so the cause is the rank that does not wait with the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.record import status
from toolkit.record.heartbeat import Heartbeat, collect_stacks, main_thread, read_heartbeats, unresponsive_reason

# Frames of a main thread that waits for other ranks in a collective.
_COLLECTIVE = re.compile(r"\((distributed/|comm/|autograd/graph\.py|utils/operations\.py)")
HINT = "failure.json has the stacks of all ranks; slow steps need a longer `--hang-timeout-minutes`"


def stalled_seconds(heartbeats: Sequence[Heartbeat], *, now: float) -> float:
    """Return how long no rank has made progress; a run in which one rank does is not hung."""
    return now - max(heartbeat.progress_unix for heartbeat in heartbeats) if heartbeats else 0.0


def hang_failure(ranks: Path, *, limit_seconds: float) -> dict[str, Any]:
    """Return the failure.json of a hung run. This takes a few seconds, and briefly continues stopped ranks."""
    heartbeats = read_heartbeats(ranks)
    now = time.time()
    unresponsive = {heartbeat.rank: why for heartbeat in heartbeats if (why := unresponsive_reason(heartbeat, now=now))}
    stacks = collect_stacks(ranks, heartbeats)
    found = suspects(heartbeats, unresponsive=unresponsive, stacks=stacks)
    first = next((heartbeat for heartbeat in heartbeats if heartbeat.rank in found), None)
    return {
        "kind": status.TIMED_OUT,
        "phase": first and first.phase,
        "step": first.step if first else max((heartbeat.step for heartbeat in heartbeats), default=0),
        "rank": first and first.rank,
        "message": _message(heartbeats, found, unresponsive, stacks, limit_seconds),
        "hint": HINT,
        "invalid_input": False,
        "peak_bytes": None,
        "stacks": stacks,
    }


def suspects(
    heartbeats: Sequence[Heartbeat], *, unresponsive: Mapping[int, str], stacks: Mapping[str, str]
) -> list[int]:
    """Return the ranks that block the others: unresponsive ones, else those behind, else those outside a collective.

    Where that is all ranks or none, the cause is unknown, and the list is empty.
    """
    behind = min((_position(heartbeat) for heartbeat in heartbeats), default=None)
    waiting = [heartbeat.rank for heartbeat in heartbeats if _waits_in_collective(stacks.get(str(heartbeat.rank), ""))]
    for found in (
        list(unresponsive),
        [heartbeat.rank for heartbeat in heartbeats if _position(heartbeat) == behind],
        [heartbeat.rank for heartbeat in heartbeats if heartbeat.rank not in waiting],
    ):
        if 0 < len(found) < max(2, len(heartbeats)):
            return found
    return []


def _position(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.step, heartbeat.micro_steps


def _waits_in_collective(stacks: str) -> bool:
    return any(_COLLECTIVE.search(frame) for frame in main_thread(stacks)[:12])


def _message(
    heartbeats: Sequence[Heartbeat],
    found: Sequence[int],
    unresponsive: Mapping[int, str],
    stacks: Mapping[str, str],
    limit_seconds: float,
) -> str:
    def describe(heartbeat: Heartbeat) -> str:
        reason = unresponsive.get(heartbeat.rank) if heartbeat.rank in found else None
        return _describe(heartbeat, reason, stacks.get(str(heartbeat.rank), ""))

    message = f"no rank made progress for {limit_seconds / 60:.3g} minutes; "
    if not heartbeats:
        return message + "the cause is unknown: no rank has written a heartbeat"
    if found:
        return message + "; ".join(describe(heartbeat) for heartbeat in heartbeats if heartbeat.rank in found)
    return message + "the cause is unknown: " + "; ".join(map(describe, heartbeats))


def _describe(heartbeat: Heartbeat, reason: str | None, stacks: str) -> str:
    frames = main_thread(stacks)
    where = f", in {frames[0]}" if frames else ""
    state = f" does not respond ({reason})" if reason else ""
    return f"rank {heartbeat.rank}{state} in step {heartbeat.step + 1}, phase {heartbeat.phase}{where}"
