"""A run that hangs, told from its ranks' pulses: which rank is the cause, and where every rank stands.

    >>> suspects([at_step_3, at_step_2], silent={}, stacks={})
    [1]

Ranks wait for each other in collectives, so the one that hangs is the one that does not wait with the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.runs import status
from toolkit.runs.pulses import Pulse, collect_stacks, main_thread, read_pulses, why_silent

# Frames of a main thread that waits for other ranks.
_COLLECTIVE = re.compile(r"\((distributed/|comm/|autograd/graph\.py|utils/operations\.py)")
HINT = "failure.json has the stacks of all ranks; steps that take so long need a longer `--hang-timeout-minutes`"


def stalled_seconds(pulses: Sequence[Pulse], *, now: float) -> float:
    """How long no rank has got on; a run in which one rank still does is not hanging."""
    return now - max(pulse.progress_unix for pulse in pulses) if pulses else 0.0


def hang_failure(ranks: Path, *, limit_seconds: float) -> dict[str, Any]:
    """failure.json of a run that hangs; takes a few seconds, and wakes ranks that were stopped."""
    pulses = read_pulses(ranks)
    now = time.time()
    silent = {pulse.rank: why for pulse in pulses if (why := why_silent(pulse, now=now))}
    stacks = collect_stacks(ranks, pulses)
    found = suspects(pulses, silent=silent, stacks=stacks)
    first = next((pulse for pulse in pulses if pulse.rank in found), None)
    return {
        "kind": status.TIMED_OUT,
        "phase": first and first.phase,
        "step": first.step if first else max((pulse.step for pulse in pulses), default=0),
        "rank": first and first.rank,
        "message": _message(pulses, found, silent, stacks, limit_seconds),
        "hint": HINT,
        "wrong_input": False,
        "peak_bytes": None,
        "stacks": stacks,
    }


def suspects(pulses: Sequence[Pulse], *, silent: Mapping[int, str], stacks: Mapping[str, str]) -> list[int]:
    """The ranks that hang the others: those that do not answer, else those behind, else those outside a collective.

    All or none of them tell nothing: an empty list.
    """
    behind = min((_place(pulse) for pulse in pulses), default=None)
    waiting = [pulse.rank for pulse in pulses if _waits(stacks.get(str(pulse.rank), ""))]
    for found in (
        list(silent),
        [pulse.rank for pulse in pulses if _place(pulse) == behind],
        [pulse.rank for pulse in pulses if pulse.rank not in waiting],
    ):
        if 0 < len(found) < max(2, len(pulses)):
            return found
    return []


def _place(pulse: Pulse) -> tuple[int, int]:
    return pulse.step, pulse.micro_steps


def _waits(stacks: str) -> bool:
    return any(_COLLECTIVE.search(frame) for frame in main_thread(stacks)[:12])


def _message(
    pulses: Sequence[Pulse],
    found: Sequence[int],
    silent: Mapping[int, str],
    stacks: Mapping[str, str],
    limit_seconds: float,
) -> str:
    told = [
        _one(pulse, silent.get(pulse.rank), stacks.get(str(pulse.rank), "")) for pulse in pulses if pulse.rank in found
    ]
    who = "; ".join(told) or "; ".join(_one(pulse, None, stacks.get(str(pulse.rank), "")) for pulse in pulses)
    which = "" if told else "which rank hangs cannot be told: "
    return f"no rank got on for {limit_seconds / 60:.3g} minutes; {which}{who or 'no rank has given a sign of life'}"


def _one(pulse: Pulse, silent: str | None, stacks: str) -> str:
    frames = main_thread(stacks)
    where = f", in {frames[0]}" if frames else ""
    state = f" does not answer ({silent})" if silent else ""
    return f"rank {pulse.rank}{state} in step {pulse.step + 1}, phase {pulse.phase}{where}"
